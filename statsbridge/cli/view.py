"""`statsbridge view`: the live page in a browser."""

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from .ls import DEFAULT_DIRECTORY
from .output import command


def view(
    target: Annotated[
        str,
        typer.Argument(metavar="[DIR|RUN]", help="The folder that holds the runs, or one run's folder, id or name."),
    ] = DEFAULT_DIRECTORY,
    *,
    port: Annotated[int, typer.Option(help="The port on 127.0.0.1; 0 for a free one.", min=0, max=65535)] = 0,
    browser: Annotated[
        bool | None,
        typer.Option("--browser/--no-browser", help="Open it in a browser; by default where there is a screen."),
    ] = None,
    directory: Annotated[
        str, typer.Option("--dir", help="The folder in which a run is looked for by id or name.")
    ] = DEFAULT_DIRECTORY,
) -> None:
    """Show runs as a page: pictures, findings and the module tree, live while a run is written.

    The page is served to this machine alone, to whoever has the address that is printed. Ctrl-C ends it.
    """
    with command():
        from statsbridge.view.app.page import Page
        from statsbridge.view.app.serve import address, make_server

        folder, run = _folder_and_run(target, directory)
        page = Page(folder)
        page.prepare(run)
        server = make_server(page, port)
        url = address(page, server, run)
        typer.echo(f"statsbridge: {url}")
        typer.echo(
            f"from another machine: ssh -L {server.server_port}:127.0.0.1:{server.server_port} {socket.gethostname()}, "
            "then open the same address there",
        )
        typer.echo("Ctrl-C ends it.")
        sys.stdout.flush()
        if _has_screen() if browser is None else browser:
            import webbrowser

            webbrowser.open(url)
        try:
            server.serve_forever()
        finally:
            server.server_close()


def _folder_and_run(target: str, directory: str) -> tuple[Path, str]:
    """The folder whose runs are shown, and the id of the run to begin with, "" for the list."""
    from statsbridge.log import resolve_run

    folder = Path(target)
    if (folder / "run.json").is_file():
        return folder.absolute().parent, folder.absolute().name
    if folder.is_dir():
        return folder.absolute(), ""
    if target == DEFAULT_DIRECTORY:  # before the first run it is only not there yet
        return folder.absolute(), ""
    found = resolve_run(target, directory)
    return found.parent, found.name


def _has_screen() -> bool:
    """Whether a browser that is opened here would be seen by who asked for it."""
    if "SSH_CONNECTION" in os.environ:
        return False
    if sys.platform in {"darwin", "win32"}:
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))

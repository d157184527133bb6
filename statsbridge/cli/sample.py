"""`statsbridge sample`: change the sampling of a training that is running, without touching its process."""

import sys
from typing import Annotated

import typer

from .output import command, page, print_line, show_page

EXIT_NOBODY_LISTENS = 1


def sample(
    run: Annotated[str, typer.Argument(help="A run's folder, id, unique beginning of an id, or name.")] = "latest",
    *,
    every: Annotated[int | None, typer.Option(metavar="N", help="Sample each N-th step.")] = None,
    steps: Annotated[
        int | None, typer.Option("--for", metavar="N", help="For so many training steps, then as before.")
    ] = None,
    sites: Annotated[
        str | None, typer.Option(metavar="SITE,…", help="What to collect, such as activation,update (globs).")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Sample no step; the training and its scalars go on.")] = False,
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = "statsbridge-runs",
) -> None:
    """Change how often, and what, a running training is sampled. Exit status 1 if no process is recording the run."""
    with command():
        from statsbridge.errors import ConfigError
        from statsbridge.log import resolve_run
        from statsbridge.log.control import Wish, ask, find_sites, live_writers, whoami
        from statsbridge.log.runs import run_state

        path = resolve_run(run, directory)
        chosen = None if sites is None else find_sites(sites)
        wish = Wish(every=every, steps=steps, sites=chosen, stop=stop, asked_by=whoami())
        writers = live_writers(path)
        console = page()
        if not writers:
            print_line(console, f"run {path.name} is {run_state(path)}: nobody listens, nothing was changed")
            show_page(console)
            raise typer.Exit(EXIT_NOBODY_LISTENS)
        if len(writers) > 1:
            raise ConfigError(
                f"run {path.name} is recorded by {len(writers)} processes, which would not change their sampling at "
                "the same step: nothing was changed. Start it with another every="
            )
        ask(path, wish)
        writer = writers[0]
        print_line(console, f"run {path.name}: {wish}")
        print_line(
            console,
            f"asked process {writer.pid} on {writer.host}: it follows about a second after its next step, and records "
            "an event sampling_changed",
        )
        show_page(console)
        sys.stdout.flush()

"""`statsbridge sync`: deliver what a run's mirrors have not got yet, or the whole run to a new one."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .output import Column, command, one_line, page, print_line, print_table, progress_bar, show_page

if TYPE_CHECKING:
    from statsbridge.mirror.sync import Delivered

EXIT_REMAINING = 1


def sync(
    run: Annotated[str, typer.Argument(help="A run's folder, id, unique beginning of an id, or name.")] = "latest",
    *,
    to: Annotated[
        str | None,
        typer.Option(metavar="BACKEND[:TARGET]", help="Only to this tracker, which need not be a mirror of it yet."),
    ] = None,
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = "statsbridge-runs",
) -> None:
    """Deliver to the trackers what is on disk and has not arrived there. Exit status 1 if something remains."""
    with command():
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        from statsbridge.log import resolve_run
        from statsbridge.mirror.sync import sync as deliver

        path = resolve_run(run, directory)
        columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        said: set[str] = set()

        with progress_bar(*columns) as bar:
            task = bar.add_task("rows")

            def report(kind: str, message: str, *, cause: str, warn: bool) -> None:
                if cause not in said:
                    said.add(cause)
                    told = f"statsbridge: {one_line(message)}"
                    bar.console.print(told, markup=False, highlight=False, soft_wrap=True)

            def progress(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            results = deliver(path, to, report=report, progress=progress)
        _print(results)
        if any(result.remaining or result.status != "finished" for result in results):
            raise typer.Exit(EXIT_REMAINING)


def _print(results: "list[Delivered]") -> None:
    console = page()
    print_table(
        console,
        [
            Column("tracker", [(one.backend, "") for one in results]),
            Column("where", [(one.address, "") for one in results], folds=True),
            Column("points sent", [(str(one.points), "") for one in results], "right"),
            Column("rejected", [(str(one.rejected), "") for one in results], "right"),
            Column("rows remaining", [(_rows(one), _style(one)) for one in results], "right"),
            Column("state", [(one.status, _style(one)) for one in results]),
        ],
    )
    for one in results:
        if one.reason:
            print_line(console, f"{one.backend}: {one.reason.splitlines()[0]}")
    show_page(console)
    sys.stdout.flush()


def _rows(one: "Delivered") -> str:
    return "unknown" if one.remaining is None else str(one.remaining)


def _style(one: "Delivered") -> str:
    return "warning" if one.remaining != 0 or one.status in ("damaged", "refused") else ""

"""`statsbridge ls`: the runs in a folder."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import (
    FORMATS,
    Column,
    as_csv,
    as_json,
    command,
    one_line,
    page,
    print_line,
    print_table,
    show_page,
)

if TYPE_CHECKING:
    from statsbridge.log import RunSummary

DEFAULT_DIRECTORY = "statsbridge-runs"


def ls(
    directory: Annotated[str, typer.Argument(metavar="[DIR]", help="The folder that holds the runs.")] = (
        DEFAULT_DIRECTORY
    ),
    output: Annotated[str, typer.Option("--format", help="table, json or csv.")] = "table",
    where: Annotated[
        str | None,
        typer.Option(
            metavar="SQL", help="Only runs that meet a condition: 'config.lr > 0.01 AND events_critical = 0'."
        ),
    ] = None,
) -> None:
    """List the runs in a folder, the newest first.

    --where takes a condition in DuckDB's SQL over id, name, started, state, steps, sampled_steps, attempts and bytes.

    It also has path, rows_<table>, events_<severity>, config.<key> and versions.<package>.
    """
    with command():
        from statsbridge.analyze.choices import unknown_choice
        from statsbridge.errors import LogError
        from statsbridge.log.runs import summaries_in

        if output not in FORMATS:
            raise unknown_choice("format", output, FORMATS)
        folder = Path(directory)
        # Before the first run the default folder is only not there yet; a folder named by hand is a slip.
        if not folder.is_dir() and directory != DEFAULT_DIRECTORY:
            raise LogError(f"no folder {directory}: give the folder that statsbridge.init(dir=…) wrote to")
        runs, problems = summaries_in(folder)
        for problem in problems:
            typer.echo(f"statsbridge: {one_line(str(problem))}", err=True)
        if where is not None and runs:
            from statsbridge.analyze.listing import matching

            runs = matching(runs, where)
        rows = [_facts(run) for run in reversed(runs)]
        if output == "json":
            sys.stdout.write(as_json(rows) + "\n")
        elif output == "csv":
            sys.stdout.write(_csv(rows))
        elif rows:
            _print(rows)
        elif where is not None:
            sys.stdout.write(f"no runs in {directory} that meet this condition\n")
        else:
            sys.stdout.write(
                f"no runs in {directory}: train with statsbridge.init(model, dir={directory!r}), "
                "or try statsbridge demo\n"
            )


def _facts(run: "RunSummary") -> dict[str, Any]:
    return {
        "id": run.id,
        "name": run.name,
        "started": run.created.isoformat(),
        "state": run.state,
        "steps": run.steps,
        "sampled_steps": run.sampled_steps,
        "attempts": run.attempts,
        "rows": dict(run.rows),
        "bytes": run.bytes,
        "path": str(run.path),
    }


def _csv(rows: list[dict[str, Any]]) -> str:
    plain = [column for column in rows[0] if column != "rows"] if rows else []
    tables = list(rows[0]["rows"]) if rows else []
    header = plain + [f"rows_{table}" for table in tables]
    return as_csv(header, [[row[name] for name in plain] + [row["rows"][table] for table in tables] for row in rows])


def _print(rows: list[dict[str, Any]]) -> None:
    def cells(name: str) -> list[tuple[str, str]]:
        return [("" if row[name] is None else str(row[name]), "") for row in rows]

    console = page()
    columns = [
        Column("id", cells("id")),
        Column("name", cells("name"), folds=True),
        Column("started (UTC)", [(row["started"][:19].replace("T", " "), "") for row in rows], optional=1),
        Column("state", [(row["state"], _STATE_STYLES.get(row["state"], "")) for row in rows]),
        Column("steps", cells("steps"), "right"),
        Column("sampled", cells("sampled_steps"), "right"),
        Column("rows", [(str(sum(row["rows"].values())), "") for row in rows], "right"),
        Column("size", [(size(row["bytes"]), "") for row in rows], "right"),
    ]
    if any(row["attempts"] > 1 for row in rows):
        columns.insert(4, Column("attempts", cells("attempts"), "right"))
    left_out = print_table(console, columns)
    if left_out:
        print_line(console, f"left out at this width: {', '.join(left_out)} (piped output has it all)")
    show_page(console)


_STATE_STYLES = {"crashed": "critical"}


def size(count: int) -> str:
    """Bytes in the largest decimal unit that leaves a number of at least 1."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"

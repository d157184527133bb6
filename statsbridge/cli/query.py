"""`statsbridge query`: SQL over the tables of one run or several."""

from collections.abc import Sequence
from itertools import count
from typing import Annotated

import typer

from .answers import FORMATS, write_rows
from .ls import DEFAULT_DIRECTORY
from .output import command


def query(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Runs: path, id, beginning of the id, name, or latest.")
    ],
    sql: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT over modules, stats, scalars and events.")],
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = DEFAULT_DIRECTORY,
    output: Annotated[str, typer.Option("--format", help="table, json, csv or markdown.")] = "table",
) -> None:
    """Ask one SELECT, in DuckDB's SQL, of the tables modules, stats, scalars and events.

    Of several runs each table has the rows of all, and a column run with the run's id.

    Nothing is written, and no file but those of the runs can be read.
    """
    with command():
        from statsbridge.analyze.choices import unknown_choice
        from statsbridge.log import load, resolve_run
        from statsbridge.log.reader import query as query_all

        from .values import columns_of

        if output not in FORMATS:
            raise unknown_choice("format", output, FORMATS)
        paths = dict.fromkeys(resolve_run(run, directory) for run in runs)
        found = [load(path) for path in paths]
        answer = found[0].query(sql) if len(found) == 1 else query_all(found, sql)
        rows = list(zip(*columns_of(answer), strict=True))
        write_rows(_distinct(answer.column_names), rows, output)


def _distinct(names: Sequence[str]) -> list[str]:
    """The names of columns, with a number where one comes again: a JSON object has one `step` of a join's two."""
    distinct: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in count(1))
        free = (one for one in numbered if one not in distinct and one not in names)
        distinct.append(next(free) if name in distinct else name)
    return distinct

"""`statsbridge verify`: prove that a tracker shows what was recorded, or that the record is right."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from statsbridge.wording import counted

from .output import FORMATS, Column, as_csv, as_json, command, number, page, print_line, print_table, show_page

if TYPE_CHECKING:
    from statsbridge.analyze.recomputed import Difference
    from statsbridge.mirror.verify import Verification

EXIT_DIFFERENT = 1
ROWS_SHOWN = 20
_TRACKER_COLUMNS = ("kind", "key", "series", "step", "recorded", "found", "recorded_time", "found_time", "reason")
_SCALAR_COLUMNS = ("kind", "line", "name", "step", "recorded", "recomputed", "relative")


def verify(
    run: Annotated[str, typer.Argument(help="A run's folder, id, unique beginning of an id, or name.")] = "latest",
    *,
    against: Annotated[
        str | None,
        typer.Option(metavar="BACKEND[:TARGET]", help="Compare all that this tracker has of the run with its record."),
    ] = None,
    scalars: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare a CSV file (name, step, value) with the scalars of the record."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="R", help="With --scalars: the relative difference that is none (1e-6)."),
    ] = None,
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = "statsbridge-runs",
    output: Annotated[str, typer.Option("--format", help="table, json or csv.")] = "table",
) -> None:
    """Compare a tracker, or values recomputed by another program, with the record. Changes nothing.

    Exit status 1 where something differs for which there is no documented cause.
    """
    with command():
        from statsbridge.analyze.choices import unknown_choice
        from statsbridge.errors import ConfigError
        from statsbridge.log import resolve_run

        if output not in FORMATS:
            raise unknown_choice("format", output, FORMATS)
        if (against is None) == (scalars is None):
            raise ConfigError("say what to compare the record with: either --against BACKEND or --scalars FILE")
        if tolerance is not None and scalars is None:
            raise ConfigError("--tolerance belongs to --scalars: what a tracker has must be the same bits")
        path = resolve_run(run, directory)
        right = _tracker(path, against, output) if against is not None else _scalars(path, scalars, tolerance, output)
        if not right:
            raise typer.Exit(EXIT_DIFFERENT)


def _tracker(run: Path, against: str, output: str) -> bool:
    from statsbridge.mirror.verify import proved, verify

    results = verify(run, against)
    if output == "table":
        for result in results:
            _print_tracker(result)
    elif output == "json":
        sys.stdout.write(as_json([_document(result) for result in results]) + "\n")
    else:
        rows = [
            [result.backend, result.address, *(row[name] for name in _TRACKER_COLUMNS)]
            for result in results
            for row in _rows(result)
        ]
        sys.stdout.write(as_csv(("backend", "address", *_TRACKER_COLUMNS), rows))
    return proved(results)


def _rows(result: "Verification") -> list[dict[str, Any]]:
    """The differences; times as ISO 8601 in UTC."""
    rows: list[dict[str, Any]] = result.differences.to_pylist()
    for row in rows:
        for name in ("recorded_time", "found_time"):
            row[name] = None if row[name] is None else row[name].isoformat()
    return rows


def _document(result: "Verification") -> dict[str, Any]:
    return {
        "backend": result.backend,
        "address": result.address,
        "compared": result.compared,
        "same": result.same,
        "superseded": result.superseded,
        "proved": result.proved,
        "counts": dict(result.counts),
        "differences": _rows(result),
    }


def _same_of(same: int, compared: int) -> str:
    return f"{same} of {counted(compared, 'value')} {'is' if compared == 1 else 'are'}"


def _print_tracker(result: "Verification") -> None:
    from statsbridge.mirror.comparison import DOCUMENTED

    console = page()
    print_line(console, f"{result.backend} ({result.address}): {_same_of(result.same, result.compared)} the same")
    if result.superseded:
        print_line(console, f"of them {result.superseded} were superseded when the run was resumed; both were sent")
    for kind, count in sorted(result.counts.items(), key=lambda pair: pair[0] in DOCUMENTED):
        known = kind in DOCUMENTED
        print_line(console, f"{kind}: {count}{' (documented)' if known else ''}", "" if known else "critical")
    # What nobody has explained first: it is what matters.
    rows = sorted(_rows(result), key=lambda row: row["kind"] in DOCUMENTED)
    if rows:
        print_line(console, "")
        _print_rows(console, rows, ("kind", "key", "step", "recorded", "found", "reason"), folds="key")
    if not result.proved:
        print_line(console, "they differ")
    elif result.counts.get("not_yet_sent"):
        print_line(console, "what was sent is what the tracker has; statsbridge sync delivers the rest")
    else:
        print_line(console, "what was recorded is what the tracker has")
    show_page(console)


def _print_rows(console: Any, rows: Sequence[Mapping[str, Any]], names: Sequence[str], folds: str) -> None:
    columns = []
    for name in names:
        cells = [(_cell(row[name]), "") for row in rows[:ROWS_SHOWN]]
        columns.append(Column(name, cells, "right" if name in {"step", "line"} else "left", folds=name == folds))
    print_table(console, columns)
    if len(rows) > ROWS_SHOWN:
        print_line(console, f"and {len(rows) - ROWS_SHOWN} more: --format csv has them all")


def _cell(value: object) -> str:
    # In full: two values may differ in their last bit only.
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _scalars(run: Path, file: Path | None, tolerance: float | None, output: str) -> bool:
    from statsbridge.analyze.recomputed import TOLERANCE, compare_scalars, read_recomputed
    from statsbridge.log import load

    assert file is not None
    limit = TOLERANCE if tolerance is None else tolerance
    recomputed = read_recomputed(file)
    differences = compare_scalars(load(run).scalars, recomputed, limit)
    rows = [{name: getattr(one, name) for name in _SCALAR_COLUMNS} for one in differences]
    if output == "json":
        document = {"file": str(file), "tolerance": limit, "compared": len(recomputed), "differences": rows}
        sys.stdout.write(as_json(document) + "\n")
    elif output == "csv":
        sys.stdout.write(as_csv(_SCALAR_COLUMNS, [list(row.values()) for row in rows]))
    else:
        _print_scalars(file, len(recomputed), limit, differences, rows)
    return not differences


def _print_scalars(
    file: Path, compared: int, limit: float, differences: "Sequence[Difference]", rows: Sequence[Mapping[str, Any]]
) -> None:
    console = page()
    same = compared - len(differences)
    print_line(console, f"{file}: {_same_of(same, compared)} as recorded (relative difference up to {number(limit)})")
    if rows:
        _print_rows(console, rows, _SCALAR_COLUMNS, folds="name")
    show_page(console)

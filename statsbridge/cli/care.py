"""`statsbridge compact` and `statsbridge check`: looking after the parts of a run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from statsbridge.wording import counted

from .ls import DEFAULT_DIRECTORY, size
from .output import FORMATS, Column, as_csv, as_json, command, page, print_line, print_table, show_page

if TYPE_CHECKING:
    from statsbridge.log.check import Finding

EXIT_FOUND = 1
_RUN = typer.Argument(metavar="RUN", help="The run: path, id, beginning of the id, name, or latest.")
_DIR = typer.Option("--dir", help="The folder that holds the runs.")


def compact(
    run: Annotated[str, _RUN],
    directory: Annotated[str, _DIR] = DEFAULT_DIRECTORY,
) -> None:
    """Merge the parts of a run into few, sorted so that one module's series is a small read. No row changes."""
    with command():
        from statsbridge.errors import LogError
        from statsbridge.log import SCHEMAS, resolve_run
        from statsbridge.log.compaction import compact_table, remove_unfinished
        from statsbridge.log.lease import maintenance
        from statsbridge.log.parts import list_parts

        path = resolve_run(run, directory)
        console, before = page(), _size(path)
        with maintenance(path) as holds:
            for table in SCHEMAS:
                for rank in sorted({part.rank for part in list_parts(path, table)}):
                    remove_unfinished(path, table, rank)
                    done = compact_table(path, table, rank, fan_in=2, goes_on=holds)
                    if not holds():
                        raise LogError(f"another process has taken over run {path.name}: nothing is lost, try again")
                    parts = f"{done.parts_before} -> {counted(done.parts_after, 'part')}"
                    print_line(console, f"{table}/rank={rank}: {parts}, {counted(done.rows, 'row')} merged")
        print_line(console, f"{size(before)} -> {size(_size(path))} in {path}")
        show_page(console)


def check(
    run: Annotated[str, _RUN],
    directory: Annotated[str, _DIR] = DEFAULT_DIRECTORY,
    repair: Annotated[
        bool, typer.Option("--repair", help="Move damaged parts into the run's folder 'damaged'; deletes no row.")
    ] = False,
    output: Annotated[str, typer.Option("--format", help="table, json or csv.")] = "table",
) -> None:
    """Read every part of a run and say what is damaged, missing or foreign. Exit status 1 if anything is."""
    with command():
        from statsbridge.analyze.choices import unknown_choice
        from statsbridge.log import resolve_run
        from statsbridge.log.check import check_run, repair_run
        from statsbridge.log.lease import maintenance

        if output not in FORMATS:
            raise unknown_choice("format", output, FORMATS)
        path = resolve_run(run, directory)
        findings = check_run(path)
        if repair and findings:
            with maintenance(path) as holds:
                # Again under the lease: what was only half written a moment ago may be whole now.
                findings = check_run(path, lambda done, of: holds())
                repair_run(path, findings)
        _print(path, findings, output, repair)
        if any(finding.serious for finding in findings):
            raise typer.Exit(EXIT_FOUND)


def _print(path: Path, findings: "list[Finding]", output: str, repaired: bool) -> None:
    header = ["kind", "file", "first", "last", "message"]
    rows = [[getattr(finding, name) for name in header] for finding in findings]
    if output == "json":
        sys.stdout.write(as_json([dict(zip(header, row, strict=True)) for row in rows]) + "\n")
        return
    if output == "csv":
        sys.stdout.write(as_csv(header, rows))
        return
    console = page()
    if not findings:
        print_line(console, f"{path}: every part is what was written, and no row is missing")
    else:
        styles = {True: "critical", False: "missing"}
        kinds = [(finding.kind, styles[finding.serious]) for finding in findings]
        spans = [("" if f.first is None else f"{f.first}-{f.last}", "") for f in findings]
        print_table(
            console,
            [
                Column("kind", kinds),
                Column("rows", spans),
                Column("file", [(finding.file, "") for finding in findings], folds=True),
                Column("what", [(finding.message, "") for finding in findings], folds=True),
            ],
        )
        if repaired:
            print_line(
                console, f"damaged and foreign files are now in {path / 'damaged'}; their rows are not in the record"
            )
        elif any(finding.kind in ("damaged", "foreign", "covered", "unfinished") for finding in findings):
            print_line(
                console, "statsbridge check --repair sets damaged and foreign files aside, and clears what a crash left"
            )
    show_page(console)


def _size(run: Path) -> int:
    return sum(file.stat().st_size for file in run.rglob("*.parquet"))

"""Is a run whole? Reads every part, says what is wrong with which, and can set it aside."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import DamagedPart, LogError, SchemaTooNew
from .attempts import read_attempts
from .files import make_folder, remove, sync_folder
from .parts import Part, covered, list_parts, read_part
from .runs import read_info
from .schema import SCHEMAS

#: Where `repair` puts what is damaged; it keeps its path below this folder.
ASIDE = "damaged"

#: Kinds of findings that mean that rows are lost or cannot be trusted.
SERIOUS = frozenset({"damaged", "foreign", "missing", "newer", "unreadable"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about a run.

    `kind`: damaged (a part that is not what was written), newer (of a later version), foreign (a file that is
    no part), missing (rows in no part), unreadable (a part that the system refuses to read, or a file about the
    run); not serious: covered (merged into another part), unfinished (left by a crash), set_aside (rows that an
    earlier repair put away).
    `first`, `last`: the rows concerned, None where there is no telling.
    """

    kind: str
    file: str
    first: int | None
    last: int | None
    message: str

    @property
    def serious(self) -> bool:
        return self.kind in SERIOUS


def check_run(run: Path, progress: Callable[[int, int], object] = lambda done, of: None) -> list[Finding]:
    """All findings about the run, those of the folder first, then by table and rank. Changes nothing.

    `progress` is told how many parts of how many have been read.
    """
    findings = []
    try:
        read_info(run)
    except SchemaTooNew as error:
        findings.append(Finding("newer", "run.json", None, None, str(error)))
    except LogError as error:
        findings.append(Finding("unreadable", "run.json", None, None, str(error)))
    try:
        read_attempts(run)
    except LogError as error:
        findings.append(Finding("unreadable", "attempts", None, None, str(error)))
    parts = {table: list_parts(run, table) for table in SCHEMAS}
    total, done = sum(map(len, parts.values())), 0
    for table, found in parts.items():
        findings += _strangers(run, table, found)
        superfluous = covered(found)
        good = []
        for part in found:
            finding = _examine(part)
            done += 1
            progress(done, total)
            if finding is None:
                good.append(part)
            else:
                findings.append(finding)
        for part in superfluous.intersection(good):
            if any(_holds(wide, part) for wide in good):
                text = "its rows are in a wider part; a crash came before its removal"
                findings.append(Finding("covered", part.name, part.first, part.last, text))
        findings += _missing(run, table, good)
    return findings


def repair_run(run: Path, findings: list[Finding]) -> None:
    """Set aside what is damaged or foreign, delete what is covered or unfinished. Raises OSError.

    Only for whoever holds the run; see `lease.maintenance`.
    """
    for finding in findings:
        path = run / finding.file
        if finding.kind in ("covered", "unfinished"):
            remove(path)
        elif finding.kind in ("damaged", "foreign"):
            target = run / ASIDE / finding.file
            make_folder(target.parent)
            os.replace(path, target)
            sync_folder(target.parent)


def next_numbers(run: Path, rank: int) -> dict[str, int]:
    """Table → the number after all that a part of `rank` has ever used: damaged, set aside and lost ones too.

    Of parts that are gone only what a mirror had got to is known.
    """
    ends = _mirrored(run) if rank == 0 else dict.fromkeys(SCHEMAS, 0)
    for table in SCHEMAS:
        for part in (*list_parts(run, table), *list_parts(run / ASIDE, table)):
            if part.rank == rank:
                ends[table] = max(ends[table], part.last + 1)
    return ends


def _mirrored(run: Path) -> dict[str, int]:
    """Table → the number after the last row that a mirror has behind it: it never sends another of that number."""
    ends = dict.fromkeys(SCHEMAS, 0)
    for file in (run / "mirrors").glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # a mirror that cannot be read does not go on either
            cursor = json.loads(file.read_bytes())["cursor"]
            ends = {table: max(end, int(cursor[table])) for table, end in ends.items()}
    return ends


def _examine(part: Part) -> Finding | None:
    try:
        rows = read_part(part)
    except SchemaTooNew as error:
        return Finding("newer", part.name, part.first, part.last, str(error))
    except DamagedPart as error:
        # What the system refuses to read may be whole: it is no reason to move it.
        kind = "unreadable" if isinstance(error.__cause__, OSError) else "damaged"
        return Finding(kind, part.name, part.first, part.last, str(error))
    if rows.num_rows != part.rows or set(rows["seq"].to_pylist()) != set(range(part.first, part.last + 1)):
        text = f"{part.name}: holds other rows than its name says"
        return Finding("damaged", part.name, part.first, part.last, text)
    return None


def _holds(wide: Part, part: Part) -> bool:
    return wide != part and wide.rank == part.rank and wide.first <= part.first and part.last <= wide.last


def _strangers(run: Path, table: str, parts: tuple[Part, ...]) -> Iterator[Finding]:
    known = {part.path for part in parts}
    for path in sorted((run / table).rglob("*")):
        if path in known or path.is_dir():
            continue
        name = str(path.relative_to(run))
        if path.name.startswith(".") and path.suffix == ".tmp":
            yield Finding("unfinished", name, None, None, "left by a crash in the middle of writing")
        elif path.suffix == ".parquet":
            yield Finding("foreign", name, None, None, "no part of this run, and plain globs would read it")


def _missing(run: Path, table: str, good: list[Part]) -> Iterator[Finding]:
    aside = list_parts(run / ASIDE, table)
    for rank in sorted({part.rank for part in (*good, *aside, *list_parts(run, table))}):
        position = 0
        ranges = sorted((part.first, part.last) for part in good if part.rank == rank)
        end = max(part.last + 1 for part in (*good, *aside, *list_parts(run, table)) if part.rank == rank)
        for first, last in [*ranges, (end, end - 1)]:
            if first > position:
                yield _gap(f"{table}/rank={rank}", position, first - 1, [part for part in aside if part.rank == rank])
            position = max(position, last + 1)


def _gap(folder: str, first: int, last: int, aside: list[Part]) -> Finding:
    if any(part.first <= first and last <= part.last for part in aside):
        return Finding("set_aside", folder, first, last, f"these rows were damaged and are in {ASIDE}/{folder}")
    return Finding("missing", folder, first, last, f"no readable part holds rows {first} to {last}")

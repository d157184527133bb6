"""Many small parts become few large ones, sorted so that one series is a small read, and so is one site.

A merged part is named by the range of `seq` it holds, which covers those of the parts it was made of. Readers take
the widest ranges and ignore what they cover, so a crash at any moment loses and doubles nothing: before the rename
only the old parts count, after it only the new one.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import DamagedPart, LogError
from .files import DurableFile, remove, sync_folder
from .parts import Condition, Part, ReadingParts, covered, list_parts, part_folder, part_name, writer_options
from .schema import SCHEMAS

#: Parts that are merged at once, at least; fewer are never merged by themselves.
FAN_IN = 100
#: And at most: where merges fall behind, they catch up in pieces that take no longer for it.
MOST = 2 * FAN_IN
#: A part of more rows than half of this is never merged again.
LARGEST = 1 << 23
#: Rows in memory while parts are merged, about.
SLICE_ROWS = 1 << 18
#: Rows of a row group of a merged part: what a reader of one series has to decode, at most a few times over.
GROUP_ROWS = 1 << 15
#: Where another site begins, so does another row group, unless the one before would have fewer rows than this.
LEAST_GROUP_ROWS = GROUP_ROWS >> 2

# What a reader asks for comes first: one site of all modules, and in it rows of one series together, in order of time.
SORTED_BY = {
    "stats": ("site", "module", "tensor", "call", "seq"),
    "scalars": ("name", "seq"),
    "modules": ("seq",),
    "events": ("seq",),
}
_NAMES = {"stats": ("site", "module"), "scalars": ("name",)}  # of those, which merged rows are read again by


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction did: parts there were and are, rows that were merged."""

    parts_before: int
    parts_after: int
    rows: int


def choose(parts: Sequence[Part], *, fan_in: int = FAN_IN) -> Sequence[Part] | None:
    """The next parts to merge, of the live ones of one table and rank: neighbours, none much larger than the rest.

    Of tiers whose sizes grow by `FAN_IN`, the lowest that has `fan_in` neighbours, or fewer that fill a part of the
    largest size; None where none has. At most `MOST` at once.
    """
    ordered = sorted((part for part in parts if part.rows <= LARGEST // 2), key=lambda part: part.first)
    tiers = sorted({_tier(part) for part in ordered})
    for tier in tiers:
        for run, is_full in _neighbours([part for part in ordered if _tier(part) <= tier]):
            if is_full or len(run) >= fan_in:
                return run[:MOST]
    return None


def _tier(part: Part) -> int:
    return int(math.log(part.rows, FAN_IN) + 1e-9)


def _neighbours(parts: Sequence[Part]) -> Iterator[tuple[list[Part], bool]]:
    """Runs of parts without a gap between them, and whether each is as large as a part may be."""
    run: list[Part] = []
    rows = 0
    for part in parts:
        adjacent = bool(run) and part.first == run[-1].last + 1
        if run and (not adjacent or rows + part.rows > LARGEST):
            yield run, adjacent
            run, rows = [], 0
        run.append(part)
        rows += part.rows
    if run:
        yield run, False


def compact_table(
    run: Path,
    table: str,
    rank: int,
    *,
    fan_in: int = FAN_IN,
    goes_on: Callable[[], bool] = lambda: True,
) -> Compacted:
    """Merge the parts of one table and rank while there are `fan_in` to merge, and remove what is covered.

    Parts that are damaged stay as they are, and so do their neighbours' ranges: what cannot be read is not merged.
    `goes_on` is asked between pieces of work. Raises OSError; nothing is lost by it.
    """
    before = live = _live(run, table, rank)
    rows, damaged = 0, set[Part]()
    while goes_on():
        chosen = choose([part for part in live if part not in damaged], fan_in=fan_in)
        if chosen is None:
            break
        try:
            if not merge_parts(run, table, chosen, goes_on):
                break
        except LogError:  # damaged, or of a newer version
            damaged |= _damaged(chosen) or set(chosen)
            continue
        rows += sum(part.rows for part in chosen)
        live = _live(run, table, rank)
    return Compacted(len(before), len(live), rows)


def remove_covered(run: Path, table: str, rank: int) -> None:
    """Delete the parts whose rows a readable wider part holds. Raises OSError."""
    parts = [part for part in list_parts(run, table) if part.rank == rank]
    if not parts:
        return
    # Whoever made a wide part, or deleted others, may have died before that was on the disk.
    sync_folder(part_folder(run, table, rank))
    superfluous = covered(parts)
    for wide in [part for part in parts if part not in superfluous]:
        inside = [part for part in superfluous if wide.first <= part.first and part.last <= wide.last]
        if inside and not _damaged([wide]):
            _remove_all(inside)


def remove_unfinished(run: Path, table: str, rank: int) -> None:
    """Delete what a crash has left half written. Only for whoever holds the run. Raises OSError."""
    for file in part_folder(run, table, rank).glob(".*.tmp"):
        remove(file)


def merge_parts(run: Path, table: str, parts: Sequence[Part], goes_on: Callable[[], bool]) -> bool:
    """Write one part with the rows of `parts`, which are neighbours, and delete them; False where told to stop.

    Memory holds about `SLICE_ROWS` rows at a time. Raises DamagedPart where one cannot be read, OSError.
    """
    first, last, folder = parts[0].first, parts[-1].last, parts[0].path.parent
    with ReadingParts(parts) as reading, DurableFile(folder) as file:
        written = 0
        with pq.ParquetWriter(file, SCHEMAS[table], **writer_options(table, merged=True)) as writer:
            for piece in _sorted_pieces(table, reading):
                if not goes_on():
                    return False
                for group in _groups(table, piece):
                    writer.write_table(group, row_group_size=GROUP_ROWS)
                written += piece.num_rows
        if written != last - first + 1:
            raise DamagedPart(f"{table}: rows {first} to {last} should be {last - first + 1}, and are {written}")
        if not goes_on():
            return False
        file.commit(folder / part_name(first, last, file.checksum))
    _remove_all(parts)
    return True


def _remove_all(parts: Sequence[Part]) -> None:
    for part in parts:
        remove(part.path)
    # After a power cut they would be back, and doubled for plain globs.
    sync_folder(parts[0].path.parent)


def _live(run: Path, table: str, rank: int) -> list[Part]:
    """The parts that count; those that are covered, by a crash before their removal, are removed now."""
    remove_covered(run, table, rank)
    return [part for part in list_parts(run, table) if part.rank == rank]


def _damaged(parts: Sequence[Part]) -> set[Part]:
    found = set()
    for part in parts:
        try:
            with ReadingParts([part]):
                pass
        except LogError:
            found.add(part)
    return found


def _groups(table: str, piece: pa.Table) -> Iterator[pa.Table]:
    """Sorted rows in stretches that a row group begins with: of `stats` where another site does."""
    cuts = [0]
    if table == "stats":
        sites = _rank_of(piece["site"])
        for at in (np.flatnonzero(np.diff(sites)) + 1).tolist():
            if at - cuts[-1] >= LEAST_GROUP_ROWS:
                cuts.append(at)
    for number, begin in enumerate(cuts):
        end = cuts[number + 1] if number + 1 < len(cuts) else piece.num_rows
        yield piece.slice(begin, end - begin)


def _sorted_pieces(table: str, reading: ReadingParts) -> Iterator[pa.Table]:
    """All rows in the order of `SORTED_BY`, some at a time: whole series."""
    names, keys = _NAMES.get(table), SORTED_BY[table]
    if names is None:
        for part in reading.parts:
            yield _sorted(reading.read(part), keys)
        return
    for wanted in _slices(reading, names):
        pieces = [reading.read(part, wanted) for part in reading.parts]
        yield _sorted(pa.concat_tables(pieces).unify_dictionaries(), keys)


def _slices(reading: ReadingParts, names: Sequence[str]) -> Iterator[list[Condition]]:
    """Values of the columns `names`, in order, in groups of about `SLICE_ROWS` rows."""
    counts = Counter[tuple[str | None, ...]]()
    for part in reading.parts:
        found = (
            pa.table([reading.column(part, name) for name in names], names)
            .group_by(names)
            .aggregate([([], "count_all")])
        )
        *values, rows = (column.to_pylist() for column in found.select([*names, "count_all"]).columns)
        for key, number in zip(zip(*values, strict=True), rows, strict=True):
            counts[key] += number
    group: list[tuple[str | None, ...]] = []
    rows = 0
    for key in sorted(counts, key=lambda key: [(value is not None, value or "") for value in key]):
        if group and rows + counts[key] > SLICE_ROWS:
            yield _conditions(names, group)
            group, rows = [], 0
        group.append(key)
        rows += counts[key]
    if group:
        yield _conditions(names, group)


def _conditions(names: Sequence[str], keys: Sequence[tuple[str | None, ...]]) -> list[Condition]:
    """What rows with one of the keys fulfil: for each beginning of them the last values."""
    last: dict[tuple[str | None, ...], list[str | None]] = {}
    for key in keys:
        last.setdefault(key[:-1], []).append(key[-1])
    return [
        {
            name: pa.array(values, pa.string())
            for name, values in zip(names, (*([one] for one in first), ends), strict=True)
        }
        for first, ends in last.items()
    ]


def _sorted(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    order = np.lexsort([_rank_of(rows[key]) for key in reversed(keys)])
    return rows.take(pa.array(order)).unify_dictionaries().combine_chunks()


def _rank_of(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Integers in the order of the column's values, nulls first."""
    values = column.combine_chunks()
    if not pa.types.is_dictionary(values.type):
        return np.asarray(pc.fill_null(values, -1).to_numpy(zero_copy_only=False))
    place = np.empty(len(values.dictionary) + 1, np.int64)
    place[pc.array_sort_indices(values.dictionary).to_numpy()] = np.arange(1, len(values.dictionary) + 1)
    place[-1] = 0  # index −1 is null
    ranks: npt.NDArray[np.int64] = place[pc.fill_null(values.indices, -1).to_numpy(zero_copy_only=False)]
    return ranks


def compact_quietly(run: Path, table: str, rank: int, goes_on: Callable[[], bool]) -> None:
    """`compact_table` beside a training: whatever is wrong with the disk, the small parts are still there."""
    with suppress(OSError, pa.ArrowException):
        compact_table(run, table, rank, goes_on=goes_on)

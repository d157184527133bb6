"""Reading only what is asked for of a large `stats` table: some modules, sites, steps and columns of it.

Row groups whose extremes say that nothing in them is wanted are passed over, and of the others first the columns that
decide. Merged parts are sorted by site and module, so one site or one series is a small read.
"""

import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import DamagedPart
from .attempts import Superseded
from .parts import Part, open_parquet, refuse_newer
from .schema import SCHEMAS, SITES, VERSION_KEY

_TABLE = "stats"
_PRUNED = 1 << 16  # rows of a part from which it is worth not to read the whole file
_KNOWN_PARTS = 4096  # whose sites are known; a part never changes
_KNOWN_FOOTERS = 16  # of large parts: some 10 MB each
_AT_ONCE = 4  # row groups: what is in memory before it is filtered

Flags = npt.NDArray[np.bool_]
Steps = tuple[int | None, int | None]


def is_small(part: Part) -> bool:
    """Whether a part is read whole, whatever is asked for."""
    return part.rows < _PRUNED


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether `name` is one of `patterns` or fits one of them as a glob."""
    globs = _apart(tuple(patterns))[1]
    return name in patterns or any(fnmatchcase(name, pattern) for pattern in globs)


@lru_cache
def _apart(patterns: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Those that fit no other name than their own, in order, and globs."""
    globs = [pattern for pattern in patterns if any(character in pattern for character in "*?[")]
    return sorted(set(patterns).difference(globs)), globs


@dataclass(frozen=True)
class Wanted:
    """Some rows and columns of `stats`.

    `modules`, `sites`: names or globs, None for all. `steps`: first and last one, both included, None for no end.
    `columns`: of `SCHEMAS["stats"]`; None for all.
    """

    modules: tuple[str, ...] | None = None
    sites: tuple[str, ...] | None = None
    steps: Steps = (None, None)
    columns: tuple[str, ...] | None = None
    _known: dict[tuple[str, str], bool] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        return SCHEMAS[_TABLE].names if self.columns is None else list(self.columns)

    def read(self, part: Part) -> pa.Table:
        """The wanted rows of one part. Raises DamagedPart where it cannot be read, SchemaTooNew."""
        with _opened(part) as (file, footer):
            groups = [number for number in range(file.num_row_groups) if self._may_be_in(footer, number)]
            pieces = [self._read_groups(file, groups[at : at + _AT_ONCE]) for at in range(0, len(groups), _AT_ONCE)]
            return pieces[0] if len(pieces) == 1 else pa.concat_tables([_empty(self.names), *pieces])

    def filter(self, rows: pa.Table) -> pa.Table:
        """The same of rows in memory, which have the columns module, site and step."""
        keep = self._keep(rows)
        return rows if keep is None or keep.all() else rows.filter(pa.array(keep))

    def _read_groups(self, file: pq.ParquetFile, groups: Sequence[int]) -> pa.Table:
        deciding = [name for name, asked in zip(("module", "site", "step"), self._asked(), strict=True) if asked]
        there = set(file.schema_arrow.names)
        others = [name for name in self.names if name in there and name not in deciding]
        if file.metadata.num_rows < _PRUNED:
            first = read = file.read(deciding + others, use_threads=False)
        else:
            first = read = file.read_row_groups(groups, deciding or others)
        keep = self._keep(first)
        if keep is not None and not keep.any():
            return _empty(self.names)
        if first.num_columns < len(deciding + others):
            read = file.read_row_groups(groups, others)
        columns = {name: (first if name in first.column_names else read)[name] for name in deciding + others}
        table = pa.table([_column(columns, name, first.num_rows) for name in self.names], self.names)
        return table if keep is None or keep.all() else table.filter(pa.array(keep))

    def _asked(self) -> tuple[bool, bool, bool]:
        return self.modules is not None, self.sites is not None, self.steps != (None, None)

    def _keep(self, rows: pa.Table) -> Flags | None:
        keep: Flags | None = None
        for name, patterns in (("module", self.modules), ("site", self.sites)):
            if patterns is not None:
                found = self._matching(rows[name], name, patterns)
                keep = found if keep is None else keep & found
        for limit, compare in zip(self.steps, (np.greater_equal, np.less_equal), strict=True):
            if limit is not None:
                found = compare(pc.fill_null(rows["step"], np.iinfo(np.int64).min).to_numpy(), limit)
                keep = found if keep is None else keep & found
        return keep

    def _matching(self, column: pa.ChunkedArray, name: str, patterns: Sequence[str]) -> Flags:
        """Which rows fit: each name is looked at once, not each row."""
        found = []
        for chunk in column.chunks:
            codes = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
            fits = np.array([self._fits(name, value, patterns) for value in codes.dictionary.to_pylist()] + [False])
            found.append(fits[pc.fill_null(codes.indices, -1).to_numpy(zero_copy_only=False)])
        return np.concatenate(found) if found else np.zeros(0, bool)

    def _fits(self, name: str, value: str | None, patterns: Sequence[str]) -> bool:
        known = self._known.get((name, value or ""))
        if known is None:
            known = self._known[name, value or ""] = value is not None and matches(value, patterns)
        return known

    def _may_be_in(self, footer: "_Footer", group: int) -> bool:
        for name, patterns in (("module", self.modules), ("site", self.sites)):
            extremes = None if patterns is None else footer.extremes(name)[group]
            if patterns is not None and extremes is not None and not _any_in(patterns, *extremes):
                return False
        first, last = self.steps
        extremes = None if (first, last) == (None, None) else footer.extremes("step")[group]
        if extremes is None:
            return True
        return (first is None or extremes[1] >= first) and (last is None or extremes[0] <= last)


def groups_of(part: Part, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Some columns of all rows of a part, some row groups at a time, in the order in which they are on disk.

    Raises DamagedPart where it cannot be read, SchemaTooNew.
    """
    wanted = Wanted(columns=tuple(columns))
    with _opened(part) as (file, _):
        together = max(file.num_row_groups, 1) if is_small(part) else _AT_ONCE
        for at in range(0, file.num_row_groups, together):
            yield wanted._read_groups(file, range(at, min(at + together, file.num_row_groups)))


def modules_of(parts: Iterable[Part], site: str) -> set[str]:
    """The modules of all rows of a site. Raises DamagedPart, SchemaTooNew."""
    wanted = Wanted(sites=(site,), columns=("module",))
    # Chunk by chunk: each has its own dictionary, and one text a row would take longer than to read them.
    chunks = (chunk for part in parts for chunk in wanted.read(part)["module"].chunks)
    return {name for chunk in chunks for name in chunk.unique().to_pylist()}


def sites_of(parts: Iterable[Part]) -> set[str]:
    """The sites of all rows. Each part is looked at once, however often a run that grows is loaded.

    Raises DamagedPart, SchemaTooNew.
    """
    return set().union(*map(_sites_in, parts))


@lru_cache(maxsize=_KNOWN_PARTS)
def _sites_in(part: Part) -> frozenset[str]:
    """The sites of one part; a row group that can hold no further one is not read."""
    found: set[str] = set()
    with _opened(part, whole=False) as (file, footer):
        for group, extremes in enumerate(footer.extremes("site")):
            if extremes is None or any(extremes[0] <= site <= extremes[1] for site in set(SITES) - found):
                found.update(file.read_row_group(group, ["site"], use_threads=False)["site"].unique().to_pylist())
    return frozenset(found)


def last_step(parts: Iterable[Part], sites: Sequence[str] | None, superseded: Superseded) -> int | None:
    """The last step of some sites that counts, None where there is none; reads as little as it takes.

    Raises DamagedPart, SchemaTooNew.
    """
    wanted = Wanted(sites=None if sites is None else tuple(sites), columns=("seq", "attempt", "step"))
    places: list[tuple[int, Part, int]] = []
    for part in parts:
        with _opened(part, whole=False) as (_, footer):
            for group, extremes in enumerate(footer.extremes("step")):
                if extremes is not None and wanted._may_be_in(footer, group):
                    places.append((extremes[1], part, group))
    best: int | None = None
    for at_most, part, group in sorted(places, key=lambda place: -place[0]):
        if best is not None and at_most <= best:
            break
        with _opened(part, whole=False) as (file, _):
            found = pc.max(superseded.drop(wanted._read_groups(file, [group]))["step"]).as_py()
        best = found if best is None else max(best, best if found is None else found)
    return best


def without_gaps(parts: Sequence[Part]) -> bool:
    """Whether the parts of each rank, in order, hold each row once."""
    ends: dict[int, int] = {}
    for part in parts:
        if part.first != ends.get(part.rank, 0):
            return False
        ends[part.rank] = part.last + 1
    return True


class _Footer:
    """What the end of a part's file says of its row groups."""

    def __init__(self, metadata: pq.FileMetaData) -> None:
        self.metadata = metadata
        self.version = int((metadata.metadata or {})[VERSION_KEY])
        self._extremes: dict[str, list[tuple[Any, Any] | None]] = {}

    def extremes(self, name: str) -> list[tuple[Any, Any] | None]:
        """Lowest and highest value of one column in each row group; None where the file does not say."""
        if name not in self._extremes:
            groups = range(self.metadata.num_row_groups)
            self._extremes[name] = [_extremes(self.metadata, group, name) for group in groups]
        return self._extremes[name]


@lru_cache(maxsize=_KNOWN_FOOTERS)
def _footer_of(part: Part) -> _Footer:
    """The footer of a large part: to read it takes longer than to read a series of it."""
    return _Footer(open_parquet(part.path).metadata)


@contextmanager
def _opened(part: Part, *, whole: bool = True) -> Iterator[tuple[pq.ParquetFile, _Footer]]:
    """The part's file. A small one is read `whole` and its checksum verified; of others the pages that are read."""
    try:
        if not is_small(part):
            footer = _footer_of(part)
            file = open_parquet(part.path, metadata=footer.metadata, page_checksum_verification=True)
        elif whole:
            data = part.path.read_bytes()
            if zlib.crc32(data) != part.checksum:
                raise DamagedPart(f"{part.name}: it is not what was written: its checksum is not the one in its name")
            file = pq.ParquetFile(pa.BufferReader(data))
            footer = _Footer(file.metadata)
        else:
            file = open_parquet(part.path, page_checksum_verification=True)
            footer = _Footer(file.metadata)
        refuse_newer(footer.version, part.name)
        yield file, footer
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DamagedPart(f"{part.name}: {error}") from error


def _column(columns: dict[str, Any], name: str, rows: int) -> pa.ChunkedArray:
    kind = SCHEMAS[_TABLE].field(name).type
    found = columns.get(name)
    if found is None:
        return pa.chunked_array([pa.nulls(rows, kind)])
    return found if found.type == kind else found.cast(kind)


def _empty(names: Sequence[str]) -> pa.Table:
    return SCHEMAS[_TABLE].empty_table().select(list(names)).replace_schema_metadata(None)


def _extremes(metadata: pq.FileMetaData, group: int, name: str) -> tuple[Any, Any] | None:
    statistics = metadata.row_group(group).column(metadata.schema.names.index(name)).statistics
    if statistics is None or not statistics.has_min_max:
        return None
    return statistics.min, statistics.max


def _any_in(patterns: tuple[str, ...], low: str, high: str) -> bool:
    """Whether names from `low` to `high` may match one of `patterns`."""
    names, globs = _apart(patterns)
    first = bisect_left(names, low)
    return (first < len(names) and names[first] <= high) or any(_reaches(one, low, high) for one in globs)


def _reaches(pattern: str, low: str, high: str) -> bool:
    """Whether names from `low` to `high` may match a glob, or be it: some of them begin with what it begins with."""
    beginning = pattern[: min(at for at in map(pattern.find, "*?[") if at >= 0)]
    return low <= pattern <= high or (high >= beginning and (low <= beginning or low.startswith(beginning)))

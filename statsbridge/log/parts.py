"""Parts: the immutable Parquet files of a run, named by the rows they hold and by their checksum."""

import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import DamagedPart, SchemaTooNew
from .attempts import EVERYTHING, Superseded
from .schema import SCHEMA_VERSION, SCHEMAS, VERSION_KEY, conform

_NAME = re.compile(r"(?P<first>\d{12,})-(?P<last>\d{12,})\.(?P<checksum>[0-9a-f]{8})\.parquet")
_LOOKS = 10
_RANK = re.compile(r"rank=(?P<rank>\d+)")

# Row-group statistics let readers skip parts; of the other columns they are only dead weight in small parts.
_SEARCHED = ("seq", "attempt", "step", "iteration", "time", "module", "site", "tensor", "name", "kind")


#: Columns of text, each with the strings that a row is to have one of.
Condition = Mapping[str, pa.Array]


@dataclass(frozen=True, slots=True)
class Part:
    """One Parquet file: rows `first` to `last` (both included) of one table and rank."""

    path: Path
    table: str
    rank: int
    first: int
    last: int
    checksum: int  # CRC32 of the whole file

    @property
    def name(self) -> str:
        """The part's path inside the run folder."""
        return f"{self.table}/{self.path.parent.name}/{self.path.name}"

    @property
    def rows(self) -> int:
        return self.last - self.first + 1

    @property
    def size(self) -> int:
        """Bytes on disk, 0 where it is gone."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def part_folder(run: Path, table: str, rank: int) -> Path:
    """The folder of the parts of one table and rank."""
    return run / table / f"rank={rank}"


def encode(name: str, rows: pa.Table, *, first: int, attempt: int) -> tuple[str, pa.Buffer]:
    """The file name and the bytes of the part that holds `rows`, numbered from `first`.

    `rows` is what `schema.to_table` gives: without `seq` and `attempt`.
    """
    schema = SCHEMAS[name]
    written = {"seq": np.arange(first, first + rows.num_rows), "attempt": np.full(rows.num_rows, attempt)}
    columns = [
        pa.chunked_array([pa.array(written[column], pa.int64())]) if column in written else rows.column(column)
        for column in schema.names
    ]
    table = pa.Table.from_arrays(columns, schema=schema).unify_dictionaries().combine_chunks()
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **writer_options(name))
    data = sink.getvalue()
    return part_name(first, first + rows.num_rows - 1, zlib.crc32(data)), data


def part_name(first: int, last: int, checksum: int) -> str:
    """The file name of a part with the rows `first` to `last` and the CRC32 `checksum`."""
    return f"{first:012d}-{last:012d}.{checksum:08x}.parquet"


def writer_options(name: str, *, merged: bool = False) -> dict[str, Any]:
    """How parts of table `name` are encoded. `merged`: for parts that are kept, where time to encode matters less."""
    schema = SCHEMAS[name]
    split = {field.name: "BYTE_STREAM_SPLIT" for field in schema if field.type == pa.float64()}
    # Numbers that count up, or stay the same over a series, shrink to nearly nothing. Times do neither, but each
    # series has the same: zstd finds them again where they are plain.
    delta = {field.name: "DELTA_BINARY_PACKED" for field in schema if field.type == pa.int64()}
    return {
        "compression": "zstd",
        "compression_level": 9 if merged else None,
        "use_dictionary": [field.name for field in schema if pa.types.is_dictionary(field.type)],
        "column_encoding": {**split, **delta} if merged else split,
        "write_statistics": [column for column in schema.names if column in _SEARCHED],
        "write_page_checksum": True,
    }


class ReadingParts:
    """Parts of one table of which pieces are read. Their checksums are verified when the context is entered.

    Without `verify`, for a small piece of a large part, only the checksums of the pages that are read count.
    Raises DamagedPart where one cannot be read or is not what was written, SchemaTooNew.
    """

    def __init__(self, parts: Sequence[Part], *, verify: bool = True) -> None:
        self.parts = parts
        self._verify = verify
        self._metadata: dict[Part, pq.FileMetaData] = {}

    def __enter__(self) -> Self:
        for part in self.parts:
            if self._verify:
                _verify(part)
            with _damage(part):
                file = open_parquet(part.path)
                refuse_newer(int((file.schema_arrow.metadata or {})[VERSION_KEY]), part.name)
                self._metadata[part] = file.metadata
        return self

    def __exit__(self, *_: object) -> None:
        self._metadata.clear()

    def column(self, part: Part, name: str) -> pa.ChunkedArray:
        """One column of one part, text as strings."""
        with _damage(part):
            column = self._file(part).read(columns=[name], use_threads=False).column(0)
            return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column

    def read(self, part: Part, wanted: Sequence[Condition] | None = None) -> pa.Table:
        """The rows of one part that fulfil one of the conditions; all rows where None."""
        with _damage(part):
            file = self._file(part)
            if wanted is None:
                return conform(part.table, file.read(use_threads=False))
            groups = [number for number in range(file.num_row_groups) if _may_hold(file.metadata, number, wanted)]
            rows = conform(part.table, file.read_row_groups(groups, use_threads=False))
            texts = {name: rows[name].cast(pa.string()) for name in wanted[0]}
            fits = [
                reduce(pc.and_, [pc.is_in(texts[name], value_set=values) for name, values in condition.items()])
                for condition in wanted
            ]
            return rows.filter(reduce(pc.or_, fits))

    def _file(self, part: Part) -> pq.ParquetFile:
        return open_parquet(part.path, metadata=self._metadata[part], page_checksum_verification=True)


def open_parquet(path: Path, **options: Any) -> pq.ParquetFile:
    """The Parquet file at a path, whatever bytes are in that: Arrow itself takes it for UTF-8. Raises OSError."""
    return pq.ParquetFile(pa.OSFile(os.fsencode(path)), **options)


def _may_hold(metadata: pq.FileMetaData, group: int, wanted: Sequence[Condition]) -> bool:
    return any(all(_may_be_among(metadata, group, *one) for one in condition.items()) for condition in wanted)


def _may_be_among(metadata: pq.FileMetaData, group: int, name: str, wanted: pa.Array) -> bool:
    number = metadata.schema.names.index(name)
    statistics = metadata.row_group(group).column(number).statistics
    if statistics is None or not statistics.has_min_max or (wanted.null_count and statistics.null_count):
        return True
    extremes = pc.min_max(wanted)
    low, high = extremes["min"].as_py(), extremes["max"].as_py()
    return low is not None and low <= statistics.max and high >= statistics.min


def _verify(part: Part) -> None:
    """Raise DamagedPart where the file is not what its name says."""
    checksum = 0
    try:
        with part.path.open("rb") as file:
            while data := file.read(1 << 20):
                checksum = zlib.crc32(data, checksum)
    except OSError as error:
        raise DamagedPart(f"{part.name}: {error.strerror or error}") from error
    _compare(part, checksum)


def _compare(part: Part, checksum: int) -> None:
    if checksum != part.checksum:
        raise DamagedPart(f"{part.name}: checksum {checksum:08x} is not the {part.checksum:08x} in its name")


@contextmanager
def _damage(part: Part) -> Iterator[None]:
    """Whatever goes wrong while `part` is read is damage to it."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DamagedPart(f"{part.name}: {error}") from error


def list_parts(run: Path, table: str) -> tuple[Part, ...]:
    """The parts of one table that are on disk now, by rank and then by `first`. Only names are looked at."""
    parts = []
    for folder in _entries(run / table):
        rank = _RANK.fullmatch(folder)
        if rank is None:
            continue
        for file in _entries(run / table / folder):
            part = parse_part(run / table / folder / file, table, int(rank["rank"]))
            if part is not None:
                parts.append(part)
    # By checksum too: of two parts with the same rows every process is to take the same one for superfluous.
    return tuple(sorted(parts, key=lambda part: (part.rank, part.first, part.last, part.checksum)))


def parse_part(path: Path, table: str, rank: int) -> Part | None:
    """What the name of a file says of it; None where it is no part."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        return None
    return Part(path, table, rank, int(found["first"]), int(found["last"]), int(found["checksum"], 16))


def covered(parts: Iterable[Part]) -> set[Part]:
    """Those of the parts of one table that another one, of a wider range, has taken in."""
    superfluous = set()
    widest: Part | None = None
    for part in sorted(parts, key=lambda part: (part.rank, part.first, -part.last, part.checksum)):
        if widest is not None and widest.rank == part.rank and part.last <= widest.last:
            superfluous.add(part)
        else:
            widest = part
    return superfluous


def live_parts(run: Path, table: str) -> tuple[Part, ...]:
    """The parts that hold each row once: without those that wider ones have taken in."""
    parts = list_parts(run, table)
    superfluous = covered(parts)
    return tuple(part for part in parts if part not in superfluous)


def _entries(folder: Path) -> set[str]:
    """The names in a folder. Again until two looks agree: while parts are merged, one may miss both old and new."""
    before: set[str] | None = None
    for _ in range(_LOOKS):
        try:
            now = set(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return set()
        if now == before:
            break
        before = now
    return now


def read_part(part: Part) -> pa.Table:
    """All rows of `part` in the columns of `SCHEMAS`, its checksum verified.

    Raises DamagedPart where it cannot be read or is not what was written, SchemaTooNew where a newer version
    wrote it.
    """
    try:
        data = part.path.read_bytes()
    except OSError as error:
        raise DamagedPart(f"{part.name}: {error.strerror or error}") from error
    _compare(part, zlib.crc32(data))
    with _damage(part):
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
        refuse_newer(int((table.schema.metadata or {})[VERSION_KEY]), part.name)
        return conform(part.table, table)


def distinct_steps(parts: Sequence[Part], superseded: Superseded = EVERYTHING) -> int:
    """How many different steps that count the readable `parts` hold. Reads two small columns: no checksum."""
    steps: set[int] = set()
    for part in parts:
        rows = glance(part, ["attempt", "step"])
        if rows is not None:
            steps.update(superseded.drop(rows)["step"].drop_null().unique().to_pylist())
    return len(steps)


def glance(part: Part, columns: Sequence[str]) -> pa.Table | None:
    """Some columns of a part, without a look at its checksum; None where they cannot be read."""
    try:
        return open_parquet(part.path).read(columns=list(columns), use_threads=False)
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return None


def refuse_newer(version: int, what: str) -> None:
    """Raise SchemaTooNew if `version` is of the future."""
    if version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"{what} has schema version {version}; this statsbridge reads up to {SCHEMA_VERSION}: upgrade it"
        )

"""Parts: the immutable Parquet files of a run, named by the rows they hold and by their checksum."""

import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DamagedPart, SchemaTooNew
from .schema import SCHEMA_VERSION, SCHEMAS, VERSION_KEY, conform

_NAME = re.compile(r"(?P<first>\d{12,})-(?P<last>\d{12,})\.(?P<checksum>[0-9a-f]{8})\.parquet")
_RANK = re.compile(r"rank=(?P<rank>\d+)")

# Row-group statistics let readers skip parts; of the other columns they are only dead weight in small parts.
_SEARCHED = ("seq", "attempt", "step", "iteration", "time", "module", "site", "tensor", "name", "kind")


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
    floats = [field.name for field in schema if field.type == pa.float64()]
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=[field.name for field in schema if pa.types.is_dictionary(field.type)],
        use_byte_stream_split=floats,
        write_statistics=[column for column in schema.names if column in _SEARCHED],
        write_page_checksum=True,
    )
    data = sink.getvalue()
    last = first + rows.num_rows - 1
    return f"{first:012d}-{last:012d}.{zlib.crc32(data):08x}.parquet", data


def list_parts(run: Path, table: str) -> tuple[Part, ...]:
    """The parts of one table that are on disk now, by rank and then by `first`. Only names are looked at."""
    parts = []
    for folder in _entries(run / table):
        rank = _RANK.fullmatch(folder)
        if rank is None:
            continue
        for file in _entries(run / table / folder):
            found = _NAME.fullmatch(file)
            if found is not None:
                first, last = int(found["first"]), int(found["last"])
                path = run / table / folder / file
                parts.append(Part(path, table, int(rank["rank"]), first, last, int(found["checksum"], 16)))
    return tuple(sorted(parts, key=lambda part: (part.rank, part.first, part.last)))


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_part(part: Part) -> pa.Table:
    """All rows of `part` in the columns of `SCHEMAS`, its checksum verified.

    Raises DamagedPart where it cannot be read or is not what was written, SchemaTooNew where a newer version
    wrote it.
    """
    try:
        data = part.path.read_bytes()
    except OSError as error:
        raise DamagedPart(f"{part.name}: {error.strerror or error}") from error
    checksum = zlib.crc32(data)
    if checksum != part.checksum:
        raise DamagedPart(f"{part.name}: checksum {checksum:08x} is not the {part.checksum:08x} in its name")
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
        refuse_newer(int((table.schema.metadata or {})[VERSION_KEY]), part.name)
        return conform(part.table, table)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DamagedPart(f"{part.name}: {error}") from error


def distinct_steps(parts: Sequence[Part]) -> int:
    """How many different steps the readable `parts` hold. Reads only the column `step`: no checksum."""
    steps: set[int] = set()
    for part in parts:
        try:
            column = pq.ParquetFile(part.path).read(columns=["step"], use_threads=False).column(0)
        except (pa.ArrowException, OSError, ValueError, KeyError):
            continue
        steps.update(column.drop_null().unique().to_pylist())
    return len(steps)


def refuse_newer(version: int, what: str) -> None:
    """Raise SchemaTooNew if `version` is of the future."""
    if version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"{what} has schema version {version}; this statsbridge reads up to {SCHEMA_VERSION}: upgrade it"
        )

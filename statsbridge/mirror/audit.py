"""What left, to where: a Parquet table in the run folder, written before anything is sent.

Each record is a file of one row, `mirrors/audit/<mirror>-<first>-<last>.parquet`. Every hundred files in a row
become one, whose range covers theirs, and are deleted only after that: a reader ignores whatever another file
covers, so a crash in between neither loses nor doubles a row.
"""

from __future__ import annotations

import errno
import os
import re
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import LogError, Retry, StatsBridgeWarning
from ..log.files import make_folder, sync_folder, write_durably
from ..log.parts import open_parquet
from ..log.schema import as_text
from .contract import CHANNELS, Destination
from .destinations import without_secrets

SCHEMA = pa.schema(
    {
        "time": pa.timestamp("us", "UTC"),
        "backend": pa.string(),
        "destination": pa.string(),
        "channel": pa.string(),
        "rows": pa.int64(),
        "fields": pa.list_(pa.string()),
        "first_step": pa.int64(),
        "last_step": pa.int64(),
        "policy": pa.string(),
    }
)
"""A row for each delivery that was about to begin. `policy`: digest of the files that applied, "" for none."""

_FOLDER = ("mirrors", "audit")
_NAME = re.compile(r"(?P<mirror>.+)-(?P<first>\d{12,})-(?P<last>\d{12,})\.parquet")
_MERGED = 100  # files that become one; also the factor between the sizes that are merged
_SIZES = (_MERGED, _MERGED**2, _MERGED**3)
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class _File(NamedTuple):
    path: Path
    mirror: str
    first: int
    last: int


class Audit:
    """Writes the audit of one mirror of a run. `destination` is written without user, password and query."""

    def __init__(self, run: Path, mirror: str, destination: Destination, *, policy: str = "") -> None:
        self._folder = run.joinpath(*_FOLDER)
        self._mirror = mirror
        self._destination = destination
        self._policy = policy

    def record(
        self, channel: str, *, rows: int, fields: Sequence[str], first_step: int | None, last_step: int | None
    ) -> None:
        """Write down, durably, that so many rows are about to be sent. Call it before sending them.

        `fields`: what they hold, such as the names of the series. A delivery that is tried again is recorded
        again: what left is never more than what is written.

        Raises Retry where it cannot be written: then nothing may be sent either. ValueError for no channel.
        """
        if channel not in CHANNELS:
            raise ValueError(f"{channel!r} is no channel; there are {', '.join(CHANNELS)}")
        other = self._destination.artifacts if channel in {"figures", "artifacts"} else None
        row = {
            "time": time.time_ns() // 1000,
            "backend": self._destination.backend,
            "destination": as_text(without_secrets(other or self._destination.address)),
            "channel": channel,
            "rows": rows,
            "fields": [as_text(field) for field in fields],
            "first_step": first_step,
            "last_step": last_step,
            "policy": self._policy,
        }
        try:
            make_folder(self._folder)
            number = self._add(_encoded(pa.Table.from_pylist([row], schema=SCHEMA)))
        except OSError as error:
            raise Retry(
                f"the audit in {self._folder} cannot be written ({error.strerror or error}), so nothing is sent"
            ) from error
        if (number + 1) % _MERGED == 0:
            with suppress(OSError):  # done again with the next hundred
                self._tidy(number + 1)

    def _add(self, data: pa.Buffer) -> int:
        """Write one row under the next free number, and return that."""
        number = self._next()
        while True:
            file = self._path(number, number)
            if _write_new(file, data):
                # Another process may have merged this number away between our listing and our writing.
                if not any(one.path != file and one.first <= number <= one.last for one in self._files()):
                    return number
                file.unlink(missing_ok=True)
            number = max(number + 1, self._next())

    def _next(self) -> int:
        return max((file.last for file in self._files()), default=-1) + 1

    def _tidy(self, end: int) -> None:
        """Merge the full blocks among the rows before `end`; a block's rows are the same whoever merges it."""
        for size in _SIZES:
            blocks: dict[int, list[_File]] = {}
            for file in _uncovered(self._files()):
                if file.last < end - end % size:
                    blocks.setdefault(file.first // size, []).append(file)
            for block, files in blocks.items():
                if len(files) > 1:
                    with suppress(OSError, pa.ArrowException):  # a damaged file stays, and its block with it
                        rows = pa.concat_tables([_read(file.path) for file in files])
                        write_durably(self._path(block * size, (block + 1) * size - 1), _encoded(rows))
        files = self._files()
        for file in set(files).difference(_uncovered(files)):
            file.path.unlink(missing_ok=True)

    def _files(self) -> list[_File]:
        return [file for file in _list(self._folder) if file.mirror == self._mirror]

    def _path(self, first: int, last: int) -> Path:
        return self._folder / f"{self._mirror}-{first:012d}-{last:012d}.parquet"


def read_audit(run: Path) -> pa.Table:
    """All that left a run, in the columns of `SCHEMA`, by time. Empty where nothing did.

    A damaged file is named in a StatsBridgeWarning and left out. Raises LogError where there is no such folder.
    """
    if not run.is_dir():
        raise LogError(f"no run folder {run}")
    tables = [SCHEMA.empty_table()]
    for file in _uncovered(_list(run.joinpath(*_FOLDER))):
        try:
            tables.append(_read(file.path))
        except (OSError, pa.ArrowException, KeyError) as error:
            warnings.warn(
                f"statsbridge: left out a damaged file of the audit: {file.path.name}: {error}",
                StatsBridgeWarning,
                stacklevel=2,
            )
    return pa.concat_tables(tables).combine_chunks().sort_by("time")


def _list(folder: Path) -> list[_File]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = ((name, _NAME.fullmatch(name)) for name in sorted(names))
    return [_File(folder / name, one["mirror"], int(one["first"]), int(one["last"])) for name, one in found if one]


def _uncovered(files: Iterable[_File]) -> list[_File]:
    """The files that no other covers, each mirror's by number."""
    kept: list[_File] = []
    for file in sorted(files, key=lambda file: (file.mirror, file.first, -file.last)):
        if not kept or kept[-1].mirror != file.mirror or kept[-1].last < file.last:
            kept.append(file)
    return kept


def _read(path: Path) -> pa.Table:
    table = open_parquet(path).read(use_threads=False)
    return pa.Table.from_arrays([table[field.name].cast(field.type) for field in SCHEMA], schema=SCHEMA)


def _encoded(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def _write_new(path: Path, data: pa.Buffer) -> bool:
    """Write `data` durably to `path`, which nobody else can have then; False where it exists."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.new")
    write_durably(temporary, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            return False
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True

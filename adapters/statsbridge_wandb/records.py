"""Read W&B's own run file: framed records, CRC-checked, each a protobuf `wandb_internal_pb2.Record`.

The framing is that of LevelDB's log format: a 7-byte file header, then blocks of 32 KiB; in each block chunks of
CRC32 (4 bytes), length (2), type (1: whole, 2: first, 3: middle, 4: last) and data; what is too short for a chunk
header at the end of a block is padding.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_MAGIC = b":W&B"
_FILE_HEADER = 7
_BLOCK = 32768
_CHUNK_HEADER = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_READ = 64 * _BLOCK  # bytes held at a time, so that a file of gigabytes needs none of them


class Row(NamedTuple):
    """The numbers of one history record: W&B's step, and key → value."""

    step: int
    values: dict[str, float]


class RecordFile:
    """A run file that may still grow: each `read` gives the records that are complete and were not given before.

    `damaged`: what was wrong, each with its place in the file; the records around it are given all the same.
    `cut`: bytes after the last complete record, 0 where the file ends with one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged: list[str] = []
        self.cut = 0
        self._next = 0  # where the next chunk begins
        self._parts: list[bytes] = []  # of a record of which the last chunk has not been read
        self._lost = False  # the beginning of the current record is unreadable

    def read(self) -> Iterator[bytes]:
        """Serialized records, in order."""
        with self.path.open("rb") as file:
            while True:
                file.seek(self._next)
                start, data = self._next, file.read(_READ)
                yield from self._records(data)
                if self._next == start:
                    self.cut = len(data) + sum(map(len, self._parts))
                    return

    def _records(self, data: bytes) -> Iterator[bytes]:
        base, at = self._next, 0
        if base == 0:
            if len(data) < _FILE_HEADER:
                return
            if not data.startswith(_MAGIC):
                self.damaged.append("it does not begin as a W&B run file does")
            at = _FILE_HEADER
        while True:
            left = _BLOCK - (base + at) % _BLOCK
            if left < _CHUNK_HEADER.size:
                at, left = at + left, _BLOCK
            if at + _CHUNK_HEADER.size > len(data):
                break
            check, length, kind = _CHUNK_HEADER.unpack_from(data, at)
            end = at + _CHUNK_HEADER.size + length
            fits = length + _CHUNK_HEADER.size <= left and kind in {_WHOLE, _FIRST, _MIDDLE, _LAST}
            if fits and end > len(data):
                break
            if not fits or zlib.crc32(data[at + 6 : end]) != check:
                # What follows inside the block cannot be found without a length that can be trusted.
                self.damaged.append(f"bytes {base + at} to {base + at + left} fail their checksum")
                self._parts, self._lost = [], True
                if at + left > len(data):
                    at = len(data)
                    break
                at += left
                continue
            yield from self._join(kind, data[at + _CHUNK_HEADER.size : end])
            at = end
        self._next = base + min(at, len(data))

    def _join(self, kind: int, chunk: bytes) -> Iterator[bytes]:
        if kind in {_WHOLE, _FIRST}:
            self._parts, self._lost = [], False
        if self._lost:
            return
        self._parts.append(chunk)
        if kind in {_WHOLE, _LAST}:
            yield b"".join(self._parts)
            self._parts = []


def parse(record: bytes) -> Any:
    """The protobuf `Record` of serialized bytes."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # its stub names nothing
    parsed = messages.Record()
    parsed.ParseFromString(record)
    return parsed


def history(record: Any) -> Row:
    """The numbers in a record that has the field `history`; media and texts are left out."""
    values: dict[str, float] = {}
    for item in record.history.item:
        if len(item.nested_key) > 1:
            continue  # part of a histogram, figure or other dictionary
        try:
            # float() reads NaN and Infinity, which JSON does not have, and keeps the sign of "-0".
            value = float(item.value_json or getattr(item, item.WhichOneof("value") or "text"))
        except (TypeError, ValueError):
            continue
        values[item.nested_key[0] if item.nested_key else item.key] = value
    return Row(record.history.step.num, values)

"""Event files as bytes: framed and checksummed records, in a file that never keeps what was not acknowledged.

The frame (TFRecord): length, uint64; its masked CRC; the payload; its masked CRC, all little-endian. The writers
that come with TensorBoard put the host's name into the file's, and compute the checksum byte by byte in Python:
12 µs a value, during which no other thread runs.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected
SHORT = 512  # bytes below which a plain loop is faster
HEADER = struct.Struct("<QI")
FOOTER = struct.Struct("<I")


class Torn(Exception):  # noqa: N818 - like StopIteration, it says how a sequence ended
    """A record is cut off or does not match its checksum; `offset`: where it begins."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


@cache
def _advance(level: int) -> Words:
    """Tables, uint32 of shape [4, 256], by which the state of a CRC passes over 2**level zero bytes."""
    if level == 0:
        table: Words = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            table = np.where(table & 1, (table >> 1) ^ np.uint32(POLYNOMIAL), table >> 1).astype(np.uint32)
        shifted = [np.arange(256, dtype=np.uint32) << np.uint32(8 * byte) for byte in range(3)]
        return np.stack([table, *shifted])
    half = _advance(level - 1)
    passed: Words = _pass(half, half.ravel()).reshape(4, 256)
    return passed


def _pass(tables: Words, state: Words) -> Words:
    low, second, third, high = state.astype("<u4").view(np.uint8).reshape(-1, 4).T.astype(np.intp)
    passed: Words = tables[0].take(low) ^ tables[1].take(second) ^ tables[2].take(third) ^ tables[3].take(high)
    return passed


@cache
def _table() -> list[int]:
    table: list[int] = _advance(0)[0].tolist()
    return table


@cache
def _pairs() -> Words:
    """The state after two bytes, by both of them, little-endian: uint32 of shape [65536]."""
    both = np.arange(65536, dtype=np.uint32)
    single = _advance(0)[0]
    passed: Words = _pass(_advance(0), single[both & np.uint32(255)]) ^ single[both >> np.uint32(8)]
    return passed


def crc32c(data: bytes) -> int:
    """CRC-32C of RFC 3720. A CRC is linear: parts of the data are done side by side, and then joined in pairs."""
    if len(data) < SHORT:
        table, state = _table(), 0xFFFFFFFF
        for byte in data:
            state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
        return state ^ 0xFFFFFFFF
    levels = (len(data) - 1).bit_length()
    width = levels // 2 - 2  # a part has 2**width bytes: few enough steps, and few enough parts to join
    padded = np.zeros(1 << levels, np.uint8)  # zeros in front do not count, as long as the state is zero
    own = padded[-len(data) :]
    own[:] = np.frombuffer(data, np.uint8)
    own[:4] ^= 0xFF  # the same as beginning with a state of ones
    words = padded.view("<u2").reshape(-1, 1 << (width - 1))
    states: Words = np.zeros(len(words), np.uint32)
    for column in np.ascontiguousarray(words.T):
        states = _pairs().take(states & np.uint32(0xFFFF) ^ column) ^ states >> np.uint32(16)
    for level in range(width, levels):
        states = _pass(_advance(level), states[0::2]) ^ states[1::2]
    return int(states[0]) ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    value = crc32c(data)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """One record."""
    length = struct.pack("<Q", len(payload))
    return HEADER.pack(len(payload), _masked(length)) + payload + FOOTER.pack(_masked(payload))


def payloads(data: bytes) -> Iterator[bytes]:
    """The payloads of a file's records. Raises Torn at the first that is not whole."""
    offset = 0
    while offset < len(data):
        begin = offset + HEADER.size
        if begin > len(data):
            raise Torn(offset)
        length, check = HEADER.unpack_from(data, offset)
        end = begin + length
        if check != _masked(data[offset : offset + 8]) or end + FOOTER.size > len(data):
            raise Torn(offset)
        payload = data[begin:end]
        if FOOTER.unpack_from(data, end)[0] != _masked(payload):
            raise Torn(offset)
        yield payload
        offset = end + FOOTER.size


class EventFile:
    """A new event file. `length`: bytes of it that are acknowledged; whatever lies behind them is written over."""

    def __init__(self, path: Path, first: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.length = 0
        self._file = path.open("xb", buffering=0)
        self._identity = _identity(os.fstat(self._file.fileno()))
        self.write([first])
        self.acknowledge()
        _sync_folder(path.parent)

    def write(self, records: Iterable[bytes]) -> None:
        """Put records behind what is acknowledged, and return when they are on the disk.

        Raises OSError; a file that is no longer found at its path (an unmounted or deleted folder) is such an error.
        """
        if _identity(self.path.stat()) != self._identity:
            raise FileNotFoundError(f"{self.path} has been replaced by another file")
        data = memoryview(b"".join(map(frame, records)))
        self._end = self.length + len(data)
        self._file.truncate(self.length)
        self._file.seek(self.length)
        while data:
            data = data[self._file.write(data) :]
        os.fsync(self._file.fileno())

    def acknowledge(self) -> None:
        """What was written last stays."""
        self.length = self._end

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The reader of W&B's run file, against a writer made from the published format, and real damage."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsbridge_wandb.records import RecordFile

BLOCK = 32768
HEADER = b":W&B\xe1\xbe\x00"


def framed(records: list[bytes]) -> bytes:
    """LevelDB's log format with W&B's file header: 7-byte chunk headers, no chunk across blocks of 32 KiB."""
    out = bytearray(HEADER)
    for record in records:
        first, rest = True, record
        while first or rest:
            left = BLOCK - len(out) % BLOCK
            if left < 7:
                out += b"\0" * left
                left = BLOCK
            chunk, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if not rest else 2) if first else (4 if not rest else 3)
            out += struct.pack("<IHB", zlib.crc32(bytes([kind]) + chunk), len(chunk), kind) + chunk
            first = False
    return bytes(out)


SIZES = st.lists(st.one_of(st.integers(0, 200), st.integers(BLOCK - 60, BLOCK + 60), st.just(3 * BLOCK)), max_size=12)


@given(SIZES)
def test_any_records_come_back(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    records = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    path = tmp_path_factory.mktemp("records") / "run.wandb"
    path.write_bytes(framed(records))
    file = RecordFile(path)
    assert list(file.read()) == records
    assert (file.damaged, file.cut) == ([], 0)


def test_a_growing_file_gives_each_record_once_however_it_is_cut(tmp_path: Path) -> None:
    records = [bytes([number]) * (3000 * number) for number in range(30)]
    data, path = framed(records), tmp_path / "run.wandb"
    path.write_bytes(b"")
    file, found = RecordFile(path), []
    for end in [*range(0, len(data), 7919), len(data)]:
        path.write_bytes(data[:end])
        found += list(file.read())
    assert found == records
    assert (file.damaged, file.cut) == ([], 0)


def test_a_flipped_bit_costs_its_block_and_is_named(tmp_path: Path) -> None:
    records = [bytes([number]) * 5000 for number in range(40)]
    data, path = bytearray(framed(records)), tmp_path / "run.wandb"
    data[2 * BLOCK + 100] ^= 1
    path.write_bytes(data)
    file = RecordFile(path)
    found = list(file.read())
    assert len(file.damaged) == 1
    assert "checksum" in file.damaged[0]
    assert [record for record in records if record in found] == found  # in order, nothing made up
    assert records[:10] == found[:10]
    assert records[-20:] == found[-20:]
    assert len(found) >= len(records) - 9


def test_a_truncated_file_gives_what_is_whole_and_says_so(tmp_path: Path) -> None:
    records = [bytes([number]) * 5000 for number in range(20)]
    path = tmp_path / "run.wandb"
    path.write_bytes(framed(records)[:-123])
    file = RecordFile(path)
    assert list(file.read()) == records[:-1]
    assert file.damaged == []
    assert file.cut > 0


def test_another_kind_of_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.wandb"
    path.write_bytes(b"not a run file at all, but text")
    file = RecordFile(path)
    assert list(file.read()) == []
    assert "does not begin as a W&B run file" in file.damaged[0]

"""Event files as bytes, against TensorBoard's own checksum and reader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsbridge_tensorboard.records import EventFile, Torn, crc32c, frame, payloads
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as reference


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_checksums_of_the_standard(data: bytes, expected: int) -> None:
    """RFC 3720, B.4, and the usual check value."""
    assert crc32c(data) == expected


@given(st.integers(0, 5000), st.randoms(use_true_random=False))
def test_checksum_is_tensorboards(size: int, random: object) -> None:
    data = random.randbytes(size)  # type: ignore[attr-defined]
    assert crc32c(data) == reference(data) & 0xFFFFFFFF


@pytest.mark.parametrize("size", [*range(505, 520), 1023, 1024, 1025, 65_537])
def test_checksum_at_the_limits_of_the_tables(size: int) -> None:
    data = os.urandom(size)
    assert crc32c(data) == reference(data) & 0xFFFFFFFF


RECORDS = [b"", b"a", b"version", bytes(range(256)) * 5, b"last"]


def test_tensorboard_reads_the_records(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(b"".join(map(frame, RECORDS)))
    reader = PyRecordReader_New(str(path))
    found = []
    for _ in RECORDS:
        reader.GetNext()
        found.append(reader.record())
    assert found == RECORDS
    assert list(payloads(path.read_bytes())) == RECORDS


def test_every_cut_and_every_changed_byte_is_noticed() -> None:
    data = b"".join(map(frame, RECORDS))
    ends = {0}
    for record in RECORDS:
        ends.add(max(ends) + len(frame(record)))
    for size in range(len(data)):
        if size in ends:
            list(payloads(data[:size]))
            continue
        with pytest.raises(Torn) as torn:
            list(payloads(data[:size]))
        assert torn.value.offset == max(end for end in ends if end < size)
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        with pytest.raises(Torn):
            list(payloads(bytes(damaged)))


def test_what_was_not_acknowledged_is_written_over(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "below" / "file", b"first")
    file.write([b"x" * 1000, b"y"])
    file.write([b"second"])
    file.acknowledge()
    assert list(payloads(file.path.read_bytes())) == [b"first", b"second"]
    assert file.length == file.path.stat().st_size
    file.close()


def test_a_file_that_was_replaced_is_not_written_to(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "file", b"first")
    file.path.unlink()
    with pytest.raises(FileNotFoundError):
        file.write([b"second"])
    file.path.write_bytes(b"somebody else's")
    with pytest.raises(FileNotFoundError):
        file.write([b"second"])
    assert file.path.read_bytes() == b"somebody else's"
    file.close()

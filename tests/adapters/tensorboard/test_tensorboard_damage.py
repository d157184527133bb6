"""Reading back names what is missing, cut off or changed, and reads all the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from statsbridge_tensorboard import TensorBoard
from statsbridge_tensorboard.records import frame, payloads
from tensorboard.compat.proto.event_pb2 import Event

from statsbridge import MirrorError, testing
from statsbridge.mirror import Reading


class Mirrored:
    """Six batches in two files, the second begun after the mirror was taken up again."""

    def __init__(self, folder: Path) -> None:
        self.log_dir = folder / "runs"
        self.run = testing.made_run(folder)
        self.memory: dict[str, str] = {}
        self.batches = testing.made_batches(6)
        for part in (self.batches[:3], self.batches[3:]):
            session = testing.Session(TensorBoard(self.log_dir), self.run, memory=self.memory)
            for batch in part:
                session.send(batch)
            session.close()
        self.files = sorted(self.log_dir.rglob("*tfevents*"))

    def points(self, first: int, end: int) -> list[Reading]:
        points = [point for batch in self.batches[first:end] for point in batch.points]
        return testing.expected(TensorBoard(), points)

    def read(self) -> tuple[list[Reading], str]:
        """What is read, and what is said about the rest."""
        adapter = TensorBoard(self.log_dir)
        readings = []
        try:
            for reading in adapter.read_back(self.run, adapter.destination(), self.memory):
                readings.append(reading)
        except MirrorError as error:
            return readings, str(error)
        return readings, ""


@pytest.fixture
def mirrored(tmp_path: Path) -> Mirrored:
    return Mirrored(tmp_path)


def test_undamaged(mirrored: Mirrored) -> None:
    assert mirrored.read() == (mirrored.points(0, 6), "")
    assert [path.name for path in mirrored.files] == [
        "events.out.tfevents.0000000001.statsbridge",
        "events.out.tfevents.0000000002.statsbridge",
    ]


def test_a_dropped_file(mirrored: Mirrored) -> None:
    mirrored.files[0].unlink()
    readings, told = mirrored.read()
    assert readings == mirrored.points(3, 6)
    assert str(mirrored.files[0]) in told
    assert "No such file" in told


def test_a_file_cut_off_between_two_records(mirrored: Mirrored) -> None:
    records = list(payloads(mirrored.files[0].read_bytes()))
    mirrored.files[0].write_bytes(b"".join(map(frame, records[:-1])))
    readings, told = mirrored.read()
    assert len(readings) == 55
    assert f"{mirrored.files[0]} has" in told


def test_a_file_cut_off_within_a_record(mirrored: Mirrored) -> None:
    content = mirrored.files[0].read_bytes()
    mirrored.files[0].write_bytes(content[:-3])
    readings, told = mirrored.read()
    assert len(readings) == 55
    assert f"has {len(content) - 3} bytes of {len(content)}" in told


def test_a_changed_byte(mirrored: Mirrored) -> None:
    content = bytearray(mirrored.files[0].read_bytes())
    content[-20] ^= 1
    mirrored.files[0].write_bytes(content)
    readings, told = mirrored.read()
    assert len(readings) == 55
    assert "is damaged at byte" in told


def change_exact(event: Event) -> None:
    event.summary.value[0].tensor.double_val[0] = 7.0
    event.summary.value[0].tensor.float_val[0] = 7.0


def change_shown(event: Event) -> None:
    event.summary.value[0].tensor.float_val[0] = 7.0


@pytest.mark.parametrize("change", [change_exact, change_shown])
def test_a_value_changed_with_a_right_checksum(mirrored: Mirrored, change: Callable[[Event], None]) -> None:
    """Also where only the rounded value was changed, which is all that the page shows."""
    records = list(payloads(mirrored.files[1].read_bytes()))
    event = Event.FromString(records[-1])
    change(event)
    mirrored.files[1].write_bytes(b"".join(map(frame, [*records[:-1], event.SerializeToString()])))
    readings, told = mirrored.read()
    assert told == ""
    changed = [(old, new) for old, new in zip(mirrored.points(0, 6), readings, strict=True) if old != new]
    assert [new.value for _, new in changed] == [7.0]


def test_a_file_that_is_there_twice(mirrored: Mirrored) -> None:
    copy = mirrored.files[1].with_name("events.out.tfevents.0000000003.copy")
    copy.write_bytes(mirrored.files[1].read_bytes())
    assert mirrored.read() == (mirrored.points(0, 6) + mirrored.points(3, 6), "")


def test_half_a_record_behind_what_was_acknowledged(mirrored: Mirrored) -> None:
    """A kill leaves it; opening again cuts it off."""
    with mirrored.files[1].open("ab") as file:
        file.write(frame(b"x" * 50)[:40])
    assert mirrored.read() == (mirrored.points(0, 6), "")
    testing.Session(TensorBoard(mirrored.log_dir), mirrored.run, memory=mirrored.memory).close()
    list(payloads(mirrored.files[1].read_bytes()))
    assert mirrored.read() == (mirrored.points(0, 6), "")


def test_a_folder_deleted_by_hand_is_made_again(mirrored: Mirrored) -> None:
    for path in mirrored.files:
        path.unlink()
    mirrored.files[0].parent.rmdir()
    session = testing.Session(TensorBoard(mirrored.log_dir), mirrored.run, memory=mirrored.memory)
    session.send(testing.made_batches(1, first=12)[0])
    session.close()
    readings, told = mirrored.read()
    assert [reading.step for reading in readings] == [12] * 5 + [13] * 5
    assert told.count("cannot be read") == 2


def test_nothing_there(tmp_path: Path) -> None:
    adapter = TensorBoard(tmp_path)
    with pytest.raises(MirrorError, match="there is no event file in"):
        list(adapter.read_back(testing.made_run(tmp_path), adapter.destination(), {}))

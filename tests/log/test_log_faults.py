"""A disk that fails at any operation, in any way: training goes on, and the record says exactly what it lacks."""

import errno
import os
from pathlib import Path

import pytest
from log_disk_helpers import FailingDisk
from log_rows import new_run, scalar_rows, stats_rows

from statsbridge.log import Writer, load
from statsbridge.log import backlog as backlog_module
from statsbridge.log import writer as writer_module
from statsbridge.log.compaction import compact_table, remove_unfinished
from statsbridge.log.folder import writer_file
from statsbridge.log.parts import covered, list_parts
from statsbridge.log.schema import to_table

CODES = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EACCES)
# Every operation and every error; in each run of the fast tests one error an operation, in turn.
turns = pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in range(1, 5))])


def work(step: int) -> dict[str, dict[str, object]]:
    return {"stats": stats_rows(step, 3), "scalars": scalar_rows(step, loss=step)}


def submit(writer: Writer, step: int) -> None:
    assert writer.submit(lambda: work(step), rows=4)


def check_steps(run: Path, steps: list[int]) -> None:
    """Each of the steps is there once, whole and with its numbers; nothing else is."""
    data = load(run)
    assert data.scalars["value"].to_pylist() == [float(step) for step in steps]
    assert data.stats["step"].to_pylist() == [step for step in steps for _ in range(3)]
    expected = [float(value) for step in steps for value in stats_rows(step, 3)["mean"]]
    assert data.stats["mean"].to_pylist() == expected
    for table in ("stats", "scalars", "events"):
        rows = getattr(data, table)
        assert rows["seq"].to_pylist() == list(range(rows.num_rows))
    assert data.damaged == ()


@turns
@pytest.mark.parametrize("first", [True, False], ids=["first flush", "later flush"])
def test_each_operation_of_a_flush_fails_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: int, first: bool
) -> None:
    disk = FailingDisk(monkeypatch)
    at = 0
    while True:
        run, warned = new_run(tmp_path), list[str]()
        writer = Writer(run, flush_interval=3600, on_warning=warned.append)
        if not first:
            submit(writer, 0)
            assert writer.flush()
        disk.arm(at, CODES[(at + turn) % 5])
        submit(writer, 1)
        acknowledged = writer.flush()
        reached = len(disk.operations) > at
        disk.disarm()
        submit(writer, 2)  # writing resumes by itself
        assert writer.flush()
        assert writer.dropped == {}
        assert acknowledged or reached
        assert len(warned) == (0 if acknowledged else 1), warned
        check_steps(run, [1, 2] if first else [0, 1, 2])
        assert writer.close()
        assert load(run).events.num_rows == 0
        if not reached:
            break
        at += 1
    assert at >= 16, "two parts: open, write, fsync, close, rename, and the folder's open, fsync, close"


@turns
def test_a_disk_that_fails_for_long_costs_what_finds_no_room_and_it_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    size = sum(to_table(table, columns).nbytes for table, columns in work(0).items())
    monkeypatch.setattr(backlog_module, "BACKLOG_BYTES", 4 * size)
    disk = FailingDisk(monkeypatch)
    for at in range(17):
        run, warned = new_run(tmp_path), list[str]()
        writer = Writer(run, flush_interval=3600, on_warning=warned.append)
        submit(writer, 0)
        assert writer.flush()
        disk.arm(at, CODES[(at + turn) % 5], more=float("inf"))
        for step in range(1, 12):
            submit(writer, step)
            writer.flush()
            assert writer._backlog.nbytes <= 4 * size, "memory is bounded"
        disk.disarm()
        submit(writer, 12)
        assert writer.flush()
        dropped = dict(writer.dropped)
        assert writer.close()
        data = load(run)
        steps = data.scalars["step"].to_pylist()
        assert steps == sorted(set(steps))
        assert steps[0] == 0
        assert steps[-1] == 12
        assert dropped == {"stats": 39 - data.stats.num_rows, "scalars": 13 - len(steps)}
        events = data.events.to_pylist()
        assert {event["kind"] for event in events} == {"rows_dropped"}
        assert sum(event["value"] for event in events) == sum(dropped.values())
        assert sum("cannot write" in text for text in warned) == 1
        assert len(warned) == 3  # and one for each table that lost rows
        assert data.damaged == ()
        assert not list(run.rglob("*.tmp"))


def test_what_is_on_disk_is_not_counted_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the fsync of the folder fails, until the end: every reader has the rows."""
    run, warned = new_run(tmp_path), list[str]()
    writer = Writer(run, flush_interval=3600, on_warning=warned.append)
    disk = FailingDisk(monkeypatch)
    writer.submit(lambda: {"scalars": scalar_rows(0, loss=0)})
    assert writer.flush()
    disk.arm(6, errno.EIO, more=float("inf"))
    writer.submit(lambda: {"scalars": scalar_rows(1, loss=1)})
    assert not writer.close()
    disk.disarm()
    assert writer.dropped == {}
    assert load(run).scalars["step"].to_pylist() == [0, 1]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_disk_that_does_not_even_answer_ends_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """What is lost is counted, and whoever waits for the writer is told at once."""
    run, warned = new_run(tmp_path), list[str]()
    writer = Writer(run, flush_interval=3600, on_warning=warned.append)
    disk = FailingDisk(monkeypatch)
    writer.submit(lambda: {"scalars": scalar_rows(0, loss=0)})
    assert writer.flush()
    disk.arm(0, code, more=float("inf"))
    writer.submit(lambda: {"scalars": scalar_rows(1, loss=1)})
    assert not writer.flush()
    real = os.stat

    def stat(path: object, **options: object) -> os.stat_result:
        if "scalars" in str(path):
            raise OSError(code, os.strerror(code))
        return real(path, **options)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        done = writer.begin_close("finished").wait(10)
    disk.disarm()
    assert done
    assert writer.dropped == {"scalars": 1}
    assert [("cannot write" in text, "1 row could not" in text) for text in warned] == [(True, False), (False, True)]
    assert not writer.close()


@turns
def test_each_operation_of_a_merge_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    disk = FailingDisk(monkeypatch)

    def merge(run: Path) -> bool:
        try:
            return compact_table(run, "stats", 0, fan_in=2).parts_after == 1
        except OSError:
            return False

    def three_parts() -> Path:
        run = new_run(tmp_path)
        writer = Writer(run, flush_interval=3600)
        for step in range(3):
            submit(writer, step)
            assert writer.flush()
        assert writer.close()
        return run

    run = three_parts()
    disk.arm(-1, 0)
    assert merge(run)
    operations = list(disk.operations)
    writes = [at for at, name in enumerate(operations) if name == "write"]
    others = [at for at, name in enumerate(operations) if name != "write"]
    assert len(others) >= 12
    failed = 0
    for at in sorted({*others, writes[0], writes[len(writes) // 2], writes[-1]}):
        run = three_parts()
        disk.arm(at, CODES[(at + turn) % 5])
        failed += not merge(run)
        disk.disarm()
        check_steps(run, [0, 1, 2])
        assert merge(run)
        remove_unfinished(run, "stats", 0)
        assert not covered(list_parts(run, "stats"))
        assert not list(run.rglob("*.tmp"))
        check_steps(run, [0, 1, 2])
    assert failed >= 9


def test_merges_that_fail_beside_a_training_do_not_touch_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statsbridge.log.background.FAN_IN", 2)
    real = FailingDisk(monkeypatch)
    run, warned = new_run(tmp_path), list[str]()

    def refuse(*about: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("statsbridge.log.compaction.DurableFile", refuse)
    monkeypatch.setattr("statsbridge.log.compaction.choose", lambda parts, fan_in: list(parts) if parts else None)
    writer = Writer(run, flush_interval=3600, on_warning=warned.append)
    for step in range(6):
        submit(writer, step)
        assert writer.flush()
    assert writer.close()
    assert warned == []
    assert len(real.operations) > 0
    check_steps(run, list(range(6)))
    assert not covered(list_parts(run, "stats"))


def test_a_process_without_threads_left_writes_on_and_merges_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path)
    writer = Writer(run, flush_interval=3600)
    monkeypatch.setattr("statsbridge.log.background.FAN_IN", 2)

    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        for step in range(4):
            submit(writer, step)
            assert writer.flush()
    started = []
    monkeypatch.setattr("statsbridge.log.background.Compactor._merge", lambda self, tables: started.extend(tables))
    submit(writer, 4)
    assert writer.flush()
    assert writer.close()
    assert set(started) == {"stats", "scalars"}
    check_steps(run, list(range(5)))


def test_a_heartbeat_that_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FailingDisk(monkeypatch)
    monkeypatch.setattr(writer_module, "HEARTBEAT", 0.0)
    for at in range(8):
        run, warned = new_run(tmp_path), list[str]()
        writer = Writer(run, flush_interval=3600, on_warning=warned.append)
        writer.flush()
        before = writer_file(run, 0).read_text()
        disk.arm(at, errno.ENOSPC)
        writer.flush()
        disk.disarm()
        writer.flush()
        assert writer_file(run, 0).read_text() != before
        assert writer.close()
        assert '"finished"' in writer_file(run, 0).read_text()
        assert warned == []
        assert not list(run.rglob("*.tmp"))


def test_rows_that_cannot_be_encoded_are_counted_and_keep_nobody_from_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, warned = new_run(tmp_path), list[str]()
    writer = Writer(run, flush_interval=3600, on_warning=warned.append)
    encode = backlog_module.encode
    outcomes: list[Exception] = [ValueError("too large for Parquet"), MemoryError()]

    def fail(name: str, *rows: object, **more: object) -> object:
        if name == "stats" and outcomes:
            raise outcomes.pop(0)
        return encode(name, *rows, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(backlog_module, "encode", fail)
    submit(writer, 0)
    assert not writer.flush()  # these rows never can
    submit(writer, 1)
    assert not writer.flush()  # these can once there is memory
    submit(writer, 2)
    assert writer.flush()
    assert writer.dropped == {"stats": 3}
    assert writer._backlog.nbytes == 0
    assert writer.close()
    data = load(run)
    assert data.stats["step"].to_pylist() == [1] * 3 + [2] * 3
    assert data.scalars["step"].to_pylist() == [0, 1, 2]
    assert [(event["kind"], event["value"]) for event in data.events.to_pylist()] == [("rows_dropped", 3.0)]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_permission_lost_and_given_back(tmp_path: Path) -> None:
    run, warned = new_run(tmp_path), list[str]()
    writer = Writer(run, flush_interval=3600, on_warning=warned.append)
    submit(writer, 0)
    assert writer.flush()
    folder = run / "stats" / "rank=0"
    folder.chmod(0o500)
    submit(writer, 1)
    assert not writer.flush()
    folder.chmod(0o700)
    submit(writer, 2)
    assert writer.close()
    assert len(warned) == 1
    check_steps(run, [0, 1, 2])

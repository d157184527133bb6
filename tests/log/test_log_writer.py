"""The writer inside one process: numbering, parts, pacing, and everything that can go wrong with the disk."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from log_rows import new_run, scalar_rows, stats_rows

from statsbridge import LogError
from statsbridge.errors import StatsBridgeWarning
from statsbridge.log import Writer, list_runs, load
from statsbridge.log import backlog as backlog_module
from statsbridge.log import writer as writer_module
from statsbridge.log.failures import INTERNAL_ERRORS
from statsbridge.log.folder import writer_file
from statsbridge.log.parts import list_parts
from statsbridge.log.writer import LAST_FLUSHES


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return new_run(tmp_path)


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def writer(run: Path, warned: list[str]) -> Iterator[Writer]:
    writer = Writer(run, flush_interval=0.05, on_warning=warned.append)
    yield writer
    writer.close(5)


def test_seq_has_no_gaps_and_a_step_is_never_cut(writer: Writer, run: Path) -> None:
    sizes = np.random.default_rng(0).integers(1, 40, 100)
    for step, rows in enumerate(sizes):
        assert writer.submit(lambda step=step, rows=rows: {"stats": stats_rows(step, rows)}, rows=int(rows))
        if step % 9 == 0:
            assert writer.flush()
    assert writer.close()

    parts = list_parts(run, "stats")
    assert 12 <= len(parts) < 100
    stats = load(run).stats
    assert stats["seq"].to_pylist() == list(range(sizes.sum()))
    assert stats["step"].to_pylist() == np.repeat(np.arange(100), sizes).tolist()
    ends = set(np.cumsum(sizes) - 1)
    assert all(part.last in ends for part in parts)


def test_big_backlogs_are_cut_between_steps(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "PART_BYTES", 3000)
    backlog = backlog_module.Backlog(run, rank=0, attempt=3)
    for step in range(20):
        backlog.add("stats", writer_module.to_table("stats", stats_rows(step, 5)))
    assert backlog.write() is None
    assert backlog.nbytes == 0
    parts = list_parts(run, "stats")
    assert len(parts) > 3
    assert all(part.first % 5 == 0 and part.last % 5 == 4 for part in parts)
    assert load(run).stats["attempt"].to_pylist() == [3] * 100


def test_tables_are_numbered_apart_and_empty_ones_make_no_part(writer: Writer, run: Path) -> None:
    writer.submit(lambda: {"scalars": scalar_rows(0, a=1, b=2), "events": {"kind": [], "message": []}, "stats": {}})
    writer.submit(lambda: {"modules": {"module": ["", "a"], "step": 0}, "scalars": scalar_rows(1, a=1)})
    assert writer.close()
    data = load(run)
    assert data.scalars["seq"].to_pylist() == [0, 1, 2]
    assert data.modules["seq"].to_pylist() == [0, 1]
    assert data.events.num_rows == 0
    assert not (run / "events").exists()
    assert not (run / "stats").exists()


def test_flushes_are_paced_but_urgent_work_is_not(run: Path) -> None:
    writer = Writer(run, flush_interval=3600)
    writer.submit(lambda: {"scalars": scalar_rows(0, a=1)})
    assert writer.flush()
    for step in range(1, 50):
        writer.submit(lambda step=step: {"scalars": scalar_rows(step, a=1)})
    time.sleep(0.1)
    assert len(list_parts(run, "scalars")) == 1
    writer.submit(lambda: {"events": {"kind": "alert", "severity": "critical"}}, urgent=True)
    wait_until(lambda: list_parts(run, "events"))
    assert [(part.first, part.last) for part in list_parts(run, "scalars")] == [(0, 0), (1, 49)]
    assert writer.close()


class Clock:
    """The writer's time, which passes only where a test lets it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr(writer_module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Slow:
    """Works whose conversion takes a while, held back until all of them are queued; each looks at the parts so far."""

    def __init__(self, run: Path, clock: Clock) -> None:
        self.behind: list[int] = []
        self._run, self._clock, self._go_on = run, clock, threading.Event()

    def work(self, step: int, seconds: float) -> dict[str, Any]:
        assert self._go_on.wait(30)
        self.behind.append(step - sum(part.rows for part in list_parts(self._run, "scalars")))
        self._clock.now += seconds
        return {"scalars": scalar_rows(step, a=1)}

    def record(self, writer: Writer, steps: int, seconds: float) -> None:
        for step in range(steps):
            assert writer.submit(lambda step=step: self.work(step, seconds))
        self._go_on.set()


def test_a_thread_that_falls_behind_writes_each_interval(run: Path, clock: Clock) -> None:
    """Or else a kill -9 would cost everything since it fell behind."""
    writer = Writer(run, flush_interval=100.0)
    shown: list[int] = []
    writer.follow(lambda tables: shown.append(sum(rows.num_rows for rows in tables.values())) or {})
    slow = Slow(run, clock)
    slow.record(writer, 40, seconds=30.0)
    assert writer.flush()
    assert max(slow.behind) == 3, "the fourth is converted when the interval is over"
    assert [part.rows for part in list_parts(run, "scalars")] == [4] * 10
    assert [rows for rows in shown if rows] == [4] * 10
    assert writer.close()
    assert load(run).scalars["step"].to_pylist() == list(range(40))


def test_on_a_slow_disk_half_of_the_time_is_left_for_the_work(
    run: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = backlog_module.Backlog.write

    def take_long(backlog: backlog_module.Backlog) -> OSError | None:
        clock.now += 300.0 if backlog.nbytes else 0.0
        return write(backlog)

    monkeypatch.setattr(backlog_module.Backlog, "write", take_long)
    writer = Writer(run, flush_interval=100.0)
    Slow(run, clock).record(writer, 40, seconds=30.0)
    assert writer.close()
    rows = [part.rows for part in list_parts(run, "scalars")]
    assert rows == [4, 10, 10, 10, 6]


def test_a_thread_that_falls_behind_is_alive_to_others(
    run: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its heartbeat stopped for two minutes, the run could be resumed elsewhere."""
    beats: list[float] = []
    monkeypatch.setattr(writer_module, "HEARTBEAT", 1000.0)
    monkeypatch.setattr(writer_module, "write_state", lambda *_: beats.append(clock.now))
    writer = Writer(run, flush_interval=100.0)
    Slow(run, clock).record(writer, 400, seconds=30.0)
    assert writer.flush()
    assert len(beats) >= 10
    assert max(np.diff(beats)) < 1200.0
    assert writer.close()


def test_what_came_during_a_long_flush_does_not_wait_another_interval(run: Path, clock: Clock) -> None:
    writer = Writer(run, flush_interval=1000.0)
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> dict[str, Any]:
        begun.set()
        assert go_on.wait(30)
        return {"scalars": scalar_rows(0, a=1)}

    writer.submit(hold, urgent=True)
    assert begun.wait(30)
    writer.submit(lambda: {"scalars": scalar_rows(1, a=1)})
    clock.now += 1000.0
    go_on.set()
    wait_until(lambda: len(list_parts(run, "scalars")) == 2)
    assert writer.close()


def test_work_is_written_without_anyone_asking(writer: Writer, run: Path) -> None:
    writer.submit(lambda: {"scalars": scalar_rows(0, a=1)})
    wait_until(lambda: list_parts(run, "scalars"))
    writer.submit(lambda: {"scalars": scalar_rows(1, a=1)})
    wait_until(lambda: len(list_parts(run, "scalars")) == 2)


def test_submitting_from_many_threads_loses_nothing(writer: Writer, run: Path) -> None:
    def submit(thread: int) -> None:
        for step in range(200):
            assert writer.submit(lambda step=step: {"scalars": scalar_rows(step, **{f"t{thread}": step})})

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.close()
    scalars = load(run).scalars
    assert scalars["seq"].to_pylist() == list(range(800))
    for number in range(4):
        mine = scalars.filter(pc.equal(scalars["name"], f"t{number}"))
        assert mine["step"].to_pylist() == list(range(200)), "each thread's in its order"


def test_work_that_fails_costs_only_itself(writer: Writer, run: Path, warned: list[str]) -> None:
    def fail() -> dict[str, Any]:
        raise ZeroDivisionError("on purpose")

    def leave() -> dict[str, Any]:
        raise SystemExit(3)

    works = [
        fail,
        lambda: {"scalars": scalar_rows(1, a=1)},
        lambda: {"scalars": {"nonsense": [1]}, "stats": stats_rows(2, 2)},
        leave,
        lambda: {"unknown": {"a": [1]}},
        lambda: {"scalars": scalar_rows(3, a=1)},
    ]
    for work in works:
        assert writer.submit(work)
    assert writer.close()
    data = load(run)
    assert data.scalars["step"].to_pylist() == [1, 3]
    assert data.stats.num_rows == 2
    events = data.events.to_pylist()
    assert [event["kind"] for event in events] == ["internal_error"] * 4
    for event, words in zip(events, ("on purpose", "nonsense", "SystemExit: 3", "unknown"), strict=True):
        assert "Traceback" in event["message"]
        assert words in event["message"]
        assert event["time"] is not None
    assert len(warned) == 1
    assert warned[0].startswith("statsbridge: ")


def test_work_that_always_fails_does_not_fill_the_record(writer: Writer, run: Path) -> None:
    for _ in range(3 * INTERNAL_ERRORS):
        writer.submit(lambda: {"unknown": {}})
    assert writer.close()
    assert load(run).events.num_rows == INTERNAL_ERRORS


def test_warnings_that_are_errors_do_not_end_the_writer(run: Path) -> None:
    def refuse(text: str) -> None:
        raise RuntimeError(text)

    writer = Writer(run, on_warning=refuse)
    writer.submit(lambda: {"unknown": {}})
    writer.submit(lambda: {"scalars": scalar_rows(0, a=1)})
    assert writer.close()
    assert load(run).scalars.num_rows == 1


def test_a_closed_writer_refuses_in_silence(run: Path) -> None:
    writer = Writer(run)
    assert writer.close()
    assert writer.submit(lambda: {"scalars": scalar_rows(0, a=1)}) is False
    assert writer.flush()
    assert writer.close(state="stopped")
    assert list_runs(run.parent)[0].state == "finished"


def test_what_follows_from_the_last_work_is_written_too(run: Path) -> None:
    """Also what the follower of the last rows has to say, and what that work submits in turn."""
    writer = Writer(run, flush_interval=3600)
    told = threading.Event()

    def say(message: str) -> bool:
        return writer.submit(lambda: {"events": {"kind": "note", "message": message}})

    def follow(tables: object) -> dict[str, Any]:
        if not told.is_set():
            told.set()
            assert say("by the follower")
        return {}

    def work() -> dict[str, Any]:
        assert writer.submit(lambda: {"scalars": scalar_rows(int(say("by its work")), a=1)})
        return {"scalars": scalar_rows(0, a=1)}

    writer.follow(follow)
    writer.submit(work)
    assert writer.close()
    assert writer.submit(work) is False
    data = load(run)
    assert data.scalars["step"].to_pylist() == [0, 1]
    assert sorted(event["message"] for event in data.events.to_pylist()) == ["by its work", "by the follower"]
    assert not writer.dropped


def test_work_that_submits_work_for_ever_is_ended_and_counted(run: Path, warned: list[str]) -> None:
    writer = Writer(run, flush_interval=3600, on_warning=warned.append)

    def work(step: int) -> dict[str, Any]:
        for _ in range(2 if step == 0 else 1):
            writer.submit(lambda: work(step + 1), rows=7)
        return {"scalars": scalar_rows(step, a=1)}

    writer.submit(lambda: work(0))
    assert writer.close(30)
    assert writer.dropped == {"queue": 14}
    data = load(run)
    assert max(data.scalars["step"].to_pylist()) == LAST_FLUSHES
    assert data.scalars.num_rows == 2 * LAST_FLUSHES + 1
    [event] = data.events.to_pylist()
    assert (event["kind"], event["value"]) == ("rows_dropped", 14.0)
    assert len(warned) == 1


def test_an_error_while_writing_leaves_no_work_behind(
    run: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that cannot be encoded cost themselves, and nothing of what was queued after them."""
    monkeypatch.setattr(writer_module, "PART_BYTES", 1)
    encode = backlog_module.encode

    def refuse_events(table: str, *rows: Any, **about: Any) -> Any:
        if table == "events" and refusing:
            refusing.clear()
            raise ValueError("on purpose")
        return encode(table, *rows, **about)

    refusing = [True]
    monkeypatch.setattr(backlog_module, "encode", refuse_events)
    writer = Writer(run, flush_interval=3600, on_warning=warned.append)
    writer.submit(lambda: {"events": {"kind": "note", "message": "lost"}})
    for step in range(5):
        writer.submit(lambda step=step: {"scalars": scalar_rows(step, a=1)})
    writer.close()
    assert writer.dropped == {"events": 1}
    data = load(run)
    assert data.scalars["step"].to_pylist() == list(range(5))
    assert [event["kind"] for event in data.events.to_pylist()] == ["rows_dropped"]


def test_a_rank_has_one_writer(run: Path) -> None:
    Writer(run, rank=0).close()
    Writer(run, rank=1).close()
    with pytest.raises(LogError, match=r"rank=0\.json exists"):
        Writer(run, rank=0)


def test_a_writer_without_a_run_folder_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogError, match="cannot write"):
        Writer(tmp_path / "file")


def test_work_beyond_the_queue_is_refused_and_counted(
    run: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "QUEUE_ROWS", 100)
    writer = Writer(run, flush_interval=0, on_warning=warned.append)
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> dict[str, Any]:
        begun.set()
        go_on.wait(30)
        return {"stats": stats_rows(0, 1)}

    writer.submit(hold)
    assert begun.wait(30)
    accepted = [writer.submit(lambda step=step: {"stats": stats_rows(step, 30)}, rows=30) for step in range(1, 8)]
    assert accepted == [True, True, True, False, False, False, False]
    assert writer.dropped == {"queue": 120}
    go_on.set()
    assert writer.flush()
    assert writer.submit(lambda: {"stats": stats_rows(9, 30)}, rows=30)
    assert writer.close()
    data = load(run)
    assert data.stats["seq"].to_pylist() == list(range(1 + 4 * 30))
    [event] = data.events.to_pylist()
    assert (event["kind"], event["value"], event["severity"]) == ("rows_dropped", 120.0, "warning")
    assert len(warned) == 1
    assert "120 rows" in warned[0]


def test_a_disk_that_refuses_costs_only_what_finds_no_room(
    writer: Writer, run: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the table is a file for a while: errors like those of any disk that cannot be written."""
    works = [lambda step=step: {"stats": stats_rows(step, 50)} for step in range(60)]
    size = writer_module.to_table("stats", stats_rows(0, 50)).nbytes
    monkeypatch.setattr(backlog_module, "BACKLOG_BYTES", 20 * size + size // 2)
    for work in works[:10]:
        writer.submit(work)
    assert writer.flush()
    shutil.move(run / "stats", run / "elsewhere")
    (run / "stats").touch()
    for work in works[10:50]:
        assert writer.submit(work)
        assert not writer.flush()
    assert writer.dropped == {"stats": 20 * 50}
    assert len(warned) == 1
    assert str(run) in warned[0]

    (run / "stats").unlink()
    shutil.move(run / "elsewhere", run / "stats")
    for work in works[50:]:
        assert writer.submit(work)
    assert writer.close()
    data = load(run)
    kept = [*range(30), *range(50, 60)]
    assert data.stats["step"].to_pylist() == np.repeat(kept, 50).tolist()
    assert data.stats["seq"].to_pylist() == list(range(40 * 50))
    [event] = data.events.to_pylist()
    assert (event["kind"], event["value"]) == ("rows_dropped", 1000.0)
    assert data.damaged == ()


def test_an_fsync_that_fails_is_not_trusted_and_doubles_nothing(
    writer: Writer, run: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fsync of the file, or of the folder after the rename, fails: the part is written anew."""
    fsync = os.fsync
    failing = threading.Event()
    failing.set()
    calls = []

    def fail_at(number: int) -> Any:
        def replaced(descriptor: int) -> None:
            calls.append(descriptor)
            if failing.is_set() and len(calls) == number:
                raise OSError(5, "Input/output error")
            fsync(descriptor)

        return replaced

    writer.submit(lambda: {"scalars": scalar_rows(0, a=1)})
    assert writer.flush()  # makes the folders: from here on, one fsync of the file and one of its folder
    for step, number in ((1, 1), (2, 2)):
        calls.clear()
        monkeypatch.setattr(os, "fsync", fail_at(number))
        writer.submit(lambda step=step: {"scalars": scalar_rows(step, a=1)})
        assert not writer.flush()
        writer.submit(lambda step=step: {"scalars": scalar_rows(10 + step, a=1)})
        assert writer.flush()
    monkeypatch.undo()
    assert writer.close()
    assert len(warned) == 1
    scalars = load(run).scalars
    assert scalars["step"].to_pylist() == [0, 1, 11, 2, 12]
    assert scalars["seq"].to_pylist() == [0, 1, 2, 3, 4]
    assert not list(run.glob("**/*.tmp"))


def test_a_deleted_run_is_not_made_again(run: Path, warned: list[str]) -> None:
    writer = Writer(run, flush_interval=0, on_warning=warned.append)
    shutil.rmtree(run)
    writer.submit(lambda: {"scalars": scalar_rows(0, a=1)})
    assert not writer.flush()
    assert not writer.close()
    assert not run.exists()
    assert writer.dropped == {"scalars": 1}
    assert [("cannot write" in text, "1 row could not" in text) for text in warned] == [
        (True, False),
        (False, True),
    ]


def test_a_deleted_table_folder_is_made_again(writer: Writer, run: Path) -> None:
    writer.submit(lambda: {"scalars": scalar_rows(0, a=1)})
    assert writer.flush()
    shutil.rmtree(run / "scalars")
    writer.submit(lambda: {"scalars": scalar_rows(1, a=1)})
    assert writer.close()
    with pytest.warns(StatsBridgeWarning, match="no part holds rows 0 to 0"):
        assert load(run).scalars["seq"].to_pylist() == [1]


def test_a_forked_child_writes_nothing(run: Path) -> None:
    writer = Writer(run, flush_interval=3600)
    writer.submit(lambda: {"scalars": scalar_rows(0, a=1)})
    before = signal.getsignal(signal.SIGTERM)
    child = os.fork()
    if child == 0:
        # What a worker of a DataLoader could do, exit handlers included; the status says what happened.
        import atexit

        answers = [
            writer.submit(lambda: {"scalars": scalar_rows(1, a=1)}),
            writer.flush(5),
            writer.close(5),
            signal.getsignal(signal.SIGTERM) != signal.SIG_DFL,
        ]
        own = Writer(run, rank=1)
        answers += [not own.close(), signal.getsignal(signal.SIGTERM) != signal.SIG_DFL]
        atexit._run_exitfuncs()
        os._exit(sum(answers))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list_parts(run, "scalars") == ()
    assert signal.getsignal(signal.SIGTERM) is before
    assert writer.close()
    assert load(run).scalars["step"].to_pylist() == [0]


def test_sigterm_is_watched_only_while_writers_are_open(run: Path) -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    first, second = Writer(run, rank=0), Writer(run, rank=1)
    ours = signal.getsignal(signal.SIGTERM)
    assert ours != signal.SIG_DFL
    first.close()
    assert signal.getsignal(signal.SIGTERM) is ours
    second.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_users_sigterm_handler_stays(run: Path) -> None:
    def mine(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGTERM, mine)
    try:
        writer = Writer(run, rank=0)
        assert signal.getsignal(signal.SIGTERM) is mine
        writer.close()
        assert signal.getsignal(signal.SIGTERM) is mine
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        writer = Writer(run, rank=1)
        signal.signal(signal.SIGTERM, mine)
        writer.close()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_the_heartbeat_goes_on_while_nothing_happens(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "HEARTBEAT", 0.02)
    writer = Writer(run)
    file = writer_file(run, 0)
    first = file.read_text()
    wait_until(lambda: file.read_text() != first)
    writer.close()


def wait_until(condition: Any) -> None:
    """Wait for something that must happen soon; a minute on a machine that is very busy."""
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "did not happen within a minute"
        time.sleep(0.01)

"""Attempts at one run: what counts, how numbers go on, who may write."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_rows import new_run, scalar_rows, start_program, stats_rows, write_run

from statsbridge.errors import ConfigError, LogError
from statsbridge.log import Writer, list_runs, load
from statsbridge.log import reader as reader_module
from statsbridge.log import resume as resume_module
from statsbridge.log.attempts import Attempt, Superseded, attempt_file, read_attempts
from statsbridge.log.check import check_run, repair_run
from statsbridge.log.compaction import compact_table
from statsbridge.log.lease import maintenance
from statsbridge.log.parts import list_parts
from statsbridge.log.resume import find_unfinished, first_iteration, last_step, next_attempt
from statsbridge.log.runs import run_state


def step(number: int, rows: int = 2) -> dict[str, Any]:
    return {"stats": stats_rows(number, rows), "scalars": scalar_rows(number, loss=number / 10)}


def attempt(run: Path, first: int, *works: dict[str, Any], state: str = "stopped", rank: int = 0) -> int:
    """One more attempt at `run`, which writes each of `works` into parts of its own."""
    with next_attempt(run, first, config=None, information={}) as begun:
        writer = Writer(run, rank=rank, attempt=begun.number)
    for work in works:
        assert writer.submit(lambda work=work: work)
        assert writer.flush()
    assert writer.close(state=state)
    return begun.number


def steps_of(table: Any) -> list[tuple[int, int]]:
    return [(row["attempt"], row["step"]) for row in table.select(["attempt", "step"]).to_pylist()]


def test_a_later_attempt_supersedes_from_its_first_step_on(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, *[step(n) for n in range(6)])
    attempt(run, 4, step(4), step(5))
    attempt(run, 5, step(5), step(6))
    data = load(run)
    assert steps_of(data.scalars) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (2, 6)]
    assert data.series("m1", "activation", "mean")["step"].to_pylist() == [0, 1, 2, 3, 4, 5, 6]
    everything = load(run, attempts="all")
    assert steps_of(everything.scalars) == [*[(0, n) for n in range(6)], (1, 4), (1, 5), (2, 5), (2, 6)]
    assert everything.scalars["seq"].to_pylist() == list(range(10)), "numbers go on"
    assert [one.first_step for one in data.attempts] == [4, 5]
    with pytest.raises(ConfigError, match="effective"):
        load(run, attempts="latest")  # type: ignore[arg-type]


def test_an_attempt_counts_before_it_has_written_anything(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, *[step(n) for n in range(6)])
    attempt(run, 2)
    assert load(run).scalars["step"].to_pylist() == [0, 1]
    assert last_step(run) == (1, 1)


def test_sql_over_the_files_leaves_out_what_is_superseded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path)
    no_step = {"events": {"time": 1.0, "kind": "note", "severity": "info", "message": "before"}}
    write_run(run, no_step, *[step(n) for n in range(6)])
    attempt(run, 3, step(3), step(4))
    sql = "SELECT attempt, step, count(*) AS rows FROM stats GROUP BY ALL ORDER BY ALL"
    in_memory = load(run).query(sql).to_pylist()
    monkeypatch.setattr(reader_module, "_IN_MEMORY", 0)
    data = load(run)
    from_files = data.query(sql).to_pylist()
    assert "stats" not in data.__dict__, "the query read the files themselves"
    assert from_files == in_memory
    assert [(row["attempt"], row["step"], row["rows"]) for row in from_files] == [
        (0, 0, 2),
        (0, 1, 2),
        (0, 2, 2),
        (1, 3, 2),
        (1, 4, 2),
    ]
    assert data.query("SELECT message FROM events")["message"].to_pylist() == ["before"], "it has no step"
    assert load(run, attempts="all").query("SELECT count(*) AS n FROM stats")["n"].to_pylist() == [16]


DUCKDB = duckdb.connect(config={"threads": 1})


@settings(max_examples=50)
@given(
    first_steps=st.lists(st.integers(-3, 6), max_size=4),
    rows=st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(-5, 8)), max_size=30),
)
def test_the_rule_and_its_sql_say_the_same(first_steps: list[int], rows: list[tuple[int, int | None]]) -> None:
    """Against the sentence in the design, taken word by word; and DuckDB against it."""
    superseded = Superseded([Attempt(n + 1, first, "") for n, first in enumerate(first_steps)])
    table = pa.table(
        {
            "attempt": pa.array([row[0] for row in rows], pa.int64()),
            "step": pa.array([row[1] for row in rows], pa.int64()),
        }
    )
    expected = [
        (number, label)
        for number, label in rows
        if label is None
        or not any(later > number and label >= first for later, first in enumerate(first_steps, start=1))
    ]
    assert steps_of(superseded.drop(table)) == expected
    if (condition := superseded.condition()) is not None:
        DUCKDB.register("rows", table)
        # Without ORDER BY rows come in any order.
        assert Counter(DUCKDB.sql(f"SELECT * FROM rows WHERE {condition}").fetchall()) == Counter(expected)


def test_numbers_go_on_after_everything_that_was_ever_used(tmp_path: Path) -> None:
    """After merged parts, damaged ones, and those that a repair has put aside."""
    run = new_run(tmp_path)
    write_run(run, *[step(n) for n in range(4)])
    compact_table(run, "stats", 0, fan_in=2)
    *_, last = list_parts(run, "scalars")
    last.path.write_bytes(b"nothing")
    repair_run(run, check_run(run))
    assert [part.last for part in list_parts(run, "scalars")] == [0, 1, 2]
    attempt(run, 4, step(4))
    *_, newest = list_parts(run, "scalars")
    assert (newest.first, newest.last) == (4, 4)
    *_, newest = list_parts(run, "stats")
    assert (newest.first, newest.last) == (8, 9)
    newest.path.write_bytes(b"nothing")
    attempt(run, 5, step(5))
    *_, newest = list_parts(run, "stats")
    assert newest.first == 10


def test_each_rank_goes_on_with_its_own_numbers(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, step(0), step(1))
    write_run(run, step(0), step(1), step(2), rank=1)
    with next_attempt(run, 2, config=None, information={}) as begun:
        writers = [Writer(run, rank=rank, attempt=begun.number) for rank in range(2)]
    for writer in writers:
        writer.submit(lambda: step(2))
        assert writer.close()
    found = load(run).scalars.select(["rank", "attempt", "seq", "step"]).to_pylist()
    assert [tuple(row.values()) for row in found] == [
        (0, 0, 0, 0),
        (0, 0, 1, 1),
        (0, 1, 2, 2),
        (1, 0, 0, 0),
        (1, 0, 1, 1),
        (1, 1, 3, 2),
    ]


def test_merging_after_a_resume_changes_nothing_that_is_read(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, *[step(n) for n in range(6)])
    attempt(run, 3, step(3), step(4))
    before = [load(run).stats, load(run, attempts="all").stats]
    compact_table(run, "stats", 0, fan_in=2)
    assert len(list_parts(run, "stats")) == 1
    assert [load(run).stats, load(run, attempts="all").stats] == before


def test_clears_what_a_crash_left(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, step(0), step(1))
    kept = [part.path for part in list_parts(run, "stats")]
    copies = {path: path.read_bytes() for path in kept}
    compact_table(run, "stats", 0, fan_in=2)
    for path, data in copies.items():  # as where a crash came before their removal
        path.write_bytes(data)
    half = run / "stats" / "rank=0" / ".half.tmp"
    half.write_bytes(b"half a part")
    with next_attempt(run, 2, config=None, information={}):
        assert not half.exists()
        assert len(list_parts(run, "stats")) == 1


def test_what_is_kept_of_an_attempt(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, step(0))
    with next_attempt(run, 1, config={"lr": 0.1}, information={"restricted": True, "sites": ["update"]}):
        (found,) = read_attempts(run)
        assert (found.number, found.first_step, found.config["lr"], found.information["sites"]) == (
            1,
            1,
            0.1,
            ["update"],
        )
        assert load(run).info["restricted"] is True, "tightened"
    with next_attempt(run, 1, config=None, information={"restricted": False}):
        assert load(run).info["restricted"] is True, "and it stays so"
    assert "config" in load(run).info


def test_states_and_lists(tmp_path: Path) -> None:
    run = new_run(tmp_path, "mine")
    write_run(run, *[step(n) for n in range(6)])
    other = Writer(run, rank=1)
    assert other.close(state="failed")
    assert run_state(run) == "failed"
    attempt(run, 3, step(3), state="finished")
    (summary,) = list_runs(tmp_path)
    assert (summary.attempts, summary.state, summary.steps, summary.sampled_steps) == (2, "finished", 4, 4)
    assert summary.rows["scalars"] == 7, "on disk there are all of them"


def test_finds_the_newest_that_did_not_finish(tmp_path: Path) -> None:
    runs = {}
    for name, state in (("a", "stopped"), ("a", "failed"), ("a", "finished"), ("b", "stopped")):
        runs[name, state] = run = new_run(tmp_path, name)
        assert Writer(run).close(state=state)
    new_run(tmp_path, "a")  # nothing has written it yet: its process may be about to
    assert find_unfinished(tmp_path, "a") == runs["a", "failed"]
    assert find_unfinished(tmp_path, "b") == runs["b", "stopped"]
    assert find_unfinished(tmp_path, "c") is None


def test_iterations_where_the_user_gives_the_labels(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    labelled = [{"scalars": {**scalar_rows(64 * n, loss=1.0), "iteration": n}} for n in range(5)]
    late = {"scalars": {**scalar_rows(1000, val=1.0), "iteration": None}}
    write_run(run, *labelled, late)
    assert last_step(run) == (256, 4)
    assert first_iteration(run, 192) == 3
    assert first_iteration(run, 320) == 5
    plain = new_run(tmp_path)
    write_run(plain, *[step(n) for n in range(5)])
    assert first_iteration(plain, 3) == 3
    assert first_iteration(plain, 50) == 50, "what a crash has lost does not shift the count"
    assert first_iteration(new_run(tmp_path), 7) == 7


def test_a_run_that_is_written_here_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    writer = Writer(run)
    with (
        pytest.raises(LogError, match=rf"process {os.getpid()} on {socket.gethostname()} since \d{{4}}"),
        next_attempt(run, 0, config=None, information={}),
    ):
        pass
    assert read_attempts(run) == ()
    assert writer.close()


def test_a_run_that_is_being_compacted_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, step(0))
    with (
        maintenance(run),
        pytest.raises(LogError, match=rf"compacted, repaired or resumed by process {os.getpid()}"),
        next_attempt(run, 0, config=None, information={}),
    ):
        pass
    with next_attempt(run, 0, config=None, information={}), pytest.raises(LogError), maintenance(run):
        pass


def test_an_attempt_that_is_known_cannot_be_written_twice(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, step(0))
    with next_attempt(run, 1, config=None, information={}) as begun:
        writer = Writer(run, attempt=begun.number)
    with pytest.raises(LogError, match="has been written already"):
        Writer(run, attempt=begun.number)
    assert writer.close()


def age(run: Path, seconds: float, **changes: Any) -> None:
    """Let the writer of rank 0 have been heard of that long ago."""
    file = run / "writers" / "rank=0.json"
    writer = json.loads(file.read_text())
    beat = datetime.now(UTC) - timedelta(seconds=seconds)
    file.write_text(json.dumps({**writer, "heartbeat": beat.isoformat(), "state": "running", **changes}))


def test_one_that_falls_silent_on_another_host_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path)
    write_run(run, step(0))
    age(run, 1, host="elsewhere")
    looks = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            age(run, 1000, host="elsewhere")  # time passes

    monkeypatch.setattr(resume_module, "sleep", pause)
    attempt(run, 1, step(1))
    assert len(looks) == 3
    age(run, 1, host="elsewhere")
    monkeypatch.setattr(resume_module, "sleep", lambda seconds: age(run, 0, host="elsewhere"))
    with pytest.raises(LogError, match="on elsewhere since"), next_attempt(run, 2, config=None, information={}):
        pass


def test_a_container_that_starts_again_with_the_same_number(tmp_path: Path) -> None:
    """Its host's name and its process's number are those of the one that was killed."""
    run = new_run(tmp_path)
    write_run(run, step(0))
    age(run, 1, started=(datetime.now(UTC) - timedelta(hours=1)).isoformat())
    assert run_state(run) == "crashed"
    attempt(run, 1, step(1))
    assert load(run).scalars["step"].to_pylist() == [0, 1]


WRITE = """
    from pathlib import Path
    writer = Writer(Path(sys.argv[1]), attempt=int(sys.argv[2]), flush_interval=0.02)
    number = int(sys.argv[3])
    print("ready", flush=True)
    for line in sys.stdin:
        accepted = writer.submit(lambda: {"scalars": scalar_rows(number, loss=1.0)})
        print(accepted, writer.flush(), flush=True)
        number += 1
    writer.close()
"""


def test_a_process_that_wakes_up_after_it_was_taken_over_writes_nothing(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    program = start_program("\n".join(line[4:] for line in WRITE.splitlines()), run, 0, 0)
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    program.stdin.write("\n")
    program.stdin.flush()
    assert program.stdout.readline() == "True True\n"
    program.send_signal(signal.SIGSTOP)
    age(run, 1000)
    with next_attempt(run, 1, config=None, information={}) as begun:
        writer = Writer(run, attempt=begun.number)
    writer.submit(lambda: step(1))
    assert writer.flush()
    program.send_signal(signal.SIGCONT)
    for _ in range(2):
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.readline().endswith("False\n")
    _, err = program.communicate(timeout=60)
    assert err.count("StatsBridgeWarning") == 1, err
    assert "another process has resumed" in err
    assert json.loads((run / "writers" / "rank=0.json").read_text())["attempt"] == 1, "nor does it say that it writes"
    assert json.loads((run / "writers" / "rank=0.json").read_text())["state"] == "running"
    assert writer.close()
    assert steps_of(load(run, attempts="all").scalars) == [(0, 0), (1, 1)]
    assert check_run(run) == []


RACE = """
    from pathlib import Path
    from statsbridge.errors import LogError
    from statsbridge.log.resume import next_attempt
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        with next_attempt(Path(sys.argv[1]), 1, config=None, information={}) as begun:
            writer = Writer(Path(sys.argv[1]), attempt=begun.number)
    except LogError as error:
        print("refused", error, flush=True)
    else:
        print("won", begun.number, flush=True)
        sys.stdin.readline()
        writer.close()
"""


def test_of_two_that_resume_at_once_one_wins(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, step(0))
    programs = [start_program("\n".join(line[4:] for line in RACE.splitlines()), run) for _ in range(2)]
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
    said = sorted(program.stdout.readline() for program in programs if program.stdout is not None)
    for program in programs:
        program.communicate("\n", timeout=60)
    assert said[0].startswith("refused run")
    assert "process" in said[0]
    assert said[1] == "won 1\n"
    assert [one.number for one in read_attempts(run)] == [1]


def test_a_damaged_file_of_an_attempt_is_named(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, step(0))
    attempt(run, 0, step(0))
    attempt_file(run, 1).write_text("{")
    with pytest.raises(LogError, match=r"1\.json cannot be read"):
        load(run)
    assert load(run, attempts="all").scalars.num_rows == 2
    assert [(finding.kind, finding.file) for finding in check_run(run)] == [("unreadable", "attempts")]

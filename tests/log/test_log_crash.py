"""Kill -9 at random moments, merges under way: every row that anybody had seen is there, exactly once."""

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from log_crash_helpers import ROWS, Nursery, check_by_load, check_by_others, check_crashed_run, check_numbers
from log_rows import new_run, start_program

from statsbridge.log import list_runs
from statsbridge.log.parts import list_parts

MANY = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))]
KILLS = 10


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def watch(run: Path, seconds: float) -> dict[str, int]:
    """Read the run for a while, as an independent process does; the rows seen of each table."""
    seen: dict[str, int] = {"scalars": 0, "stats": 0}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        data = check_by_load(run, seen)
        seen = {table: getattr(data, table).num_rows for table in seen}
    return seen


@pytest.mark.parametrize("seed", MANY)
def test_killed_at_random_moments(tmp_path: Path, nursery: Nursery, seed: int) -> None:
    chance = random.Random(seed)
    merged = 0
    for kill in itertools.count():
        if kill >= KILLS and (merged or kill >= 10 * KILLS):  # a busy machine merges late
            break
        run = new_run(tmp_path / str(kill))
        child = nursery.start("by_writer", run)
        if kill:  # the first one is killed at its very beginning
            nursery.acknowledged()
        seen = watch(run, chance.uniform(0, 0.3))
        time.sleep(chance.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        steps = nursery.steps_acknowledged_before_death()
        merged += any(part.rows > 20 * ROWS for part in list_parts(run, "stats"))
        acknowledged = {"stats": max(seen["stats"], steps * ROWS), "scalars": max(seen["scalars"], steps)}
        check_numbers(check_crashed_run(run, acknowledged))
    assert merged, "no merge came into the way of any kill"


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_training_killed_at_random_moments(tmp_path: Path, nursery: Nursery, kills: int) -> None:
    chance = random.Random(kills)
    for kill in range(kills):
        child = nursery.start("by_training", tmp_path / str(kill))
        nursery.acknowledged()
        [file] = (tmp_path / str(kill)).glob("*/run.json")
        seen = watch(file.parent, chance.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        steps = nursery.steps_acknowledged_before_death()
        data = check_crashed_run(file.parent, seen)
        each = data.stats["step"].value_counts().to_pylist()
        assert len({entry["counts"] for entry in each}) == 1, "a step is there as a whole or not at all"
        assert len(each) >= steps
        losses = [row["step"] for row in data.scalars.to_pylist() if row["name"] == "loss"]
        assert losses == list(range(len(losses)))
        assert len(losses) >= steps


MERGING = """
import os
from statsbridge.log import background, compaction
background.FAN_IN = compaction.FAN_IN = 4
background.compact_quietly = lambda run, table, rank, goes_on: compaction.compact_table(
    run, table, rank, fan_in=4, goes_on=goes_on
)
writer = Writer(Path(sys.argv[1]), flush_interval=0.001)
def write(steps):
    for step in steps:
        writer.submit(lambda step=step: {"stats": stats_rows(step, 12), "scalars": scalar_rows(step, loss=step)})
        assert writer.flush()
"""


@pytest.mark.parametrize(
    ("end", "code", "steps", "state"),
    [
        ("sys.exit(3)", 3, 41, "stopped"),
        ("raise ValueError('the user')", 1, 41, "stopped"),
        ("import signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, 41, "stopped"),
        ("import signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, 41, "stopped"),
        ("assert writer.close()", 0, 41, "finished"),
        ("os._exit(3)", 3, 40, "crashed"),
        ("import signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, 40, "crashed"),
    ],
    ids=["exit", "exception", "SIGINT", "SIGTERM", "finish", "os._exit", "kill"],
)
def test_every_other_end_while_parts_are_merged(tmp_path: Path, end: str, code: int, steps: int, state: str) -> None:
    run = new_run(tmp_path)
    last = "writer._interval = 3600; writer.submit(lambda: {'scalars': scalar_rows(40, loss=40)})"
    program = start_program(f"{MERGING}\nwrite(range(40))\n{last}\n{end}", run)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == code, errors
    assert list_runs(tmp_path)[0].state == state
    data = check_by_load(run, {"stats": 40 * ROWS, "scalars": 40})
    check_numbers(data)
    assert data.scalars.num_rows in ((steps,) if steps == 41 else (40, 41))
    # After an end in order a plain glob has each row once.
    check_by_others(data, distinct=state == "crashed")
    if state != "crashed":
        assert not list(run.rglob("*.tmp"))


def test_a_fork_while_parts_are_merged_leaves_the_record_to_the_parent(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    fork = """
for round in range(5):
    write(range(8 * round, 8 * round + 8))
    child = os.fork()
    if child == 0:
        writer.submit(lambda: {"scalars": scalar_rows(999, loss=999)})
        sys.exit(0)  # with exit handlers
    assert os.waitpid(child, 0)[1] == 0
assert writer.close()
"""
    program = start_program(MERGING + fork, run)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 0, errors
    data = check_by_load(run, {"stats": 40 * ROWS, "scalars": 40})
    assert data.scalars.num_rows == 40
    check_numbers(data)
    check_by_others(data, distinct=False)

"""Power cuts at every operation of a flush and of a merge: all that was acknowledged is there afterwards, once."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from log_disk_helpers import ModelDisk, PowerCut

from statsbridge.log.backlog import Backlog
from statsbridge.log.compaction import compact_table
from statsbridge.log.parts import covered, list_parts
from statsbridge.log.reader import RunData
from statsbridge.log.schema import to_table

SEEDS = 4


def numbers(top: Path) -> list[float]:
    """What `load` gives; damage is a warning of ours, and so a failure."""
    data = RunData(top, {"id": "model"}, {"scalars": list_parts(top, "scalars")})
    assert data.scalars["seq"].to_pylist() == list(range(data.scalars.num_rows))
    values: list[float] = data.scalars["value"].to_pylist()
    return values


def add(backlog: Backlog, value: float) -> None:
    backlog.add("scalars", to_table("scalars", {"step": 0, "name": ["loss"], "value": [value]}))


def cut(disk: ModelDisk, at: int, work: Callable[[], object]) -> bool:
    """Do `work` until operation `at`; whether it came to an end before."""
    disk.cut_at = at
    try:
        work()
    except PowerCut:
        return False
    finally:
        disk.cut_at = None
    return True


def new_disk(tmp_path: Path, patch: pytest.MonkeyPatch, name: str) -> ModelDisk:
    (tmp_path / name).mkdir()
    return ModelDisk(tmp_path / name, patch)


def lose_power(disk: ModelDisk, tmp_path: Path, name: str, seed: int) -> None:
    (tmp_path / name).mkdir()
    disk.after_power_cut(tmp_path / name, random.Random(seed))


@pytest.mark.parametrize("fail_at", [None, 0, 1, 2, 3])
def test_a_power_cut_at_every_operation_of_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int | None
):
    """Also after an operation that has failed: the folders are made again, and durably."""
    for at in range(100):
        for seed in range(SEEDS):
            name = f"{at}-{seed}"
            disk = new_disk(tmp_path, monkeypatch, name)
            backlog = Backlog(disk.top, 0, 0)
            acknowledged = 0

            def life(backlog: Backlog = backlog, disk: ModelDisk = disk) -> None:
                nonlocal acknowledged
                for step in range(3):
                    add(backlog, float(step))
                    disk.fail_at = fail_at if step == 0 else None
                    if backlog.write() is None:
                        acknowledged = step + 1

            ended = cut(disk, at, life)
            lose_power(disk, tmp_path, f"{name}-after", seed)
            found = numbers(disk.top)
            assert found == [float(step) for step in range(len(found))]
            assert len(found) >= acknowledged
        if ended:
            assert acknowledged == 3
            break
    else:
        pytest.fail("three flushes took more than a hundred operations")


def test_a_power_cut_at_every_operation_of_a_merge_that_had_been_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def flushed(name: str) -> ModelDisk:
        disk = new_disk(tmp_path, monkeypatch, name)
        backlog = Backlog(disk.top, 0, 0)
        for step in range(3):
            add(backlog, float(step))
            assert backlog.write() is None
        return disk

    def merge(disk: ModelDisk) -> Callable[[], object]:
        return lambda: compact_table(disk.top, "scalars", 0, fan_in=2)

    def without_writes(disk: ModelDisk) -> list[int]:
        """The operations of a merge that change more than a file without a name."""
        disk.operations.clear()
        assert cut(disk, 1000, merge(disk))
        return [at for at, name in enumerate(disk.operations) if name != "write"]

    kills = without_writes(flushed("dry"))
    assert len(kills) > 12
    for killed_at in [*kills, kills[-1] + 1]:
        disk = flushed(f"{killed_at}-dry")
        cut(disk, killed_at, merge(disk))
        cuts = without_writes(disk)
        for cut_at in [*cuts, cuts[-1] + 1]:
            name = f"{killed_at}-{cut_at}"
            disk = flushed(name)
            cut(disk, killed_at, merge(disk))
            assert numbers(disk.top) == [0.0, 1.0, 2.0]
            ended = cut(disk, cut_at, merge(disk))
            lose_power(disk, tmp_path, f"{name}-after", cut_at + killed_at)
            assert numbers(disk.top) == [0.0, 1.0, 2.0]
            assert ended == (cut_at == cuts[-1] + 1)
            if ended:
                assert not covered(list_parts(disk.top, "scalars")), "exact for plain globs, for good"

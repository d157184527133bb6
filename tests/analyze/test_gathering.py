"""A large run is judged from parts that are sorted by series, as it would be from its rows in the order of writing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import statsbridge
from statsbridge.analyze import diagnosis, gathering
from statsbridge.analyze.blocks import Block
from statsbridge.log import create_run
from statsbridge.log.compaction import compact_table
from statsbridge.log.parts import encode, list_parts, part_folder
from statsbridge.log.resume import next_attempt
from statsbridge.log.schema import to_table

SITES = ("activation", "activation_grad", "parameter", "parameter_grad", "update")
MODULES = ("a", "b", "c.d", "größe", "head[0]")
FAULT = 37


def rows_of(step: int) -> dict[str, object]:
    """A step in which the module c.d puts out NaN from `FAULT` on, and b is not called at each third step."""
    about = [(module, site) for module in MODULES for site in SITES if not (module == "b" and step % 3 == 0)]
    random = np.random.default_rng(step)
    odd = np.array([module == "c.d" and site == "activation" and step >= FAULT for module, site in about])
    return {
        "step": step,
        "iteration": step,
        "module": [module for module, _ in about],
        "type": "Linear",
        "call": 0,
        "order": [MODULES.index(module) for module, _ in about],
        "depth": [MODULES.index(module) for module, _ in about],
        "site": [site for _, site in about],
        "tensor": ["" if site.startswith("activation") else "weight" for _, site in about],
        "count": 64 + (step > 20),
        "nan_count": np.where(odd, 3, 0),
        "inf_count": 0,
        "status": [None if step % 5 else "step_skipped" if site == "update" else None for _, site in about],
        "update_ratio": [0.5 * random.random() if site == "update" else None for _, site in about],
        **{name: 1 + random.random(len(about)) for name in ("mean", "std", "min", "max", "abs_mean", "l2")},
        "zero_fraction": 0.1,
    }


def write(
    run: Path,
    steps: range,
    *,
    rank: int = 0,
    attempt: int = 0,
    rows: Callable[[int], dict[str, object]] = rows_of,
) -> None:
    """One step in each part, as a writer leaves them."""
    folder = part_folder(run, "stats", rank)
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        first = max([part.last + 1 for part in list_parts(run, "stats") if part.rank == rank], default=0)
        name, data = encode("stats", to_table("stats", rows(step)), first=first, attempt=attempt)
        (folder / name).write_bytes(data)


def made(folder: Path, name: str) -> Path:
    run = create_run(folder, name=name, config=None, information={})
    if "not in order" in name:
        write(run, range(30, 60))
        write(run, range(30))
    else:
        write(run, range(60))
    if name == "resumed":
        with next_attempt(run, 45, config={}, information={}):
            write(run, range(45, 70), attempt=1)
    if name == "ranks":
        write(run, range(60), rank=1)
    if "small parts" not in name:
        for rank in range(2 if name == "ranks" else 1):
            compact_table(run, "stats", rank, fan_in=2)
    if name == "merged in part":
        write(run, range(60, 80))
    return run


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """Small runs are taken for large ones; the blocks that they are read in."""
    blocks: list[Block] = []
    real = gathering.blocks_of

    def noting(*arguments: object) -> object:
        for block, below in real(*arguments):  # type: ignore[arg-type]
            blocks.append(block)
            yield block, below

    monkeypatch.setattr(diagnosis, "blocks_of", noting)
    monkeypatch.setattr("statsbridge.log.reader._SMALL", 0)
    monkeypatch.setattr("statsbridge.log.pruning._PRUNED", 100)
    monkeypatch.setattr("statsbridge.log.compaction.GROUP_ROWS", 64)
    monkeypatch.setattr("statsbridge.log.compaction.LEAST_GROUP_ROWS", 16)
    monkeypatch.setattr(gathering, "_WINDOW", 300)
    monkeypatch.setattr(gathering, "_AT_ONCE", 50)
    return blocks


@pytest.mark.parametrize("attempts", ["effective", "all"])
@pytest.mark.parametrize(
    "name", ["small parts", "merged", "merged in part", "resumed", "not in order", "not in order, small parts", "ranks"]
)
def test_findings_are_those_of_the_whole_table(
    tmp_path: Path, name: str, attempts: str, large: list[Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path, name)
    found = statsbridge.diagnose(statsbridge.load(run, attempts=attempts))  # type: ignore[arg-type]
    in_turn = len(large)
    monkeypatch.undo()
    assert found == statsbridge.diagnose(statsbridge.load(run, attempts=attempts))  # type: ignore[arg-type]
    nan = next(finding for finding in found if finding.kind == "nonfinite_activation")
    assert (nan.step, nan.module) == (FAULT, "c.d")
    # What one window holds can be sorted; ranks are merged first, and steps of several attempts overlap.
    assert (in_turn > 0) is (name != "ranks" and (name, attempts) != ("resumed", "all"))


def test_blocks_hold_each_number_once_and_in_its_place(tmp_path: Path, large: list[Block]) -> None:
    run = made(tmp_path, "merged in part")
    statsbridge.diagnose(statsbridge.load(run))
    assert len(large) > 1
    keys = [key for block in large for key in block.slices]
    assert keys == [(0, step) for step in range(80)]
    for block in large:
        for key in block.slices:
            rows, expected = block.rows(key), rows_of(key[1])
            for column in ("l2", "count", "nan_count", "update_ratio", "depth"):
                values = np.broadcast_to(np.array(expected[column], np.float64), (len(rows),))
                assert np.array_equal(rows[column], values, equal_nan=True), (key, column)


@pytest.mark.parametrize("steps", [60, 90])
def test_a_module_whose_type_changes_keeps_the_numbers_of_each(
    tmp_path: Path, steps: int, large: list[Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An activation was replaced, and what it puts out is NaN until then, or from then on, and again later."""

    def rows(step: int) -> dict[str, object]:
        of_step = rows_of(0)
        odd = np.array([module == "c.d" for module in of_step["module"]])  # type: ignore[attr-defined]
        old = step // 30 != 1
        return {
            **rows_of(step - step % 3),
            "step": step,
            "type": np.where(odd & old, "ReLU", "GELU").tolist(),
            "nan_count": np.where(odd & old, 3, 0),
            "status": None,
        }

    run = create_run(tmp_path, name="replaced", config=None, information={})
    for first in range(0, steps, 30):
        write(run, range(first, first + 30), rows=rows)
    compact_table(run, "stats", 0, fan_in=2)
    write(run, range(steps, 120), rows=rows)
    found = statsbridge.diagnose(statsbridge.load(run))
    assert large
    for block in large:
        for key in block.slices:
            assert np.array_equal(block.rows(key)["nan_count"], np.asarray(rows(key[1])["nan_count"]))
    monkeypatch.undo()
    of_the_whole = statsbridge.diagnose(statsbridge.load(run))
    # A type is the one that was last read, and that is another one where more is read at once.
    assert [replace(finding, type="") for finding in found] == [replace(finding, type="") for finding in of_the_whole]
    assert {finding.step for finding in found if finding.kind.startswith("nonfinite")} == {0}


def test_each_row_group_is_read_once_and_only_columns_of_rules(
    tmp_path: Path, large: list[Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path, "merged")
    read: list[int] = []
    names: set[str] = set()
    real = pq.ParquetFile.read_row_groups

    def noting(self: pq.ParquetFile, groups: list[int], columns: list[str]) -> object:
        read.extend(groups)
        names.update(columns)
        return real(self, groups, columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", noting)
    statsbridge.diagnose(statsbridge.load(run))
    [part] = list_parts(run, "stats")
    assert sorted(read) == list(range(pq.ParquetFile(part.path).num_row_groups))
    assert not names & {"time", "iteration", "skewness", "kurtosis", "kl_unit_gaussian"}


def test_a_damaged_part_is_said_and_the_rest_judged(tmp_path: Path, large: list[Block]) -> None:
    run = made(tmp_path, "merged in part")
    part = max(list_parts(run, "stats"), key=lambda part: part.rows)
    data = bytearray(part.path.read_bytes())
    for place in range(100, len(data) // 2, 100):
        data[place] ^= 0xFF
    part.path.write_bytes(data)
    with pytest.warns(statsbridge.StatsBridgeWarning, match="damaged"):
        found = statsbridge.diagnose(statsbridge.load(run))
    assert next(finding for finding in found if finding.kind == "nonfinite_activation").step == 60


@pytest.mark.skipif(sys.platform != "linux", reason="a file's name is text there")
def test_a_folder_whose_name_is_no_utf_8(tmp_path: Path, large: list[Block]) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    data = statsbridge.load(made(folder, "merged"))
    assert [finding.step for finding in statsbridge.diagnose(data) if finding.kind == "nonfinite_activation"] == [FAULT]
    assert large, "it was read part by part"

"""Small parts held in memory: the same rows as read from the files, within the bytes allowed, and never out of date."""

from pathlib import Path
from typing import Any

import pytest
from log_rows import new_run, stats_rows

from statsbridge.errors import StatsBridgeWarning
from statsbridge.log import RunData, load
from statsbridge.log.compaction import compact_table
from statsbridge.log.held import Held
from statsbridge.log.parts import encode, list_parts, live_parts, part_folder
from statsbridge.log.pruning import Wanted
from statsbridge.log.resume import next_attempt
from statsbridge.log.schema import to_table

COLUMNS = ("seq", "module", "site", "step", "mean")
WANTED = Wanted(steps=(3, 8), columns=COLUMNS)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of ten parts, a step each."""
    made = new_run(tmp_path)
    add_steps(made, range(10))
    return made


def add_steps(run: Path, steps: range, *, attempt: int = 0, label: int | None = None) -> None:
    folder = part_folder(run, "stats", 0)
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        rows = to_table("stats", stats_rows(step if label is None else label, 5))
        name, data = encode("stats", rows, first=step * rows.num_rows, attempt=attempt)
        (folder / name).write_bytes(data)


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run is too large to be read whole."""
    monkeypatch.setattr("statsbridge.log.reader._SMALL", 0)


def expected(run: Path, wanted: Wanted = WANTED) -> list[dict[str, Any]]:
    """From the whole table, by plain Python."""
    first, last = wanted.steps
    rows = load(run).stats.to_pylist()
    return [{name: row[name] for name in wanted.names} for row in rows if first <= row["step"] <= last]


def asked(data: RunData, wanted: Wanted = WANTED) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = data._merged_rows(wanted).select(wanted.names).to_pylist()
    return rows


def test_what_is_held_is_what_the_files_hold_and_is_read_once(run: Path):
    data, whole = load(run), expected(run)
    assert asked(data) == whole
    assert len(whole) == 6 * 5
    for part in list_parts(run, "stats"):
        part.path.unlink()
    assert asked(data) == whole


def test_a_run_that_grew_gives_its_new_rows_when_it_is_loaded_again(run: Path):
    wanted = Wanted(steps=(3, 20), columns=COLUMNS)
    before = load(run)
    first = asked(before, wanted)
    add_steps(run, range(10, 12))
    assert asked(before, wanted) == first
    assert asked(load(run), wanted) == expected(run, wanted)
    assert len(expected(run, wanted)) == len(first) + 2 * 5


@pytest.mark.parametrize("early", [True, False])
def test_rows_are_there_once_after_a_merge(run: Path, early: bool):
    data = load(run)
    whole = expected(run)
    if early:
        assert asked(data) == whole
    compact_table(run, "stats", 0)
    assert asked(data) == whole == expected(run)


def test_rows_of_large_and_of_small_parts_are_put_together(run: Path, monkeypatch: pytest.MonkeyPatch):
    compact_table(run, "stats", 0, fan_in=2)
    add_steps(run, range(10, 14))
    monkeypatch.setattr("statsbridge.log.pruning._PRUNED", 10)
    wanted = Wanted(steps=(7, 12), columns=COLUMNS)
    data = load(run)
    assert data._held is not None
    assert sum(part.rows for part in data._held.parts) < sum(part.rows for part in live_parts(run, "stats"))
    assert asked(data, wanted) == expected(run, wanted)
    assert asked(data, wanted) == expected(run, wanted)


def test_what_is_held_stays_within_its_bytes(run: Path):
    parts = list_parts(run, "stats")
    most = 600
    held = Held(parts, most)
    for name in ("mean", "std", "min", "max", "l2"):
        wanted = Wanted(steps=(3, 8), columns=(*COLUMNS, name))
        assert held.rows(wanted, lambda rows: rows).to_pylist() == expected(run, wanted)
        assert held.nbytes <= most
    roomy = Held(parts)
    roomy.rows(WANTED, lambda rows: rows)
    assert roomy.nbytes > most


def test_histograms_and_too_many_rows_are_not_held(run: Path, monkeypatch: pytest.MonkeyPatch):
    parts = list_parts(run, "stats")
    assert Held(parts).takes(WANTED)
    assert not Held(parts).takes(Wanted(columns=(*COLUMNS, "histogram")))
    monkeypatch.setattr("statsbridge.log.held._MOST_ROWS", 49)
    assert not Held(parts).takes(WANTED)
    assert asked(load(run)) == expected(run)


def test_a_damaged_part_is_named_and_left_out(run: Path):
    broken = list_parts(run, "stats")[4]
    broken.path.write_bytes(broken.path.read_bytes()[:-40])
    data = load(run)
    with pytest.warns(StatsBridgeWarning, match="damaged part"):
        rows = asked(data)
    assert {row["step"] for row in rows} == {3, 5, 6, 7, 8}


def test_rows_that_a_later_attempt_superseded_are_not_held(tmp_path: Path):
    run = new_run(tmp_path)
    add_steps(run, range(6))
    with next_attempt(run, 4, config={}, information={}):
        add_steps(run, range(6, 7), attempt=1, label=4)
    rows = asked(load(run), Wanted(steps=(0, 9), columns=(*COLUMNS, "attempt")))
    assert {(row["step"], row["attempt"]) for row in rows} == {(0, 0), (1, 0), (2, 0), (3, 0), (4, 1)}

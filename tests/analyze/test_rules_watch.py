"""Watching: however rows are cut into calls the findings are the same, and a later attempt supersedes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from log_rows import new_run, scalar_rows, stats_rows, write_run
from zoo_broken_helpers import BROKEN
from zoo_helpers import record

import statsbridge
from statsbridge.analyze import diagnosis
from statsbridge.analyze.diagnosis import diagnose
from statsbridge.analyze.findings import Finding
from statsbridge.analyze.thresholds import Thresholds
from statsbridge.analyze.watch import Watch
from statsbridge.errors import ConfigError
from statsbridge.log.schema import to_table

TABLES = ("modules", "stats", "scalars", "events")
RUNS = ("NaN in one batch", "learning rate too large", "dead ReLU from the start", "detach() in the middle")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, statsbridge.RunData]:
    made = {}
    for name in RUNS:
        torch.manual_seed(0)
        path = record(BROKEN[name].make(), tmp_path_factory.mktemp("watch"), steps=20)
        made[name] = statsbridge.load(path)
    return made


def cut(data: statsbridge.RunData, ends: list[int]) -> Iterator[dict[str, pa.Table]]:
    """The rows of a run in pieces that end before these steps."""
    begin = -(10**9)
    for end in [*ends, 10**9]:
        piece = {}
        for name in TABLES:
            table = getattr(data, name)
            steps = table["step"].fill_null(0)
            piece[name] = table.filter(pc.and_(pc.greater_equal(steps, begin), pc.less(steps, end)))
        yield piece
        begin = end


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    return [finding.to_json() for finding in findings]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("ends", [[], list(range(1, 20)), [3, 4, 11, 17]])
def test_the_findings_are_the_same_however_the_rows_are_cut(
    runs: dict[str, statsbridge.RunData], name: str, ends: list[int]
) -> None:
    watch = Watch()
    new = [finding for piece in cut(runs[name], ends) for finding in watch.add(piece)]
    assert as_json(watch.findings()) == as_json(diagnose(runs[name]))
    assert {finding.kind for finding in new} == {finding.kind for finding in watch.findings()}


def test_a_finding_is_new_once_and_again_only_when_it_is_worse(runs: dict[str, statsbridge.RunData]) -> None:
    watch = Watch()
    told = [
        (finding.kind, finding.severity)
        for piece in cut(runs["learning rate too large"], list(range(1, 20)))
        for finding in watch.add(piece)
    ]
    assert len(told) == len(set(told))
    assert watch.add({}) == []


def test_the_update_ratio_tells_of_divergence_before_the_loss_does(runs: dict[str, statsbridge.RunData]) -> None:
    """notes: at rate 0.5 the ratio is 0.53 in the second step, the loss is infinite in the eighth."""
    watch, told = Watch(), {}
    for step, piece in enumerate(cut(runs["learning rate too large"], list(range(1, 20)))):
        for finding in watch.add(piece):
            told.setdefault(finding.kind, step)
    assert told["update_too_large"] < told["nonfinite_loss_outside"] == 7
    first = watch.findings()[0]
    assert (first.kind, first.severity) == ("update_too_large", "critical")
    assert first.step <= 1


def test_a_module_that_follows_is_counted_and_the_last_step_kept(runs: dict[str, statsbridge.RunData]) -> None:
    first = diagnose(runs["NaN in one batch"])[0]
    # Modules 1 to 4, and the model: all that a NaN in the first one's input reaches.
    assert (first.module, first.step, first.last_step, first.following) == ("0", 12, 19, 5)
    assert first.value == 32  # one sample of 64, all 32 units of it
    assert first.depth == 1


def scalars(step: int, **values: float) -> pa.Table:
    columns = {"step": step, "iteration": step, "time": 1.7e9, "name": list(values), "value": list(values.values())}
    return to_table("scalars", columns)


def attempt(table: pa.Table, number: int) -> pa.Table:
    return table.append_column("attempt", pa.array(np.full(table.num_rows, number)))


def test_what_a_resumed_run_does_again_is_forgotten() -> None:
    watch = Watch()
    for step in range(12):
        watch.add({"scalars": attempt(scalars(step, loss=np.nan if step == 10 else 1.0), 0)})
    assert [finding.step for finding in watch.findings()] == [10]
    watch.add({"scalars": attempt(scalars(8, loss=1.0), 1)})
    assert watch.findings() == []


def test_what_was_found_before_the_point_of_resuming_stays() -> None:
    watch = Watch()
    for step in range(12):
        watch.add({"scalars": attempt(scalars(step, loss=np.inf if step == 5 else 1.0), 0)})
    watch.add({"scalars": attempt(scalars(8, loss=1.0), 1)})
    assert [(finding.kind, finding.step) for finding in watch.findings()] == [("nonfinite_loss", 5)]


def test_a_step_that_goes_back_is_a_new_attempt_where_none_is_recorded() -> None:
    watch = Watch()
    for step in [*range(12), 8, 9]:
        watch.add({"scalars": scalars(step, loss=np.nan if step == 11 else 1.0)})
    assert watch.findings() == []
    whole = Watch()
    whole.add({"scalars": pa.concat_tables([scalars(s, loss=np.nan if s == 11 else 1.0) for s in [*range(12), 8, 9]])})
    assert whole.findings() == []


def test_what_is_logged_later_for_an_earlier_step_is_no_new_attempt() -> None:
    watch = Watch()
    watch.add({"scalars": scalars(5, loss=np.nan)})
    late = to_table("scalars", {"step": 2, "time": 1.7e9, "name": ["val/loss"], "value": [1.0]})
    watch.add({"scalars": late})
    assert [finding.kind for finding in watch.findings()] == ["nonfinite_loss"]


def test_what_a_resumed_run_logs_of_an_earlier_step_takes_no_finding_away() -> None:
    watch = Watch()
    for step in range(40):
        watch.add({"scalars": attempt(scalars(step, loss=np.nan if step == 30 else 1 / (1 + step)), 0)})
    late = to_table("scalars", {"step": 20, "time": 1.7e9, "name": ["val/loss"], "value": [1.0]})
    watch.add({"scalars": attempt(late, 1)})
    watch.add({"scalars": attempt(scalars(38, loss=1.0), 1)})
    assert [(finding.kind, finding.step) for finding in watch.findings()] == [("nonfinite_loss", 30)]
    whole = Watch()
    rows = [attempt(scalars(step, loss=np.nan if step == 30 else 1 / (1 + step)), 0) for step in range(38)]
    whole.add({"scalars": pa.concat_tables([*rows, attempt(late, 1), attempt(scalars(38, loss=1.0), 1)])})
    assert [(finding.kind, finding.step) for finding in whole.findings()] == [("nonfinite_loss", 30)]


def test_what_the_collector_saw_of_a_resumed_run_is_kept_though_it_comes_before_the_step() -> None:
    watch = Watch()
    for step in range(12):
        watch.add({"scalars": attempt(scalars(step, loss=1 / (1 + step)), 0)})
    seen = {"step": 8, "time": 1.7e9, "kind": "eval_mode", "severity": "warning", "message": "in eval mode"}
    watch.add({"events": attempt(to_table("events", seen), 1)})
    watch.add({"scalars": attempt(scalars(8, loss=0.1), 1)})
    assert [(finding.kind, finding.step) for finding in watch.findings()] == [("eval_mode", 8)]


@pytest.mark.parametrize("seen", ["all", "superseded", "nothing"])
def test_a_converged_training_that_is_resumed_is_not_at_its_start(seen: str) -> None:
    """`seen`: of the attempt before, offline (what counts), in a terminal (all of it), or in the process itself."""
    noise = np.random.default_rng(0).normal(size=1000)

    def rows(step: int, number: int) -> pa.Table:
        return attempt(scalars(step, loss=2.3 * np.exp(-step / 30) + 0.05 + 1e-5 * noise[step]), number)

    for limits in (Thresholds(), Thresholds(classes=10)):
        watch = Watch(limits)
        for step in range({"all": 400, "superseded": 405, "nothing": 0}[seen]):
            watch.add({"scalars": rows(step, 0)})
        for step in range(400, 600):
            watch.add({"scalars": rows(step, 1)})
        assert watch.findings() == []


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("label", [0, 1, 1000])
def test_a_training_that_is_begun_again_is_judged_from_its_start(label: int, whole: bool) -> None:
    """Offline what was superseded is not there; a terminal that looked on has seen it."""
    watch = Watch(Thresholds(classes=10), whole=whole)
    for step in () if whole else range(label, label + 30):
        watch.add({"scalars": attempt(scalars(step, loss=2.3 / (1 + step)), 0)})
    for step in range(label, label + 150):
        watch.add({"scalars": attempt(scalars(step, loss=9.0 + step % 2), 1)})
    assert [(finding.kind, finding.step) for finding in watch.findings()] == [
        ("initial_loss", label),
        ("loss_not_decreasing", label),
    ]


def test_a_training_that_does_not_fall_is_told_though_it_was_resumed() -> None:
    watch = Watch(Thresholds(classes=10))
    for step in range(200):
        watch.add({"scalars": attempt(scalars(step, loss=9.0 + step % 2), int(step >= 60))})
    assert [(finding.kind, finding.step) for finding in watch.findings()] == [
        ("initial_loss", 0),
        ("loss_not_decreasing", 0),
    ]


def test_a_limit_that_counts_is_a_whole_number(runs: dict[str, statsbridge.RunData]) -> None:
    data = runs["dead ReLU from the start"]
    for name, value in (("skipped_steps", 2.5), ("skipped_steps", 1e30), ("persistence", 0), ("persistence", 2.5)):
        with pytest.raises(ConfigError, match=rf"threshold {name}=.*: give a whole number from [01] to 1,000,000,000"):
            diagnose(data, thresholds={name: value})
    whole = diagnose(data, thresholds={"skipped_steps": 10.0, "persistence": 5.0})
    assert as_json(whole) == as_json(diagnose(data))


def test_a_validation_loss_is_none_of_the_training() -> None:
    watch = Watch()
    watch.add({"scalars": scalars(0, **{"val/loss": np.nan, "loss": 1.0, "loss_critic": 1.0})})
    assert watch.findings() == []
    watch.add({"scalars": scalars(1, loss_critic=np.inf)})
    assert [finding.message for finding in watch.findings()] == ["loss_critic is inf"]


def test_thresholds_are_keywords(runs: dict[str, statsbridge.RunData]) -> None:
    data = runs["dead ReLU from the start"]
    assert diagnose(data)[0].kind == "dead_units"
    kinds = [finding.kind for finding in diagnose(data, thresholds={"persistence": 100})]
    assert "zero_gradient" not in kinds
    with pytest.raises(ConfigError, match="unknown threshold zero_fractoin: did you mean zero_fraction"):
        diagnose(data, thresholds={"zero_fractoin": 0.9})
    with pytest.raises(ConfigError, match="threshold update_ratio=-1: give a number of at least 0"):
        diagnose(data, thresholds={"update_ratio": -1})
    with pytest.raises(ConfigError, match="thresholds is a list"):
        diagnose(data, thresholds=[1])  # type: ignore[arg-type]


def test_the_events_that_a_live_watch_wrote_are_not_read_as_causes(runs: dict[str, statsbridge.RunData]) -> None:
    data = runs["NaN in one batch"]
    tables = {name: getattr(data, name) for name in ("modules", "stats", "scalars")}
    without = Watch()
    without.add(tables)
    assert "nonfinite_activation" in data.events["kind"].to_pylist()
    assert as_json(without.findings()) == as_json(diagnose(data))


def test_a_large_run_is_read_in_windows_and_judged_in_pieces(
    runs: dict[str, statsbridge.RunData], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = runs["NaN in one batch"]
    whole = as_json(diagnose(data))
    monkeypatch.setattr(diagnosis, "_WINDOW", 170)
    monkeypatch.setattr(diagnosis, "_ROWS", 50)
    assert as_json(diagnose(statsbridge.load(data.path))) == whole
    assert as_json(diagnose(data)) == whole


def test_ranks_are_merged_and_a_loss_that_one_of_them_lost_is_seen(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for rank in (0, 1):
        steps = [
            {
                "stats": stats_rows(step, rows=2, inf_count=[0, int(rank == 1 and step == 3)]),
                "scalars": scalar_rows(step, loss=math.nan if rank == 1 and step == 4 else 1.0 - 0.1 * step),
            }
            for step in range(6)
        ]
        write_run(run, *steps, rank=rank)
    found = [(one.kind, one.step, one.module) for one in diagnose(statsbridge.load(run)) if one.severity == "critical"]
    assert ("nonfinite_activation", 3, "m1") in found
    assert ("nonfinite_loss_outside", 4, None) in found

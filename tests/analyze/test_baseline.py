"""The ranges of good runs: what was seen, widened as the kind of the number asks for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from log_rows import new_run, scalar_rows, stats_rows, write_run

import statsbridge
from statsbridge.analyze.baseline import Baseline, baseline
from statsbridge.errors import ConfigError

STEPS = 40


def recorded(folder: Path, scale: float = 1.0, steps: int = STEPS, first: int = 0) -> statsbridge.RunData:
    """Three modules; m0's numbers grow with the step, m1's stay, m2's are nothing."""
    works = []
    for step in range(first, first + steps):
        sizes = [scale * (1 + step), scale, 0.0]
        numbers = dict.fromkeys(("std", "l2", "abs_mean"), sizes)
        works.append(
            {
                "stats": stats_rows(
                    step, 3, **numbers, mean=[-1.0, 0.5, 0.0], zero_fraction=[0.0, 0.5, 1.0], skewness=[0, 1, 2]
                )
            }
        )
    run = new_run(folder)
    write_run(run, *works)
    return statsbridge.load(run)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> statsbridge.RunData:
    return recorded(tmp_path_factory.mktemp("good"))


NAMES = (["m0", "m1", "m2", "m3"], [0, 0, 0, 0], [None, "", "", ""])


def test_limits_are_what_was_seen_times_the_factor(run: statsbridge.RunData) -> None:
    low, high = baseline(run, factor=3).limits("activation", "std", *NAMES)
    median = np.median([*range(1, STEPS + 1), *[1.0] * STEPS])
    np.testing.assert_allclose(low[:3], [1 / 3, 1 / 3, 0])
    np.testing.assert_allclose(high[:2], [STEPS * 3, 3])
    assert 0 < high[2] < 1e-3 * median, "nothing is nothing, rounding included"
    assert np.isnan(low[3])
    assert np.isnan(high[3])
    assert np.isnan(baseline(run).limits("update", "l2", *NAMES)).all(), "a site that was not recorded"


def test_limits_of_what_lies_on_either_side_of_zero_and_of_shares(run: statsbridge.RunData) -> None:
    found = baseline(run, factor=4)
    low, high = found.limits("activation", "mean", *NAMES)
    assert low[1] == pytest.approx(0.5 - 4 * np.hypot(1, 0.5))
    assert high[1] == pytest.approx(0.5 + 4 * np.hypot(1, 0.5))
    low, high = found.limits("activation", "zero_fraction", *NAMES)
    np.testing.assert_allclose([low[1], high[1]], [0.1, 0.9])
    low, high = found.limits("activation", "skewness", *NAMES)
    np.testing.assert_allclose([low[1], high[1]], [0, 2])


def test_the_band_follows_the_training(run: statsbridge.RunData) -> None:
    band = baseline(run, factor=2).band("activation", "std")
    assert band is not None
    low, high = band.at([("m0", 0, ""), ("m9", 0, "")], np.array([0, 20, STEPS - 1, STEPS, 10**6]))
    # At step 20 the good run was between what it was at half and at twice as many steps.
    assert 0.5 * 8 <= low[0, 1] <= 0.5 * 11
    assert high[0, 1] == 2 * STEPS
    assert high[0, 0] < 20
    assert np.isnan(low[0, 3:]).all(), "after its end nothing is known"
    assert np.isnan(low[1]).all()
    assert band.complete.all()


def test_several_runs_are_one_range(run: statsbridge.RunData, tmp_path: Path) -> None:
    both = baseline(run, recorded(tmp_path, scale=10, steps=20, first=5), factor=2)
    low, high = both.limits("activation", "l2", *NAMES)
    np.testing.assert_allclose([low[1], high[1]], [0.5, 20])
    assert baseline(run).factor > baseline(run, run).factor > 1


def test_a_baseline_needs_statistics(tmp_path: Path) -> None:
    empty = new_run(tmp_path)
    write_run(empty, {"scalars": scalar_rows(0, loss=1.0)})
    with pytest.raises(ConfigError, match="has no statistics"):
        baseline(statsbridge.load(empty))
    with pytest.raises(ConfigError, match="has 1 sampled step, too few to say what is usual"):
        baseline(recorded(tmp_path / "one", steps=1))
    with pytest.raises(ConfigError, match="has 4 sampled steps"):
        baseline(recorded(tmp_path / "good"), recorded(tmp_path / "four", steps=4))
    with pytest.raises(ConfigError, match="at least one good run"):
        baseline()
    with pytest.raises(ConfigError, match="unknown statistic stdd"):
        Baseline([statsbridge.load(empty)]).limits("activation", "stdd", [], [], [])

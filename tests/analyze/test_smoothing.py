"""The moving average against published figures, and against the weighted mean it is by definition."""

import math

import numpy as np
import pytest

from statsbridge import ConfigError
from statsbridge.analyze.smoothing import MovingAverage, smooth


def noisy_loss() -> tuple[np.ndarray, np.ndarray]:
    """A loss with a spike, and the same without noise; 1000 steps."""
    step = np.arange(1, 1001)
    clean = 2 * np.exp(-step / 150) + 0.3 + 0.0008 * np.maximum(step - 800, 0)
    raw = clean + 0.08 * np.random.default_rng(0).normal(size=1000)
    raw[600:605] += 3.0
    return raw, clean


@pytest.mark.parametrize(("weight", "peak", "lag"), [(0.9, 1.55, 0.028), (0.99, 0.54, 0.058)])
def test_it_hides_what_smoothing_is_known_to_hide(weight: float, peak: float, lag: float) -> None:
    raw, clean = noisy_loss()
    smoothed = np.array(smooth(raw, weight))
    assert raw[595:615].max() == pytest.approx(3.52, abs=0.005)
    assert smoothed[595:615].max() == pytest.approx(peak, abs=0.005)
    assert (clean - smoothed)[899:].mean() == pytest.approx(lag, abs=0.0005)


def test_the_first_value_is_the_raw_one() -> None:
    raw, _ = noisy_loss()
    assert smooth(raw, 0.99)[0] == pytest.approx(2.297, abs=0.0005)
    assert smooth(raw, 0.99)[0] == pytest.approx(raw[0], rel=1e-14)


def test_it_is_the_mean_weighted_by_powers_of_the_weight() -> None:
    values = np.random.default_rng(3).normal(size=50)
    for count, average in enumerate(smooth(values, 0.8), start=1):
        weights = 0.8 ** np.arange(count)[::-1]
        assert average == pytest.approx(np.average(values[:count], weights=weights), rel=1e-12)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_poisons_nothing(broken: float) -> None:
    with_it = smooth([1.0, 2.0, broken, 4.0], 0.9)
    assert math.isnan(with_it[2])
    assert [with_it[0], with_it[1], with_it[3]] == smooth([1.0, 2.0, 4.0], 0.9)


def test_it_stands_the_largest_floats() -> None:
    largest = np.finfo(float).max
    assert smooth([largest] * 5, 0.5)[-1] == pytest.approx(largest)


def test_it_goes_on_where_it_was() -> None:
    values = np.random.default_rng(4).normal(size=20).tolist()
    average = MovingAverage(0.9)
    assert [average.add(value) for value in values] == smooth(values, 0.9)


@pytest.mark.parametrize("weight", [0, 1, -0.1, 1.5, math.nan, True, "0.9"])
def test_a_weight_that_is_none_is_refused(weight: object) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        smooth([1.0], weight)  # type: ignore[arg-type]

import math

import numpy as np
import pytest

from statsbridge.view.sparkline import sparkline


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([7, 6, 5, 4, 3, 2, 1, 0], "█▇▆▅▄▃▂▁"),
        ([-1.0, 1.0], "▁█"),
        ([1e-12, 3e-12, 5e-12], "▁▅█"),
        ([5.0], "▄"),
        ([2, 2, 2], "▄▄▄"),
        ([], ""),
        ([None, 0, None, 1, None], " ▁ █ "),
        ([None, None], "  "),
        ([0, math.nan, 1], "▁×█"),
        ([0, math.inf, -math.inf, 1], "▁××█"),
        ([math.nan], "×"),
        ([-1.7e308, 0.0, 1.7e308], "▁▅█"),
    ],
)
def test_known_series(values: list[float | None], drawn: str) -> None:
    assert sparkline(values) == drawn


@pytest.mark.parametrize(("spike", "others"), [(50.0, "▁▂"), (-50.0, "▇█")])
def test_one_spike_among_20000_points_is_seen_in_8_cells(spike: float, others: str) -> None:
    values = np.random.default_rng(0).normal(size=20_000)
    values[12_345] = spike
    drawn = sparkline(values.tolist(), 8)
    assert len(drawn) == 8
    assert drawn[4] == ("█" if spike > 0 else "▁")  # 12,345 lies in the fifth of eight runs of 2,500
    assert set(drawn[:4] + drawn[5:]) <= set(others)


def test_one_nan_among_20000_points_is_seen() -> None:
    values: list[float | None] = [0.0] * 20_000
    values[3] = math.nan
    assert sparkline(values, 8) == "×" + "▄" * 7


def test_a_cell_with_some_missing_values_shows_the_others() -> None:
    assert sparkline([None, 0, None, None, 1, None], 3) == "▁ █"


def test_width_must_hold_a_cell() -> None:
    with pytest.raises(ValueError, match="at least one cell"):
        sparkline([1.0], 0)

"""Whatever is drawn keeps the extremes of every pixel, and marks what is not a number: at any size, anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from statsbridge import ConfigError
from statsbridge.view.downsample import MINUS_INFINITY, NAN, NOT_POSITIVE, PLUS_INFINITY, downsample

KINDS = {np.nan: NAN, np.inf: PLUS_INFINITY, -np.inf: MINUS_INFINITY}


def pixel_of(x: np.ndarray, pixels: int) -> np.ndarray:
    """The pixel column of each point, one at a time, as a second implementation."""
    width = float(x[-1] - x[0])
    return np.array([min(int((float(one) - float(x[0])) / width * pixels), pixels - 1) if width else 0 for one in x])


@given(place=st.integers(0, 19_999), size=st.floats(1.001, 1e30), pixels=st.integers(1, 2000))
@settings(max_examples=40)
def test_a_spike_in_20_000_points_stays(place: int, size: float, pixels: int) -> None:
    y = np.random.default_rng(0).random(20_000)
    for spike in (size, -size):
        y[place] = spike
        curve = downsample(np.arange(20_000), y, pixels=pixels)
        assert place in curve.kept
        assert spike in curve.y
        assert len(curve.kept) <= 4 * pixels


@given(place=st.integers(0, 19_999), value=st.sampled_from([np.nan, np.inf, -np.inf]), pixels=st.integers(1, 2000))
@settings(max_examples=40)
def test_one_value_that_is_no_number_in_20_000_is_marked_and_breaks_the_line(
    place: int, value: float, pixels: int
) -> None:
    y = np.random.default_rng(0).random(20_000)
    y[place] = value
    for logarithmic in (False, True):
        curve = downsample(np.arange(20_000), y, pixels=pixels, logarithmic=logarithmic)
        assert {kind: points.tolist() for kind, points in curve.marks.items()} == {KINDS[value]: [place]}
        assert np.isnan(curve.y[np.flatnonzero(curve.kept == place)]).all()
        assert place in curve.kept


def test_a_spike_in_ten_million_points_stays() -> None:
    y = np.random.default_rng(0).random(10_000_000)
    places = {"up": 1_234_567, "down": 9_876_543, "nan": 5_000_001, "infinite": 42}
    y[list(places.values())] = (1e6, -1e6, np.nan, np.inf)
    curve = downsample(np.arange(10_000_000), y, pixels=1200)
    assert len(curve.kept) <= 4 * 1200 + 4
    assert curve.y[curve.kept == places["up"]] == [1e6]
    assert curve.y[curve.kept == places["down"]] == [-1e6]
    assert curve.marks[NAN].tolist() == [places["nan"]]
    assert curve.marks[PLUS_INFINITY].tolist() == [places["infinite"]]


def test_on_a_log_axis_what_is_not_above_0_is_marked() -> None:
    y = np.random.default_rng(0).random(20_000) + 0.1
    y[[7, 12_345]] = (0.0, -3.0)
    curve = downsample(np.arange(20_000), y, pixels=500, logarithmic=True)
    assert curve.marks[NOT_POSITIVE].tolist() == [7, 12_345]
    assert np.nanmin(curve.y) > 0
    assert NOT_POSITIVE not in downsample(np.arange(20_000), y, pixels=500).marks


NUMBERS = st.one_of(st.floats(-1e3, 1e3), st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1e308, -1e308, 5e-324]))


@given(data=st.data(), pixels=st.integers(1, 12), logarithmic=st.booleans())
@settings(max_examples=120)
def test_every_pixel_keeps_its_extremes_its_ends_and_its_kinds_of_marks(
    data: st.DataObject, pixels: int, logarithmic: bool
) -> None:
    y = data.draw(arrays.arrays(np.float64, st.integers(0, 60), elements=NUMBERS))
    x = np.sort(data.draw(arrays.arrays(np.int64, len(y), elements=st.integers(0, 100))))
    missing = data.draw(arrays.arrays(bool, len(y)))
    flag = data.draw(arrays.arrays(bool, len(y)))
    curve = downsample(x, y, pixels=pixels, logarithmic=logarithmic, missing=missing, flags={"flag": flag})
    assert (np.diff(curve.kept) > 0).all()
    drawn = np.isfinite(y) & ~missing & ((y > 0) | (not logarithmic))
    assert np.array_equal(curve.y, np.where(drawn, y, np.nan)[curve.kept], equal_nan=True)
    column = pixel_of(x, pixels) if len(x) else x
    for pixel in np.unique(column):
        inside = np.flatnonzero(column == pixel)
        shown = [number for number in inside if drawn[number]]
        kept = [number for number in curve.kept if number in inside and drawn[number]]
        if shown:
            assert (kept[0], kept[-1]) == (shown[0], shown[-1])
            assert y[kept].min() == y[shown].min()
            assert y[kept].max() == y[shown].max()
        gaps = [number for number in inside if not drawn[number]]
        assert not gaps or {gaps[0], gaps[-1]} <= set(curve.kept.tolist())
        kinds = {
            NAN: np.isnan(y) & ~missing,
            PLUS_INFINITY: (y == np.inf) & ~missing,
            MINUS_INFINITY: (y == -np.inf) & ~missing,
            NOT_POSITIVE: (y <= 0) & np.isfinite(y) & ~missing & logarithmic,
            "flag": flag,
        }
        for kind, where in kinds.items():
            there = [number for number in inside if where[number]]
            assert [n for n in curve.marks.get(kind, []) if n in inside] == there[:1]


def test_a_point_between_two_gaps_is_isolated() -> None:
    curve = downsample(range(7), [1, np.nan, 2, np.nan, 3, 4, np.nan], pixels=100)
    assert curve.isolated.tolist() == [True, False, True, False, False, False, False]
    assert downsample([5], [1.0], pixels=10).isolated.tolist() == [True]


def test_nothing_stays_nothing() -> None:
    curve = downsample([], [], pixels=10)
    assert (len(curve.kept), len(curve.y), dict(curve.marks)) == (0, 0, {})


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="width_pixels=0"):
        downsample([1], [1], pixels=0)
    with pytest.raises(ConfigError, match="order of x"):
        downsample([2, 1], [1, 1], pixels=10)

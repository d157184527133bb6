"""Rows of statistics merge as if their elements had been measured at once."""

from collections.abc import Sequence

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from statsbridge.moments import COUNTS, HISTOGRAM_BINS, STATISTICS, ZERO_BIN, histogram_edges, merge_rows


def row(values: np.ndarray) -> dict[str, float]:
    """The statistics of an array by scipy and numpy, in float64."""
    finite = values[np.isfinite(values)].astype(np.float64)
    counts = {
        "count": values.size,
        "nan_count": int(np.isnan(values).sum()),
        "inf_count": int(np.isinf(values).sum()),
    }
    if not finite.size:
        return {**counts, **dict.fromkeys(STATISTICS, np.nan)}
    constant = finite.min() == finite.max()
    # Skewness and kurtosis do not depend on the scale, but fourth powers of 1e-100 would.
    scaled = finite / max(np.abs(finite).max(), 1e-300)
    return {
        **counts,
        "mean": finite[0] if constant else finite.mean(),
        "std": 0.0 if constant else scaled.std() * np.abs(finite).max(),
        "skewness": np.nan if constant else scipy.stats.skew(scaled),
        "kurtosis": np.nan if constant else scipy.stats.kurtosis(scaled),
        "min": finite.min(),
        "max": finite.max(),
        "abs_mean": np.abs(finite).mean(),
        "l2": np.sqrt((finite**2).sum()),
        "zero_fraction": (finite == 0).mean(),
        "kl_unit_gaussian": np.nan,
    }


def columns(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    rows = [row(values) for values in arrays]
    return {
        name: np.array([one[name] for one in rows], dtype=np.int64 if name in COUNTS else np.float64)
        for name in rows[0]
    }


def assert_like(merged: dict[str, np.ndarray], index: int, values: np.ndarray) -> None:
    expected = row(values)
    for name in COUNTS:
        assert merged[name][index] == expected[name]
    spread = expected["std"] or 1.0
    for name in ("min", "max"):
        assert merged[name][index] == expected[name]
    assert abs(merged["mean"][index] - expected["mean"]) <= 1e-9 * spread + 1e-14 * abs(expected["mean"])
    assert merged["std"][index] == pytest.approx(expected["std"], rel=1e-6, abs=0)
    for name in ("skewness", "kurtosis"):
        assert merged[name][index] == pytest.approx(expected[name], rel=1e-6, abs=1e-6, nan_ok=True)
    for name in ("abs_mean", "l2", "zero_fraction"):
        assert merged[name][index] == pytest.approx(expected[name], rel=1e-9, abs=0)


def test_parts_with_unequal_means_merge_to_the_statistics_of_the_whole():
    random = np.random.default_rng(0)
    parts = [
        random.normal(mean, std, size) for mean, std, size in [(0, 1, 500), (50, 0.1, 30), (-3, 7, 2000), (0, 0, 9)]
    ]
    merged = merge_rows(columns(parts), np.zeros(4, dtype=np.int64), 1)
    assert_like(merged, 0, np.concatenate(parts))
    assert abs(merged["skewness"][0]) > 0.1


def test_groups_do_not_mix_and_their_order_does_not_matter():
    random = np.random.default_rng(1)
    parts = [random.laplace(index, 1 + index, 100 + index) for index in range(9)]
    group = np.array([2, 0, 1, 1, 2, 0, 0, 2, 1])
    merged = merge_rows(columns(parts), group, 4)
    for number in range(3):
        assert_like(merged, number, np.concatenate([parts[i] for i in np.flatnonzero(group == number)]))
    assert merged["count"][3] == 0
    assert all(np.isnan(merged[name][3]) for name in STATISTICS)


@pytest.mark.parametrize(("offset", "scale"), [(1e4, 0.1), (1e9, 1.0), (0, 1e-90), (0, 1e90), (-1e12, 1e3)])
def test_huge_offsets_and_scales_lose_nothing(offset: float, scale: float):
    random = np.random.default_rng(2)
    parts = [random.normal(shift, 1, 200) for shift in (-1.0, 0.0, 2.0)]
    given_columns = columns(parts)
    # Skewness and kurtosis do not change with offset and scale, and could not be computed at 1e90.
    for name in ("mean", "min", "max"):
        given_columns[name] = offset + scale * given_columns[name]
    given_columns["std"] = scale * given_columns["std"]
    merged = merge_rows(given_columns, np.zeros(3, dtype=np.int64), 1)
    z = np.concatenate(parts)
    assert abs(merged["mean"][0] - (offset + scale * z.mean())) <= 1e-9 * scale + 1e-15 * abs(offset)
    assert merged["std"][0] == pytest.approx(scale * z.std(), rel=1e-6)
    assert merged["skewness"][0] == pytest.approx(scipy.stats.skew(z), abs=1e-5)
    assert merged["kurtosis"][0] == pytest.approx(scipy.stats.kurtosis(z), abs=1e-5)


def test_constants_merge_to_an_exact_zero_or_to_a_spread():
    same = merge_rows(columns([np.full(3, 0.1), np.full(50, 0.1)]), np.zeros(2, dtype=np.int64), 1)
    assert same["std"][0] == 0
    assert same["mean"][0] == 0.1
    assert np.isnan(same["skewness"][0])
    assert np.isnan(same["kurtosis"][0])
    parts = [np.full(3, 0.1), np.full(50, -2.0)]
    assert_like(merge_rows(columns(parts), np.zeros(2, dtype=np.int64), 1), 0, np.concatenate(parts))


def test_rows_without_a_finite_element_add_only_to_the_counts():
    nothing = np.array([np.nan, np.inf, -np.inf, np.nan])
    parts = [nothing, np.array([1.0, 2.0, np.nan, 5.0]), nothing[:0]]
    merged = merge_rows(columns(parts), np.array([0, 0, 1]), 2)
    assert_like(merged, 0, np.concatenate(parts))
    alone = merge_rows(columns([nothing]), np.zeros(1, dtype=np.int64), 1)
    assert [alone[name][0] for name in COUNTS] == [4, 2, 2]
    assert all(np.isnan(alone[name][0]) for name in STATISTICS)


def test_a_statistic_that_was_not_recorded_stays_null():
    given_columns = columns([np.arange(5.0), np.arange(7.0)])
    given_columns["skewness"][1] = np.nan
    del given_columns["abs_mean"]
    merged = merge_rows(given_columns, np.zeros(2, dtype=np.int64), 1)
    assert np.isnan(merged["skewness"][0])
    assert np.isnan(merged["abs_mean"][0])
    assert merged["std"][0] == pytest.approx(np.concatenate([np.arange(5), np.arange(7)]).std())


def test_divergence_does_not_merge_and_histograms_add():
    given_columns = columns([np.arange(5.0), np.arange(7.0)])
    given_columns["kl_unit_gaussian"] = np.array([1.0, 2.0])
    given_columns["histogram"] = np.arange(2 * HISTOGRAM_BINS).reshape(2, HISTOGRAM_BINS)
    merged = merge_rows(given_columns, np.zeros(2, dtype=np.int64), 1)
    assert np.isnan(merged["kl_unit_gaussian"][0])
    assert merged["histogram"].dtype == np.int64
    assert (merged["histogram"][0] == 2 * np.arange(HISTOGRAM_BINS) + HISTOGRAM_BINS).all()


def test_histogram_edges_are_powers_of_two_in_ascending_order():
    edges = histogram_edges()
    assert HISTOGRAM_BINS == 197
    assert len(edges) == 196
    assert (np.diff(edges) >= 0).all()
    assert edges[0] == -(2.0**32)
    assert edges[-1] == 2.0**32
    assert edges[ZERO_BIN - 1] == edges[ZERO_BIN] == 0
    assert edges[ZERO_BIN + 1] == 2.0**-64
    assert (edges == -edges[::-1]).all()


elements = st.floats(-1e6, 1e6, allow_subnormal=False) | st.sampled_from([0.0, 1e4, np.nan, np.inf])


@given(st.lists(st.lists(elements, max_size=8), min_size=1, max_size=6))
def test_any_split_merges_to_the_whole(split: list[list[float]]):
    parts = [np.array(part, dtype=np.float64) for part in split]
    whole = np.concatenate(parts)
    with np.errstate(all="ignore"):
        expected = row(whole)
        merged = merge_rows(columns(parts), np.zeros(len(parts), dtype=np.int64), 1)
    assert [merged[name][0] for name in COUNTS] == [expected[name] for name in COUNTS]
    if np.isnan(expected["mean"]):
        assert np.isnan(merged["mean"][0])
        return
    size = max(abs(expected["min"]), abs(expected["max"]))
    assert merged["std"][0] >= 0
    assert merged["mean"][0] == pytest.approx(expected["mean"], abs=1e-12 * size)
    assert merged["std"][0] == pytest.approx(expected["std"], rel=1e-6, abs=1e-12 * size)
    assert merged["l2"][0] == pytest.approx(expected["l2"], rel=1e-9)
    if expected["std"] > 1e-6 * size:
        assert merged["kurtosis"][0] == pytest.approx(expected["kurtosis"], rel=1e-5, abs=1e-5)
        assert merged["skewness"][0] == pytest.approx(expected["skewness"], rel=1e-5, abs=1e-5)

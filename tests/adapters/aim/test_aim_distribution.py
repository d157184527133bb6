"""Histograms with bins of one width."""

from __future__ import annotations

import numpy as np
import pytest
from statsbridge_aim.distribution import BINS, even_bins

from statsbridge.moments import HISTOGRAM_BINS, ZERO_BIN, histogram_edges

EDGES = np.concatenate(([-np.inf], histogram_edges(), [np.inf]))


def test_a_histogram_of_even_bins_stays_as_it_is() -> None:
    counts, edges = np.histogram(np.random.default_rng(0).normal(size=5000), bins=32)
    even = even_bins(counts, edges, bins=32)
    assert even is not None
    np.testing.assert_allclose(even[0], counts, atol=1e-9)
    assert even[1] == (edges[0], edges[-1])


def test_values_spread_evenly_inside_the_recorded_bins_give_their_own_even_histogram() -> None:
    # Evenly spaced points in [1, 2), [2, 4) and [-4, -2): exactly what is assumed, so numpy must agree.
    values = np.concatenate((1 + (np.arange(4096) + 0.5) / 4096, 2 + (np.arange(1024) + 0.5) / 512))
    values = np.concatenate((values, -2 - (np.arange(2048) + 0.5) / 1024))
    counts, _ = np.histogram(values, bins=np.unique(EDGES[np.isfinite(EDGES)]))
    even = even_bins(counts, np.unique(EDGES[np.isfinite(EDGES)]))
    assert even is not None
    assert even[1] == (-4.0, 4.0)
    np.testing.assert_allclose(even[0], np.histogram(values, bins=BINS, range=(-4, 4))[0], atol=1e-6)


def test_zeros_are_one_place_and_nothing_is_lost() -> None:
    counts = np.zeros(HISTOGRAM_BINS, np.int64)
    counts[ZERO_BIN] = 1000
    counts[ZERO_BIN + 66] = 64  # [1, 2)
    counts[ZERO_BIN - 66] = 64  # (-2, -1]
    even = even_bins(counts, EDGES)
    assert even is not None
    weights, (low, high) = even
    assert (low, high) == (-2.0, 2.0)
    assert weights.sum() == pytest.approx(1128)
    assert weights[BINS // 2] == pytest.approx(1000)
    np.testing.assert_allclose(weights[:32], 2.0)
    np.testing.assert_allclose(weights[-32:], 2.0)


def test_what_lies_beyond_the_last_edge_is_kept_at_it() -> None:
    counts = np.zeros(HISTOGRAM_BINS, np.int64)
    counts[[0, 1, -2, -1]] = [3, 4, 5, 6]
    even = even_bins(counts, EDGES)
    assert even is not None
    assert even[1] == (-(2.0**32), 2.0**32)
    assert even[0].sum() == pytest.approx(18)
    assert even[0][0] >= 3
    assert even[0][-1] >= 6


def test_constants_and_nothing() -> None:
    counts = np.zeros(HISTOGRAM_BINS, np.int64)
    assert even_bins(counts, EDGES) is None
    counts[ZERO_BIN] = 7
    even = even_bins(counts, EDGES)
    assert even is not None
    assert even[1] == (-0.5, 0.5)
    assert even[0].sum() == 7
    assert np.count_nonzero(even[0]) == 1

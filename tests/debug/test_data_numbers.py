"""The sums behind `check_data`, held against numpy and brute force on anything, however it is cut into batches."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from statsbridge.debug.data_duplicates import Digests, duplicates_across, duplicates_within
from statsbridge.debug.data_features import Feature, Moments, feature_axis
from statsbridge.debug.data_labels import Labels
from statsbridge.debug.dead_watch import _is_relu_call

ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint8]),
    hnp.array_shapes(min_dims=2, max_dims=4, max_side=6),
    elements=st.integers(0, 9),
)


@given(ARRAYS, st.lists(st.integers(0, 6), max_size=3))
def test_moments_of_any_array_in_any_pieces(array: np.ndarray, cuts: list[int]) -> None:
    feature = Feature("")
    for part in np.split(array, sorted(min(cut, len(array)) for cut in cuts)):
        feature.add(part, np.arange(len(part)))
    axis = feature_axis(array.shape)
    exact = np.moveaxis(array.astype(np.float64), axis, 0).reshape(array.shape[axis], -1)
    assert feature.moments is not None
    np.testing.assert_allclose(feature.moments.mean, exact.mean(axis=1), atol=1e-12)
    np.testing.assert_allclose(feature.moments.std, exact.std(axis=1), atol=1e-7)
    np.testing.assert_array_equal(feature.moments.low, exact.min(axis=1))
    np.testing.assert_array_equal(feature.moments.high, exact.max(axis=1))
    pooled = feature.moments.pooled()
    np.testing.assert_allclose([pooled.mean[0], pooled.std[0]], [exact.mean(), exact.std()], atol=1e-7)


@given(
    hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3)),
        elements=st.sampled_from([0.0, 1.5, -2.0, np.nan, np.inf, -np.inf]),
    )
)
def test_what_is_not_finite_is_counted_and_left_out(values: np.ndarray) -> None:
    feature = Feature("")
    feature.add(values.transpose(0, 2, 1), np.arange(len(values)) + 100)  # [samples, places, features]
    assert feature.nan_count == np.isnan(values).sum()
    assert feature.inf_count == np.isinf(values).sum()
    broken = ~np.isfinite(values)
    assert feature.nonfinite_samples == broken.any(axis=(1, 2)).sum()
    assert feature.nonfinite_features == set(np.flatnonzero(broken.any(axis=(0, 2))).tolist())
    places = [(place.index - 100, place.feature) for place in feature.places]
    assert places == [tuple(place) for place in np.argwhere(broken.any(axis=2))[:5].tolist()]
    assert feature.moments is not None
    for number in range(values.shape[1]):
        finite = values[:, number][~broken[:, number]]
        assert feature.moments.count[number] == len(finite)
        if len(finite):
            assert feature.moments.mean[number] == pytest.approx(finite.mean())
            assert feature.moments.std[number] == pytest.approx(finite.std(), abs=1e-9)


def test_large_values_far_from_zero_keep_their_spread() -> None:
    values = 1e8 + np.random.default_rng(0).normal(size=(1000, 3, 1))
    found = Moments.of(values[:300]).merged(Moments.of(values[300:]))
    np.testing.assert_allclose(found.std, values[:, :, 0].std(axis=0), rtol=1e-7)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=1, max_size=20),
)
def test_copies_are_those_that_brute_force_finds(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    splits = []
    for samples in (first, second):
        digests = Digests()
        inputs, labels = np.array([[one] for one, _ in samples]), np.array([label for _, label in samples])
        for cut in (slice(None, 7), slice(7, None)):
            digests.add({"": inputs[cut]}, {"": labels[cut]}, np.arange(len(samples))[cut])
        splits.append(digests)
    pairs, conflicting = [], 0
    for place, (value, label) in enumerate(first):
        earlier = [number for number in range(place) if first[number][0] == value]
        if earlier:
            pairs.append((earlier[0], place))
            conflicting += first[earlier[0]][1] != label
    found = duplicates_within(splits[0])
    if not pairs:
        assert found is None
    else:
        assert found is not None
        assert (found.count, found.of, found.conflicting) == (len(pairs), len(first), conflicting)
        assert list(found.pairs) == pairs[:5]
    values = [value for value, _ in first]
    leaked = [(values.index(value), place) for place, (value, _) in enumerate(second) if value in values]
    across = duplicates_across(*splits)
    assert (None if across is None else (across.count, list(across.pairs))) == (
        (len(leaked), leaked[:5]) if leaked else None
    )


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=40), st.integers(1, 7))
def test_labels_are_counted_in_any_pieces(values: list[int], size: int) -> None:
    labels = Labels("")
    for start in range(0, len(values), size):
        labels.add(np.array(values[start : start + size]))
    assert dict(labels.counts) == dict(Counter(values))
    assert labels.changes == sum(one != other for one, other in pairwise(values))
    assert (labels.low, labels.high) == (min(values), max(values))


def test_the_changes_expected_are_those_of_random_orders() -> None:
    values = np.repeat([0, 1, 2], [50, 30, 20])
    labels = Labels("")
    labels.add(values)
    random = np.random.default_rng(0)
    orders = [random.permutation(values) for _ in range(2000)]
    mean = np.mean([(order[1:] != order[:-1]).sum() for order in orders])
    assert labels.changes_expected == pytest.approx(mean, rel=0.01)
    assert labels.changes == 2


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "expected"),
    [
        ("relu_", (torch.zeros(1),), {}, True),
        ("clamp", (torch.zeros(1),), {"min": 0}, True),
        ("clamp", (torch.zeros(1), 0.0), {}, True),
        ("clamp", (torch.zeros(1), -1.0), {}, False),
        ("clamp", (torch.zeros(1),), {"max": 0}, False),
        ("sigmoid", (torch.zeros(1),), {}, False),
    ],
)
def test_which_calls_are_relus(name: str, args: tuple[object, ...], kwargs: dict[str, object], expected: bool) -> None:
    assert _is_relu_call(name, args, kwargs) is expected

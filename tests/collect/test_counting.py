"""Counts of samples in bins against a plain loop over the values, in float64."""

import numpy as np
import pytest

from statsbridge.collect.counting import Codes, count_codes

BINS = 98


def counted_one_by_one(codes: Codes) -> np.ndarray:
    found = np.zeros((len(codes.values), BINS))
    for row, values in enumerate(codes.values):
        code = values.astype(np.float64) * codes.factor[row] + codes.offset[row]
        for place in np.clip(np.floor(code), 0, codes.last[row]).astype(int):
            found[row, place] += 1
    return found


def codes_of(lengths: list[int], spread: float = 1.0, scale: float = 1.0, far: tuple[int, ...] = ()) -> Codes:
    """Samples of so many values, a multiple of 1/64 each: in float32, none of them changes its bin by rounding."""
    generator = np.random.default_rng(3)
    values = [(np.round(generator.normal(0, spread, n) * 64) / 64 + 1 / 128).astype(np.float32) for n in lengths]
    values = [(one * np.float32(scale)).astype(np.float32) for one in values]
    count = len(lengths)
    factor = np.full(count, 8.0 / scale)
    offset = np.full(count, 49.0)
    offset[list(far)] = 5e6
    last = np.full(count, 97.0)
    return Codes(values, np.array(lengths), factor, offset, last)


@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [8192],
        [8192, 8200, 8191, 9000, 2048, 2047],
        [64] * 100 + [4096] * 30,
        [0, 5000, 0, 3, 70_000, 8192, 0],
        [8192] * 40,
        [1, 2, 3, 5, 9, 17, 40, 100, 1000, 9000] * 3,
    ],
)
@pytest.mark.parametrize(("spread", "scale"), [(1.0, 1.0), (20.0, 1.0), (1.0, 2.0**-40), (1.0, 2.0**-110)])
def test_every_value_is_counted_in_its_bin(lengths: list[int], spread: float, scale: float) -> None:
    codes = codes_of(lengths, spread, scale)
    counts, sums = count_codes(codes, BINS)
    assert counts.sum(axis=1).tolist() == lengths
    np.testing.assert_array_equal(counts, counted_one_by_one(codes))
    for row, values in enumerate(codes.values):
        wide = values.astype(np.float64)
        size = np.abs(wide).sum() + 1e-300
        assert sums[0, row] == pytest.approx(wide.sum(), abs=1e-6 * size)
        if scale > 2.0**-60:  # squares of the others are none in float32
            assert sums[1, row] == pytest.approx((wide**2).sum(), rel=1e-4)


def test_samples_far_from_their_bins_do_not_disturb_others() -> None:
    codes = codes_of([8192, 8192, 300, 300], far=(1, 3))
    counts, _ = count_codes(codes, BINS)
    np.testing.assert_array_equal(counts, counted_one_by_one(codes))
    assert counts[1, 97] == 8192
    assert counts[3, 97] == 300


def test_infinities_are_beyond() -> None:
    """A float64 number that is too large for the float32 of a sample."""
    codes = codes_of([5000, 100])
    for values in codes.values:
        values[:3] = np.inf
        values[3:5] = -np.inf
    counts, _ = count_codes(codes, BINS)
    assert counts[:, 97].tolist() == [3, 3]
    assert counts[:, 0].tolist() == [2, 2]
    assert counts.sum(axis=1).tolist() == [5000, 100]


@pytest.mark.parametrize("lengths", [[8192, 8192], [100, 200]])
def test_what_is_no_number_is_beyond(lengths: list[int]) -> None:
    """An infinity times a factor that float32 has no digits for: the other rows of the step do not get lost for it."""
    codes = codes_of(lengths)
    codes.values[0][:5] = np.inf
    codes.factor[0] = 1e-60
    counts, _ = count_codes(codes, BINS)
    assert counts.sum(axis=1).tolist() == lengths
    assert counts[0, 0] == 5
    np.testing.assert_array_equal(counts[1], counted_one_by_one(codes)[1])


@pytest.mark.parametrize("lengths", [[8192, 8192], [100, 200], [3000, 20]])
def test_a_value_outside_that_nobody_expected_is_beyond(lengths: list[int]) -> None:
    """The other rows of the step do not get lost for it."""
    codes = codes_of(lengths)
    for values in codes.values:
        values[:2] = -1e3
        values[2:5] = 1e3
    counts, _ = count_codes(codes, BINS)
    np.testing.assert_array_equal(counts, counted_one_by_one(codes))


def test_how_a_sample_is_counted_does_not_depend_on_its_company() -> None:
    """Values on the edges of bins, where float32 and float64 disagree, beside a sample that only float64 can count."""
    values = [np.full(n, -1, dtype=np.float32) for n in (64, 64, 5000)]
    alone = Codes(values, np.array([64, 64, 5000]), np.full(3, np.nextafter(4, 5)), np.full(3, 5.0), np.full(3, 9.0))
    beside_one_far = alone._replace(offset=np.array([5.0, 5e6, 5.0]))
    for row in (0, 2):
        np.testing.assert_array_equal(count_codes(alone, BINS)[0][row], count_codes(beside_one_far, BINS)[0][row])


def test_what_is_no_number_at_all_is_beyond() -> None:
    """A factor or an offset that could not be computed costs the other rows of the step nothing."""
    codes = codes_of([8192, 8192, 300])
    codes.offset[0], codes.factor[2] = np.nan, np.nan
    counts, _ = count_codes(codes, BINS)
    assert counts[[0, 2], 0].tolist() == [8192, 300]
    np.testing.assert_array_equal(counts[1], counted_one_by_one(codes.take(np.array([1])))[0])

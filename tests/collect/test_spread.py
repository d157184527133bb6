"""How much the samples of a batch differ, against the plain formula in float64."""

from __future__ import annotations

import numpy as np
import pytest

from statsbridge.collect.spread import ALIKE, sample_spreads


def expected(samples: np.ndarray) -> float:
    differ = max(np.abs(one - samples[0]).max() for one in samples)
    return 0.0 if differ == 0 else float(differ / np.abs(samples).max())


def measured(*tensors: np.ndarray) -> list[float]:
    """Of tensors [samples, features] that lie one after the other, with something of no interest between."""
    noise = np.full(7, np.pi)
    pieces: list[np.ndarray] = []
    starts = []
    for tensor in tensors:
        pieces.append(noise)
        starts.append(sum(map(len, pieces)))
        pieces.append(tensor.reshape(-1))
    lengths = np.array([tensor.size for tensor in tensors])
    samples = np.array([len(tensor) for tensor in tensors])
    return sample_spreads(np.concatenate(pieces), np.array(starts), lengths, samples).tolist()


def test_many_tensors_at_once() -> None:
    random = np.random.default_rng(0)
    same = np.tile(random.normal(size=(1, 5)), (4, 1))
    nearly = same * (1 + 3e-7 * random.normal(size=same.shape))
    late = same.copy()
    late[3, 2] += 1.0  # the first two samples are equal, the last one is not
    tensors = (same, nearly, late, np.zeros((2, 3)), np.full((3, 1), 1e12), np.full((2, 2), 1e-300))
    assert measured(*tensors) == pytest.approx([expected(tensor) for tensor in tensors], rel=1e-12)
    assert [spread <= ALIKE for spread in measured(*tensors)] == [True, True, False, True, True, True]


def test_samples_that_differ_are_not_looked_at_further() -> None:
    """Two of them are enough to say so."""
    random = np.random.default_rng(1)
    tensors = [random.normal(size=(8, features)) for features in (1, 3, 20)]
    for spread, tensor in zip(measured(*tensors), tensors, strict=True):
        assert ALIKE < spread <= 2
        assert spread == pytest.approx(expected(tensor[:2]) * np.abs(tensor[:2]).max() / np.abs(tensor[:2]).max())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_alike(bad: float) -> None:
    for place in ((0, 0), (1, 1), (2, 1)):
        tensor = np.ones((3, 2))
        tensor[place] = bad
        assert not measured(tensor)[0] <= ALIKE
    # Infinite everywhere: it cannot be told, and other rules say what is wrong.
    assert not measured(np.full((3, 2), bad))[0] <= ALIKE

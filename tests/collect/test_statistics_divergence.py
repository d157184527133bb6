"""KL(p ‖ N(0, 1)) against closed forms and numerical integration."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from collect.statistics_reference import GAUSSIAN_ENTROPY, divergence, entropy_of, measured, rows_of

from statsbridge.collect import statistics
from statsbridge.collect.statistics import Wanted, measure


@pytest.fixture(params=["host", "device"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(statistics, "runs_on_host", lambda tensor: request.param == "host")
    return request.param


def quantiles(size: int, inverse: Callable[[np.ndarray], np.ndarray]) -> torch.Tensor:
    """Evenly spaced quantiles in random order: what a sample estimates, without the noise of one."""
    even = (np.arange(size) + 0.5) / size
    return torch.from_numpy(np.random.default_rng(0).permutation(inverse(even))).float()


def gaussian(p: np.ndarray) -> np.ndarray:
    return torch.special.ndtri(torch.from_numpy(p)).numpy()


def laplace(p: np.ndarray) -> np.ndarray:
    return -np.sign(p - 0.5) * np.log1p(-2 * np.abs(p - 0.5))


def mixture(p: np.ndarray) -> np.ndarray:
    """Half N(−1.5, ½), half N(1.5, ½): overlapping so little that each half of the quantiles is one of them."""
    return (
        np.where(p < 0.5, gaussian(np.clip(2 * p, 1e-12, 1 - 1e-12)) - 3, gaussian(np.clip(2 * p - 1, 1e-12, 1)) + 3)
        / 2
    )


def mixture_density(x: float) -> float:
    return sum(math.exp(-2 * (x - centre) ** 2) / math.sqrt(2 * math.pi) for centre in (-1.5, 1.5))


SHAPES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float, float, float]] = {
    # inverse distribution function, mean, std, entropy
    "N(0, 1)": (gaussian, 0.0, 1.0, GAUSSIAN_ENTROPY),
    "N(3, 2²)": (lambda p: 3 + 2 * gaussian(p), 3.0, 2.0, GAUSSIAN_ENTROPY + math.log(2)),
    "N(0, 0.02²)": (lambda p: 0.02 * gaussian(p), 0.0, 0.02, GAUSSIAN_ENTROPY + math.log(0.02)),
    "uniform": (lambda p: 2 * p - 1, 0.0, math.sqrt(1 / 3), math.log(2)),
    "Laplace": (laplace, 0.0, math.sqrt(2), 1 + math.log(2)),
    "two Gaussians": (mixture, 0.0, math.sqrt(2.5), entropy_of(mixture_density, -5, 5)),
}


def assert_close(found: float, right: float) -> None:
    assert abs(found - right) <= max(0.02, 0.02 * right), (found, right)


@pytest.mark.parametrize("size", [4096, 65536, 1_000_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_closed_forms(shape: str, size: int):
    inverse, mean, std, entropy = SHAPES[shape]
    assert_close(measured(quantiles(size, inverse))["kl_unit_gaussian"], divergence(mean, std, entropy))


@pytest.mark.parametrize("shape", SHAPES)
def test_random_samples(shape: str):
    inverse, mean, std, entropy = SHAPES[shape]
    values = torch.from_numpy(inverse(np.random.default_rng(1).random(400_000))).float()
    assert_close(measured(values)["kl_unit_gaussian"], divergence(mean, std, entropy))


def test_weights_of_usual_size_are_far_from_a_unit_gaussian():
    found = measured(quantiles(65536, lambda p: 0.02 * gaussian(p)))["kl_unit_gaussian"]
    assert found == pytest.approx(3.412, abs=0.02)


@pytest.mark.parametrize("size", [64, 1000, 4096, 65536])
def test_the_shape_is_never_negative(size: int):
    """KL(p ‖ N(mean, std²)) ≥ 0, where an estimate of 0 falls below it for one sample in three and more."""
    generator = torch.Generator().manual_seed(size)
    found = rows_of(*(measure(torch.randn(size, generator=generator), Wanted(histogram=True)) for _ in range(60)))
    shape = found["kl_unit_gaussian"] - divergence(found["mean"], found["std"], GAUSSIAN_ENTROPY + np.log(found["std"]))
    assert found["kl_unit_gaussian"].min() >= 0
    assert shape.min() >= -1e-12
    bounded = np.abs(shape) < 1e-12
    assert 3 <= bounded.sum() < 60, "no estimate was below zero: nothing was tested"


def test_null_below_64_elements_and_for_a_constant():
    assert math.isnan(measured(torch.randn(63))["kl_unit_gaussian"])
    assert measured(torch.randn(64, generator=torch.Generator().manual_seed(0)))["kl_unit_gaussian"] >= 0
    assert math.isnan(measured(torch.ones(10_000))["kl_unit_gaussian"])
    few = torch.full((10_000,), math.nan)
    few[:63] = torch.randn(63)
    assert math.isnan(measured(few)["kl_unit_gaussian"])


def test_null_where_it_was_not_asked_for():
    wanted = Wanted(kl=False)
    rows = rows_of(measure(torch.randn(9000), wanted), wanted=wanted)
    assert math.isnan(rows["kl_unit_gaussian"][0])
    assert rows["histogram"] is None


def test_the_sample_does_not_lock_onto_columns():
    """A wide tensor whose columns differ: a step that divides the width would see a few columns only."""
    column = np.repeat(np.arange(256) % 2, 1)
    values = quantiles(256 * 1024, gaussian).view(1024, 256) * 0.5 + torch.from_numpy(column).float() * 3 - 1.5
    assert_close(measured(values)["kl_unit_gaussian"], divergence(0.0, math.sqrt(2.5), SHAPES["two Gaussians"][3]))


def test_outliers_do_not_spoil_the_bins():
    values = quantiles(100_000, gaussian)
    values[::10_000] = 40.0
    found = measured(values)
    # Ten in 100,000 carry almost no probability: the entropy is that of the Gaussian.
    right = divergence(found["mean"], found["std"], GAUSSIAN_ENTROPY)
    assert abs(found["kl_unit_gaussian"] - right) < 0.02


@pytest.mark.parametrize("sizes", [(5000, 5000, 5000), (20_000, 20_000), (20_000, 60_000), (9000, 2000, 70)])
def test_micro_batches_estimate_the_whole(sizes: tuple[int, ...]):
    whole = quantiles(sum(sizes), laplace)
    pieces = [measure(part, Wanted(histogram=True)) for part in whole.split(list(sizes))]
    assert_close(rows_of(pieces)["kl_unit_gaussian"][0], divergence(0.0, math.sqrt(2), 1 + math.log(2)))


def test_micro_batches_of_different_distributions():
    halves = quantiles(400_000, mixture)
    pieces = [measure(half, Wanted(histogram=True)) for half in (halves[halves < 0], halves[halves > 0])]
    found = rows_of(pieces)
    assert found["mean"][0] == pytest.approx(0, abs=0.01)
    # The second lies beyond the bins of the first and falls into one wide bin: known only up to a Gaussian's shape.
    right = divergence(0.0, math.sqrt(2.5), SHAPES["two Gaussians"][3])
    assert right - 0.4 < found["kl_unit_gaussian"][0] < right + 0.02


def test_the_bias_of_few_elements_is_corrected():
    generator = torch.Generator().manual_seed(0)
    pieces = [measure(torch.randn(256, generator=generator), Wanted(histogram=True)) for _ in range(300)]
    # Uncorrected, 15 occupied bins alone would add 15 / 512.
    assert rows_of(*pieces)["kl_unit_gaussian"].mean() < 0.02


@pytest.mark.parametrize("constant_first", [True, False])
def test_a_constant_micro_batch_is_counted_in_the_bins_of_another(constant_first: bool):
    parts = [torch.full((6400,), 0.501), quantiles(6400, lambda p: p)]
    pieces = [measure(part, Wanted(histogram=True)) for part in (parts if constant_first else parts[::-1])]
    found = {name: values[0] for name, values in rows_of(pieces).items()}
    # √6400 bins over [0, 1]: each has half of 1/80, and one of them the other half of everything.
    share = np.full(80, 0.5 / 80)
    share[40] += 0.5
    entropy = -(share * np.log(share * 80)).sum()
    assert found["kl_unit_gaussian"] == pytest.approx(divergence(found["mean"], found["std"], entropy), abs=0.02)


def test_constants_alone_have_no_divergence():
    alone = rows_of([measure(torch.zeros(size), Wanted(histogram=True)) for size in (640, 64)])
    assert math.isnan(alone["kl_unit_gaussian"][0])

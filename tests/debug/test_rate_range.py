"""`learning_rate_range_test`: divergence where theory has it, and no suggestion from noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from statsbridge import ConfigError
from statsbridge.debug import learning_rate_range_test
from statsbridge.debug.rate_curve import Sweep, read_curve, running_mean


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


class Bowl(nn.Module):
    """Half the curvature times the squared distance from 0: gradient descent diverges above a rate of 2/curvature."""

    def __init__(self, curvature: float) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.curvature = curvature

    def forward(self) -> torch.Tensor:
        return 0.5 * self.curvature * self.place.square().sum()


def bowl_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model()


def data(samples: int = 512) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long())


def perceptron(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def shuffled(size: int = 32) -> DataLoader[Any]:
    return DataLoader(data(), size, shuffle=True, generator=torch.Generator().manual_seed(2))


# ------------------------------------------------------------------ what theory says


@pytest.mark.parametrize("curvature", [0.3, 2.0, 40.0])
@pytest.mark.parametrize("scale", ["exponential", "linear"])
def test_a_quadratic_diverges_from_two_over_its_curvature(curvature: float, scale: Any) -> None:
    limit = 2 / curvature
    bounds = (1e-5, 1e3) if scale == "exponential" else (0.01 * limit, 4 * limit)
    result = learning_rate_range_test(
        Bowl(curvature), bowl_loss, [0], optimizer=plain, lowest=bounds[0], highest=bounds[1], steps=200, scale=scale
    )
    table: Any = result.table
    rates, losses = np.array(table["rate"]), np.array(table["loss"])
    # Each loss is measured before the step at its rate: it grows from the first rate above the limit on.
    rising = rates[:-1][np.diff(losses) > 0]
    assert rising.min() == rates[rates > limit].min()
    expected = [0.5 * curvature * 3.0]
    for rate in rates[:-1]:
        expected.append(expected[-1] * (1 - rate * curvature) ** 2)
    # Relative to what is left: near a rate of 1/curvature the factor is a difference of two numbers near 1.
    before = losses > 1e-20
    np.testing.assert_allclose(losses[before], np.array(expected)[before], rtol=1e-6)
    if scale == "exponential":
        assert result.numbers["stopped_at"] == rates[-1] < 1e3
        assert result.numbers["rate_of_lowest_loss"] == pytest.approx(limit, rel=0.25)
        assert result.numbers["suggested_by_minimum"] == result.numbers["rate_of_lowest_loss"] / 10
        assert result.passed


def test_the_steepest_descent_is_found_where_it_is() -> None:
    """A logistic fall is steepest in its middle, whatever rises behind it."""
    rates = np.geomspace(1e-7, 10, 100)
    place = np.log10(rates)
    for middle in (-4.0, -2.5):
        losses = 2.3 - 1.0 / (1 + np.exp(-4 * (place - middle))) + np.where(place > -0.5, 30 * (place + 0.5) ** 2, 0)
        noisy = losses + np.random.default_rng(0).normal(size=100) * 0.01
        curve = read_curve(Sweep(rates=rates, losses=noisy, untrained=np.full(100, 2.3)), logarithmic=True)
        assert curve.steepest is not None
        assert place[curve.steepest] == pytest.approx(middle, abs=0.25)
        assert curve.rises
        assert curve.fall == pytest.approx(1.0, abs=0.05)
        assert curve.noise == pytest.approx(0.01, rel=0.5)


def test_real_training_gives_rates_that_train() -> None:
    result = learning_rate_range_test(perceptron(), nn.CrossEntropyLoss(), shuffled(), optimizer=plain, highest=100)
    assert result.passed
    suggested: Any = result.numbers["suggested_by_minimum"]
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=suggested)
    first = None
    for _ in range(6):
        for inputs, targets in shuffled():
            loss = functional.cross_entropy(model(inputs), targets)
            first = first or float(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert first is not None
    assert float(loss.detach()) < 0.5 * first


def test_the_losses_are_those_of_a_plain_training() -> None:
    batches = [data()[:32], data()[32:64]]
    result = learning_rate_range_test(
        perceptron(), nn.CrossEntropyLoss(), batches, lowest=1e-4, highest=1e-2, steps=20, scale="linear"
    )
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters())
    for step, rate in enumerate(np.linspace(1e-4, 1e-2, 20)):
        inputs, targets = batches[step % 2]
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        assert result.table["rate"][step] == rate
        assert result.table["loss"][step] == float(loss.detach())
        assert result.table["untrained"][step] == float(functional.cross_entropy(perceptron()(inputs), targets))
        loss.backward()
        optimizer.step()
    assert result.numbers["optimizer"] == "Adam"


def test_groups_keep_the_ratio_of_their_rates() -> None:
    model = perceptron()
    seen: list[tuple[float, float]] = []
    optimizer = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}], 0.1)
    optimizer.register_step_pre_hook(lambda one, *_: seen.append(tuple(group["lr"] for group in one.param_groups)))
    learning_rate_range_test(model, nn.CrossEntropyLoss(), shuffled(), optimizer=optimizer, highest=1e-3, steps=20)
    np.testing.assert_allclose([large for _, large in seen], np.geomspace(1e-7, 1e-3, 20))
    np.testing.assert_allclose([small for small, _ in seen], np.geomspace(1e-8, 1e-4, 20))


# ------------------------------------------------------------------ silence


NOISE: dict[str, Any] = {
    "normal": lambda rng: 5 + rng.normal(size=100),
    "heavy tails": lambda rng: 5 + rng.standard_t(3, size=100),
    "skewed": lambda rng: rng.lognormal(size=100),
    "two values": lambda rng: (rng.random(100) < 0.3).astype(float),
    "nearly flat": lambda rng: 1 + 1e-9 * rng.normal(size=100),
    "small": lambda rng: 1 + 2e-3 * rng.normal(size=100),
}


@pytest.mark.parametrize("kind", NOISE)
def test_no_fall_is_seen_in_noise(kind: str) -> None:
    rates = np.geomspace(1e-7, 10, 100)
    for seed in range(200):
        losses = NOISE[kind](np.random.default_rng(seed))
        curve = read_curve(Sweep(rates=rates, losses=losses, untrained=np.zeros(100)), logarithmic=True)
        assert not curve.falls, f"seed {seed}"
        assert curve.steepest is None


def test_a_loss_that_no_weight_changes_fails_without_a_suggestion() -> None:
    result = learning_rate_range_test(
        perceptron(), lambda model, batch: 1 + 0 * model(batch[0]).sum() + 0.001 * torch.randn(()), shuffled()
    )
    assert result.passed is False
    assert result.numbers["suggested_by_steepest"] is result.numbers["suggested_by_minimum"] is None
    assert "at no rate did the loss fall" in result.explanation
    assert "overfit_one_batch says where" in result.explanation


def test_noise_that_is_not_repeated_leaves_it_undecided() -> None:
    rng = np.random.default_rng(0)
    result = learning_rate_range_test(
        perceptron(), lambda model, batch: 1 + 0 * model(batch[0]).sum() + rng.normal(), shuffled()
    )
    assert result.passed is None
    assert result.numbers["suggested_by_steepest"] is result.numbers["suggested_by_minimum"] is None
    assert "cannot be told from that noise" in result.explanation


def test_batches_of_a_sorted_data_set_are_not_taken_for_a_curve() -> None:
    """Each class has its own loss; without the untrained model's the order of the classes looks like learning."""
    inputs, targets = data().tensors
    order = targets.argsort()
    loader = DataLoader(TensorDataset(inputs[order], targets[order]), 16)
    fooled = 0
    for seed in range(4):
        model = perceptron(seed)
        model[2].weight.data *= 6
        result = learning_rate_range_test(
            model, nn.CrossEntropyLoss(), loader, optimizer=plain, lowest=1e-9, highest=1e-6
        )
        assert result.passed is False, f"seed {seed}"
        assert len(result.table["loss"]) == 100
        table: Any = result.table
        alone = Sweep(rates=np.array(table["rate"]), losses=np.array(table["loss"]), untrained=np.zeros(100))
        fooled += read_curve(alone, logarithmic=True).falls
    assert fooled > 0


def test_divergence_from_the_first_rates_is_said() -> None:
    result = learning_rate_range_test(Bowl(1e6), bowl_loss, [0], optimizer=plain, lowest=1e-3, highest=10)
    assert result.passed is None
    assert "diverged within" in result.explanation
    assert "lower lowest rate" in result.explanation


def test_a_fall_that_does_not_end_gives_no_minimum() -> None:
    result = learning_rate_range_test(Bowl(1.0), bowl_loss, [0], optimizer=plain, lowest=1e-4, highest=0.1)
    assert result.passed
    assert result.numbers["suggested_by_minimum"] is None
    assert result.numbers["suggested_by_steepest"] is not None
    assert "give a larger highest rate" in result.explanation


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: model(batch[0]).sum() * math.nan, "The loss is nan before the first step"),
        (lambda model, batch: model(batch[0]).sum().detach(), "The loss has no gradient"),
    ],
)
def test_a_broken_loss_is_said(loss: Any, said: str) -> None:
    result = learning_rate_range_test(perceptron(), loss, shuffled())
    assert result.passed is False
    assert said in result.explanation
    assert len(result.table["loss"]) == 1
    result.figure()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lowest": 0}, "lowest=0, highest=10.0: give two learning rates, 0 < lowest < highest"),
        ({"lowest": 1, "highest": 0.1}, "lowest=1, highest=0.1"),
        ({"highest": math.inf}, "highest=inf"),
        ({"steps": 5}, "steps=5: give at least 20"),
        ({"scale": "log"}, "scale='log': give 'exponential' or 'linear'"),
        ({"loader": iter([1])}, "can be read only once"),
        ({"loader": []}, "the loader gives no batch"),
        ({"optimizer": 3}, "optimizer is a int"),
    ],
)
def test_a_wrong_argument_is_said(changes: dict[str, Any], message: str) -> None:
    given = {"loader": shuffled(), **changes}
    with pytest.raises(ConfigError, match=message):
        learning_rate_range_test(perceptron(), nn.CrossEntropyLoss(), given.pop("loader"), **given)


def test_a_running_mean_is_that_of_numpy() -> None:
    values = np.random.default_rng(0).normal(size=30)
    means = running_mean(values, 5)
    np.testing.assert_allclose(means[2:-2], np.convolve(values, np.full(5, 0.2), mode="valid"))
    assert means[0] == values[0]
    assert means[1] == pytest.approx(values[:3].mean())
    assert means[-1] == values[-1]

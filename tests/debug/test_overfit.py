"""`overfit_one_batch`: healthy models learn their batch, and each planted fault is called by its name."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from statsbridge import ConfigError
from statsbridge.debug import OverfitResult, overfit_one_batch

BATCH = (torch.randn(16, 8, generator=torch.Generator().manual_seed(3)), torch.arange(16) % 4)


def perceptron(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 4))


def said(result: OverfitResult) -> str:
    """The explanation of a test that has not passed."""
    assert result.passed is False
    return result.explanation


class Sequence(nn.Module):
    """A transformer that takes its inputs by name and computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layer(self.embedding(tokens)))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@dataclass
class Sample:
    image: torch.Tensor
    label: torch.Tensor


HEALTHY: dict[str, Any] = {
    "criterion and pair": lambda: (perceptron(), nn.CrossEntropyLoss(), BATCH),
    "function and pair": lambda: (perceptron(), functional.cross_entropy, list(BATCH)),
    "dropout": lambda: (perceptron(0.5), nn.CrossEntropyLoss(), BATCH),
    "loader": lambda: (perceptron(), nn.CrossEntropyLoss(), DataLoader(TensorDataset(*BATCH), 8, shuffle=True)),
    "dict": lambda: (
        Sequence(),
        lambda model, batch: model(**batch)["loss"],
        {"tokens": torch.arange(24).reshape(4, 6) % 11, "labels": torch.arange(24).reshape(4, 6) * 7 % 11},
    ),
    "dataclass, convolution, batch norm": lambda: (
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3)),
        lambda model, batch: functional.cross_entropy(model(batch.image), batch.label),
        Sample(torch.randn(9, 1, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(9) % 3),
    ),
    "regression": lambda: (perceptron(), lambda model, batch: (model(batch) - batch[:, :4]).square().mean(), BATCH[0]),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_model_learns_its_batch(kind: str) -> None:
    torch.manual_seed(0)
    result = overfit_one_batch(*HEALTHY[kind]())
    assert result.passed, str(result)
    assert result.numbers["last_loss"] < 0.1 < result.numbers["first_loss"]
    assert "learnt by heart" in result.explanation


def test_the_losses_are_those_of_a_plain_training() -> None:
    model = perceptron()
    result = overfit_one_batch(
        model, nn.CrossEntropyLoss(), BATCH, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps=10
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(11):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(BATCH[0]), BATCH[1])
        expected.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    assert list(result.table["loss"]) == expected
    assert list(result.table["step"]) == list(range(11))
    assert result.numbers["steps"] == 10
    assert result.numbers["learning_rate"] == 0.1


def test_it_stops_where_the_loss_is_low_enough() -> None:
    result = overfit_one_batch(perceptron(), nn.CrossEntropyLoss(), BATCH, threshold=1.0)
    losses: Any = result.table["loss"]
    assert losses[-1] < 1.0 <= min(losses[:-1])


def test_where_one_rate_is_not_enough_the_next_is_tried() -> None:
    result = overfit_one_batch(perceptron(), nn.CrossEntropyLoss(), BATCH, steps=60)
    assert result.passed
    assert result.numbers["learning_rate"] == 0.01
    only = overfit_one_batch(
        perceptron(), nn.CrossEntropyLoss(), BATCH, steps=60, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3)
    )
    assert only.passed is False


def test_the_users_own_optimizer_goes_on_from_its_state() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    functional.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    optimizer.step()
    kept = {id(one): optimizer.state[one]["momentum_buffer"].clone() for one in model.parameters()}
    result = overfit_one_batch(model, nn.CrossEntropyLoss(), BATCH, optimizer=optimizer, steps=3)
    assert result.numbers["learning_rate"] == 0.05
    assert all(torch.equal(optimizer.state[one]["momentum_buffer"], kept[id(one)]) for one in model.parameters())
    fresh = overfit_one_batch(
        model, nn.CrossEntropyLoss(), BATCH, steps=3, optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)
    )
    assert result.table["loss"][0] == fresh.table["loss"][0]
    assert result.table["loss"][1] != fresh.table["loss"][1]


# ------------------------------------------------------------------ planted faults


def test_a_detached_loss() -> None:
    result = overfit_one_batch(
        perceptron(), lambda model, batch: functional.cross_entropy(model(batch[0]).detach(), batch[1]), BATCH
    )
    assert "The loss has no gradient" in said(result)
    assert "detach()" in result.explanation


def test_an_optimizer_of_another_model() -> None:
    optimizer = torch.optim.SGD(perceptron().parameters(), lr=0.1)
    result = overfit_one_batch(perceptron(), nn.CrossEntropyLoss(), BATCH, optimizer=optimizer, steps=5)
    assert "did not change in 5 steps" in said(result)
    assert "does not hold 0.weight, 0.bias, 3.weight and 1 more" in result.explanation


def test_parameters_that_no_gradient_reaches_are_named() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(x)).detach())

    result = overfit_one_batch(Cut(), nn.CrossEntropyLoss(), BATCH, steps=5)
    assert "No gradient reaches first.weight, first.bias:" in result.explanation


def test_dead_units_make_every_gradient_zero() -> None:
    model = perceptron()
    nn.init.constant_(model[0].bias, -100.0)
    nn.init.zeros_(model[3].bias)
    model[3].bias.requires_grad_(False)
    assert "Every gradient is exactly zero" in said(overfit_one_batch(model, nn.CrossEntropyLoss(), BATCH, steps=5))


def test_targets_shuffled_anew_each_time_are_called_random() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(5 * model(batch[0]), batch[1][torch.randperm(16)])

    result = overfit_one_batch(perceptron(), loss, BATCH, steps=40)
    assert "Losses with the same weights differ by" in said(result)
    assert "a shuffling of the targets" in result.explanation
    assert result.numbers["noise"] > 0.05


def test_equal_inputs_with_different_targets_cannot_be_learnt() -> None:
    batch = (torch.ones(16, 8), BATCH[1])
    result = overfit_one_batch(perceptron(), nn.CrossEntropyLoss(), batch, steps=50)
    assert result.numbers["lowest_loss"] == pytest.approx(math.log(4), abs=0.01)
    assert "inputs" in said(result)
    assert "Of 3 learning rates tried" in result.explanation


def test_a_rate_that_is_too_large() -> None:
    result = overfit_one_batch(
        perceptron(),
        lambda model, batch: (model(batch[0]) - 1).square().mean(),
        BATCH,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e3),
    )
    assert "the learning rate is too large" in said(result)
    assert not math.isfinite(result.numbers["last_loss"])
    assert result.numbers["lowest_loss"] == min(filter(math.isfinite, result.table["loss"]))


def test_a_loss_that_is_nan_from_the_start() -> None:
    batch = (BATCH[0].clone().fill_(math.nan), BATCH[1])
    result = overfit_one_batch(perceptron(), nn.CrossEntropyLoss(), batch)
    assert "The loss is nan before the first step" in said(result)
    assert result.numbers["lowest_loss"] is None


def test_a_loss_below_the_threshold_from_the_start_says_nothing() -> None:
    result = overfit_one_batch(perceptron(), nn.CrossEntropyLoss(), BATCH, threshold=5.0)
    assert result.passed is None
    assert "Give a threshold well below" in result.explanation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0: give at least 1"),
        ({"threshold": math.nan}, "threshold=nan: give a finite loss"),
        ({"optimizer": 0.1}, "optimizer is a float: give a torch optimizer, or a callable"),
        ({"optimizer": lambda parameters: None}, r"optimizer\(parameters\) gave a NoneType"),
        ({"optimizer": torch.optim.LBFGS}, "optimizer is LBFGS"),
        ({"model": "text"}, "model is a str"),
        ({"model": nn.ReLU()}, "no parameter of the model requires a gradient"),
        ({"loss": nn.MSELoss(), "batch": {"x": 1}}, "the batch is a dict: a criterion needs a pair"),
    ],
)
def test_a_wrong_argument_is_said(changes: dict[str, Any], message: str) -> None:
    given = {"model": perceptron(), "loss": nn.CrossEntropyLoss(), "batch": BATCH, **changes}
    with pytest.raises(ConfigError, match=message):
        overfit_one_batch(given.pop("model"), given.pop("loss"), given.pop("batch"), **given)


def test_the_figure_and_the_file_have_the_losses(tmp_path: Path) -> None:
    result = overfit_one_batch(
        perceptron(), nn.CrossEntropyLoss(), BATCH, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps=4
    )
    figure = result.figure()
    assert list(figure.data[0].y) == pytest.approx(list(result.table["loss"]), rel=1e-6)
    assert figure.layout.yaxis.type == "log"
    assert any(shape.y0 == 0.1 == shape.y1 for shape in figure.layout.shapes)
    result.to_csv(tmp_path / "losses.csv")
    rows = list(csv.reader((tmp_path / "losses.csv").open()))
    assert rows[0] == ["step", "loss"]
    assert [float(row[1]) for row in rows[1:]] == list(result.table["loss"])

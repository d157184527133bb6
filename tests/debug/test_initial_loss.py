"""`initial_loss_check`: ln C, and what it means where the loss lies beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from statsbridge import ConfigError
from statsbridge.debug import initial_loss_check


def batch(classes: int, samples: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 8, generator=generator), torch.arange(samples) % classes


def classifier(classes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, classes))


@pytest.mark.parametrize("classes", [2, 4, 10, 100])
def test_a_classifier_that_knows_nothing_has_the_logarithm_of_its_classes(classes: int) -> None:
    model = classifier(classes)
    result = initial_loss_check(model, nn.CrossEntropyLoss(), batch(classes))
    assert result.passed
    assert result.numbers["classes"] == classes
    assert result.numbers["expected"] == math.log(classes)
    model[2].eval()
    expected = functional.cross_entropy(model(batch(classes)[0]), batch(classes)[1])
    assert result.numbers["loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    assert f"as expected (ln {classes} = " in result.explanation


def test_outputs_that_are_all_equal_hit_it_exactly() -> None:
    model = classifier(7)
    nn.init.zeros_(model[3].weight)
    nn.init.zeros_(model[3].bias)
    result = initial_loss_check(model, functional.cross_entropy, batch(7), tolerance=1e-6)
    assert result.passed
    assert result.numbers["loss"] == pytest.approx(math.log(7), rel=1e-6)


def test_a_binary_criterion_expects_ln_2() -> None:
    inputs, targets = batch(2)
    result = initial_loss_check(classifier(1), nn.BCEWithLogitsLoss(), (inputs, targets.float()[:, None]))
    assert result.passed
    assert result.numbers["expected"] == math.log(2)


def test_segmentation_has_its_classes_in_dimension_1() -> None:
    model = nn.Conv2d(3, 5, 1)
    pictures = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    result = initial_loss_check(model, nn.CrossEntropyLoss(), (pictures, torch.zeros(2, 4, 4, dtype=torch.long)))
    assert result.numbers["classes"] == 5


def test_any_other_loss_needs_what_to_expect() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    unknown = initial_loss_check(classifier(4), loss, batch(4))
    assert unknown.passed is None
    assert unknown.numbers["expected"] is None
    assert "give classes=" in unknown.explanation
    assert initial_loss_check(classifier(4), loss, batch(4), classes=4).passed
    assert initial_loss_check(classifier(4), loss, batch(4), expected=1.4).passed
    assert initial_loss_check(classifier(4), loss, batch(4), classes=400).passed is False


def test_an_output_that_is_too_sure_is_above() -> None:
    model = classifier(4)
    model[3].weight.data *= 30
    result = initial_loss_check(model, nn.CrossEntropyLoss(), batch(4))
    assert result.passed is False
    assert "above the expected ln 4 = 1.386: the model is sure" in result.explanation


def test_a_sum_where_a_mean_is_meant_is_above() -> None:
    result = initial_loss_check(classifier(4), nn.CrossEntropyLoss(reduction="sum"), batch(4))
    assert result.passed is False
    assert "a sum where a mean is meant" in result.explanation


def test_a_loss_divided_once_too_often_is_below() -> None:
    result = initial_loss_check(
        classifier(4), lambda model, one: functional.cross_entropy(model(one[0]), one[1]) / 64, batch(4), classes=4
    )
    assert result.passed is False
    assert "below the expected" in result.explanation


def test_a_softmax_before_the_criterion_is_found_though_the_loss_is_right() -> None:
    model = nn.Sequential(classifier(4), nn.Softmax(dim=1))
    result = initial_loss_check(model, nn.CrossEntropyLoss(), batch(4))
    assert result.passed is False
    assert result.numbers["loss"] == pytest.approx(math.log(4), rel=0.05)
    assert "applied twice" in result.explanation
    logarithms = nn.Sequential(classifier(4), nn.LogSoftmax(dim=1))
    assert initial_loss_check(logarithms, nn.NLLLoss(), batch(4)).passed


def test_a_loader_gives_the_mean_of_its_first_ten_batches() -> None:
    inputs, targets = batch(4, 120)
    model = classifier(4)
    result = initial_loss_check(model, nn.CrossEntropyLoss(), DataLoader(TensorDataset(inputs, targets), 10))
    model[2].eval()
    expected = [
        float(functional.cross_entropy(model(inputs[start : start + 10]), targets[start : start + 10]).detach())
        for start in range(0, 100, 10)
    ]
    assert list(result.table["loss"]) == pytest.approx(expected, rel=1e-5)
    assert result.numbers["loss"] == pytest.approx(sum(expected) / 10, rel=1e-5)
    assert result.numbers["batches"] == 10
    assert result.numbers["lowest_batch"] == pytest.approx(min(expected), rel=1e-5)


def test_a_loss_that_is_not_finite_fails() -> None:
    inputs, targets = batch(4)
    inputs[3, 2] = math.nan
    result = initial_loss_check(classifier(4), nn.CrossEntropyLoss(), (inputs, targets))
    assert result.passed is False
    assert "The loss is nan before the first step" in result.explanation
    assert result.numbers["lowest_batch"] is None
    assert [trace.name for trace in result.figure().data] == ["loss", "NaN or infinite"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": 1}, "classes=1: give how many there are, at least 2"),
        ({"classes": 2.5}, r"classes=2.5: give how many"),
        ({"classes": 3, "expected": 1.0}, "classes and expected are both given"),
        ({"expected": math.nan}, "expected=nan: give a finite loss"),
        ({"tolerance": 0}, "tolerance=0: give a share above 0"),
        ({"batch": DataLoader(TensorDataset(torch.ones(2, 8)), 5, drop_last=True)}, "the loader gives no batch"),
    ],
)
def test_a_wrong_argument_is_said(changes: dict[str, Any], message: str) -> None:
    given = {"batch": batch(4), **changes}
    with pytest.raises(ConfigError, match=message):
        initial_loss_check(classifier(4), nn.CrossEntropyLoss(), given.pop("batch"), **given)


def test_the_figure_shows_the_losses_and_the_band() -> None:
    result = initial_loss_check(classifier(4), nn.CrossEntropyLoss(), batch(4), tolerance=0.1)
    figure = result.figure()
    assert list(figure.data[0].y) == pytest.approx([result.numbers["loss"]])
    bands = [(shape.y0, shape.y1) for shape in figure.layout.shapes if shape.type == "rect"]
    assert bands == [pytest.approx((0.9 * math.log(4), 1.1 * math.log(4)))]


@pytest.mark.parametrize("criterion", ["pos_weight", "weight", "BCELoss"])
@pytest.mark.parametrize("classes", [None, 2])
def test_a_weighted_binary_criterion_expects_what_its_weights_make_of_ln_2(criterion: str, classes: int | None) -> None:
    weight = torch.tensor([10.0])
    loss: nn.Module = {
        "pos_weight": nn.BCEWithLogitsLoss(pos_weight=weight),
        "weight": nn.BCEWithLogitsLoss(weight=weight),
        "BCELoss": nn.BCELoss(weight=weight),
    }[criterion]
    model = nn.Sequential(nn.Linear(8, 1), *([nn.Sigmoid()] if criterion == "BCELoss" else []))
    nn.init.normal_(model[0].weight, std=0.01)  # type: ignore[arg-type]
    nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
    inputs, labels = batch(4)
    result = initial_loss_check(model, loss, (inputs, (labels == 0).float()[:, None]), classes=classes)
    # A quarter of the targets are 1: weighed alone they make (10 + 3) / 4 of it, all of them ten times as much.
    expected = math.log(2) * (13 / 4 if criterion == "pos_weight" else 10)
    assert result.numbers["expected"] == pytest.approx(expected, rel=1e-6)
    assert result.passed, str(result)
    assert "ln 2" not in result.explanation


def test_losses_of_both_infinities_are_said() -> None:
    loader = DataLoader([math.inf, -math.inf])  # type: ignore[arg-type]
    result = initial_loss_check(nn.Linear(1, 1), lambda model, batch: batch.sum(), loader, expected=1.0)
    assert result.passed is False
    assert "The loss is nan before the first step" in result.explanation


def test_weights_that_are_not_finite_are_named_and_the_data_are_not_blamed() -> None:
    model = classifier(4)
    with torch.no_grad():
        model[3].weight[1, 2] = math.nan  # type: ignore[index]
    result = initial_loss_check(model, nn.CrossEntropyLoss(), batch(4))
    assert result.passed is False
    assert "3.weight is not finite" in result.explanation
    assert "data" not in result.explanation
    masked = classifier(4)
    masked.register_buffer("mask", torch.full((3,), -math.inf))  # is meant
    inputs, targets = batch(4)
    assert "in the data" in initial_loss_check(masked, nn.CrossEntropyLoss(), (inputs * math.nan, targets)).explanation

"""The checklist: in order, as far as the first failure, on one screen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import statsbridge
from statsbridge import ConfigError
from statsbridge.debug import PreflightResult, preflight
from statsbridge.debug.preflight import TESTS

CRITERION = nn.CrossEntropyLoss()


def data(samples: int = 60, *, shift: float = 0.0, **keywords: Any) -> DataLoader[Any]:
    """Three clusters in four dimensions."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 3
    inputs = torch.randn(samples, 4, generator=generator) * 0.5 + F.one_hot(labels, 4) * 2 - 0.5 + shift
    keywords = {"batch_size": 20, "shuffle": True, "generator": torch.Generator().manual_seed(1)} | keywords
    return DataLoader(TensorDataset(inputs, labels), **keywords)


def model(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), *layers, nn.Linear(16, 3))


def outcomes(result: PreflightResult) -> list[str]:
    return [str(result.numbers[name]) for name in TESTS]


@pytest.fixture(scope="module")
def healthy() -> tuple[nn.Module, dict[str, torch.Tensor], PreflightResult]:
    network = model()
    before = copy.deepcopy(network.state_dict())
    return network, before, preflight(network, CRITERION, data(), validation=data(30, shift=0.01), classes=3)


def test_a_healthy_training_passes_everything(healthy: Any) -> None:
    _, _, result = healthy
    assert result.passed is True, str(result)
    assert outcomes(result) == ["passed"] * 6
    assert [part.name for part in result.parts] == list(TESTS)
    assert result.explanation == "Ready to train."


def test_it_fits_on_a_screen_in_order(healthy: Any) -> None:
    lines = str(healthy[2]).splitlines()
    assert lines[0] == "✓ preflight: passed"
    assert [line[:3] for line in lines[1:7]] == ["  ✓"] * 6
    assert [line.split("  ")[1].removeprefix("✓ ") for line in lines[1:7]] == [name.replace("_", " ") for name in TESTS]
    assert "60 samples" in lines[1]
    assert "expected 1.099" in lines[2]
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100


def test_the_model_is_as_found(healthy: Any) -> None:
    network, before, _ = healthy
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_all_of_it_goes_into_a_run(healthy: Any, tmp_path: Any) -> None:
    network, _, result = healthy
    run = statsbridge.init(network, dir=tmp_path)
    result.log_to(run)
    run.finish()
    scalars = statsbridge.load(run.path).scalars
    recorded = dict(zip(scalars["name"].to_pylist(), scalars["value"].to_pylist(), strict=True))
    assert recorded["preflight/passed"] == 1
    for part in result.parts:
        assert recorded[f"{part.name}/passed"] == 1
    assert recorded["initial_loss_check/loss"] == result.parts[1].numbers["loss"]


def test_the_outcomes_as_a_file(healthy: Any, tmp_path: Any) -> None:
    healthy[2].to_csv(tmp_path / "preflight.csv")
    rows = (tmp_path / "preflight.csv").read_text().splitlines()
    assert rows[0] == "test,outcome,found"
    assert [row.partition(",")[0] for row in rows[1:]] == list(TESTS)


def test_warnings_of_the_data_are_told_though_it_passes() -> None:
    result = preflight(model(), CRITERION, data(61), expected_loss=1.1)
    assert result.passed is True, str(result)
    assert "61 samples, 1 warning" in str(result)
    assert result.explanation.splitlines()[1].startswith("! training: the last batch has 1 sample")


def test_a_list_of_batches_will_do() -> None:
    result = preflight(model(), CRITERION, list(data())[:2], classes=3)
    assert result.passed is True, str(result)


# ------------------------------------------------------------------ the first failure ends it


class NoGradient(torch.autograd.Function):
    """Twice the right gradient."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 1.0

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2.0


def broken_data() -> dict[str, Any]:
    loader = data()
    loader.dataset.tensors[0][7, 1] = float("nan")
    return {"model": model(), "loss": CRITERION, "loader": loader}


def last_batch_of_one() -> dict[str, Any]:
    return {"model": model(nn.BatchNorm1d(16)), "loss": CRITERION, "loader": data(61)}


def wrong_start() -> dict[str, Any]:
    network = model()
    with torch.no_grad():
        network[2].weight *= 100
    return {"model": network, "loss": CRITERION, "loader": data()}


def wrong_gradient() -> dict[str, Any]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(NoGradient.apply(model(batch[0])), batch[1])

    return {"model": model(), "loss": loss, "loader": data()}


def cannot_learn() -> dict[str, Any]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]) * 0.001, batch[1])

    return {"model": model(), "loss": loss, "loader": data()}


def wrong_shape() -> dict[str, Any]:
    return {"model": nn.Linear(5, 3), "loss": CRITERION, "loader": data()}


def mostly_dead() -> dict[str, Any]:
    network = model()
    with torch.no_grad():
        network[0].bias[:9] = -100.0
    return {"model": network, "loss": CRITERION, "loader": data()}


def dead_function() -> dict[str, Any]:
    """Nothing gets through, and no module is to blame: the ReLU is a function."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(F.relu(self.first(x)))

    network = Network()
    with torch.no_grad():
        network.first.bias.fill_(-100.0)
    return {"model": network, "loss": CRITERION, "loader": data()}


@pytest.mark.parametrize(
    ("fault", "failed", "said"),
    [
        (broken_data, "check_data", "1 NaN value in 1 sample and 1 feature: sample 7, feature 1"),
        (last_batch_of_one, "check_data", "the last batch has 1 sample"),
        (wrong_start, "initial_loss_check", "ln 3"),
        (wrong_gradient, "gradient_check", "2.weight"),
        (cannot_learn, "overfit_one_batch", "not below 0.1"),
        (wrong_shape, "initial_loss_check", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (mostly_dead, "find_dead_units", "1: 9 of 16 units never fired"),
        (dead_function, "find_dead_units", "(model): relu: 16 of 16 units never fired"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_it_stops_at_the_first_failure(fault: Any, failed: str, said: str) -> None:
    result = preflight(**fault(), classes=3)
    place = TESTS.index(failed)
    assert result.passed is False
    assert result.parts[-1].name == failed, str(result)
    assert all(part.passed is not False for part in result.parts[:-1])
    assert outcomes(result)[place:] == ["failed"] + ["not run"] * (5 - place)
    assert said in result.explanation
    assert said in " ".join(str(result).split())
    assert len(str(result).splitlines()) <= 24


def test_an_error_of_the_users_code_is_told_with_its_place() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise KeyError("labels")

    result = preflight(model(), loss, data())
    assert result.parts[-1].name == "initial_loss_check"
    assert "KeyError: 'labels'" in result.explanation
    assert "raised in test_preflight.py, line" in result.explanation


def test_what_cannot_be_told_is_no_failure() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    result = preflight(nn.Linear(4, 3), loss, data(), overfit_loss=0.9)
    assert outcomes(result)[1] == "undecided"
    assert outcomes(result)[2] == "undecided"
    assert result.passed is True, str(result)
    assert "Could not tell: initial loss check, find dead units" in result.explanation


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((3, CRITERION, []), "model is a int"),
        ((nn.Linear(4, 3), CRITERION, iter([])), "only once"),
        ((nn.Linear(4, 3), 3, []), "loss is a int"),
    ],
)
def test_wrong_arguments_are_said(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        preflight(*arguments)


def test_a_limit_in_text_is_said() -> None:
    limit: Any = "500"
    with pytest.raises(ConfigError, match="limit='500' is no whole number"):
        preflight(nn.Linear(4, 3), CRITERION, data(), limit=limit)

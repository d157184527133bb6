"""`no_gradient` where no optimizer is known: updates by hand, whose gradients are gone at `run.step()`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo_helpers import Then, Training, mlp, record, sgd, supervised, vectors

import statsbridge
from statsbridge.analyze.diagnosis import diagnose
from statsbridge.analyze.findings import Finding


def found_in(training: Training, folder: Path, **settings: Any) -> dict[str, Finding]:
    run = record(training, folder, **settings)
    return {finding.kind: finding for finding in diagnose(statsbridge.load(run))}


def by_hand(model: nn.Module, *, cleared: bool = True) -> Training:
    """No optimizer; `cleared`: gradients are set to None before `run.step()`."""
    batches = vectors()

    def step(number: int) -> dict[str, Tensor]:
        inputs, targets = next(batches)
        model.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    if cleared:
                        parameter.grad = None
        return {"loss": loss}

    return Training(model, step)


class Shifted(nn.Module):
    """A parameter of the model's own, and a recurrent layer that puts out a tuple of which one part is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(16))
        self.recurrent = nn.GRU(16, 32, batch_first=True)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent((x + self.offset)[:, None])
        return self.head(self.norm(states[:, 0]))


def detached() -> nn.Module:
    return nn.Sequential(*mlp(16, 32, 32), Then(lambda x: x.detach()), nn.ReLU(), nn.Linear(32, 4))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("make", [lambda: mlp(16, 32, 32, 4), Shifted])
@pytest.mark.parametrize("settings", [{}, {"every": 4}, {"sites": ["parameter_grad"]}, {"sites": ["*_grad"]}])
def test_gradients_that_were_cleared_by_hand_were_there(
    make: Callable[[], nn.Module], settings: dict[str, Any], tmp_path: Path
) -> None:
    assert "no_gradient" not in found_in(by_hand(make()), tmp_path, **settings)


@pytest.mark.parametrize("cleared", [True, False])
def test_a_cut_is_found_by_hand_too(cleared: bool, tmp_path: Path) -> None:
    found = found_in(by_hand(detached(), cleared=cleared), tmp_path)["no_gradient"]
    assert (found.severity, found.module, found.step) == ("warning", "2", 0)


def test_a_cut_is_found_where_only_gradients_of_parameters_are_recorded(tmp_path: Path) -> None:
    found = found_in(by_hand(detached(), cleared=False), tmp_path, sites=["parameter_grad"])["no_gradient"]
    assert found.module == "2"


def test_an_optimizer_that_comes_later_tells_what_has_no_gradient(tmp_path: Path) -> None:
    class Within(nn.Module):
        """The gradient reaches its output, and not its weight."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(32))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.detach()

    model = nn.Sequential(*mlp(16, 32), Within(), nn.Linear(32, 4))
    hand, training = by_hand(model), supervised(model, vectors(), optimizer=sgd(model))
    mixed = Training(model, lambda number: (hand if number < 8 else training).step(number))
    found = found_in(mixed, tmp_path)["no_gradient"]
    assert (found.module, found.tensor) == (f"{len(model) - 2}", "weight")

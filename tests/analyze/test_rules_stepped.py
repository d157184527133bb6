"""`never_stepped` speaks where nothing trains the parameters, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo_broken_more_helpers import never_stepped
from zoo_helpers import Training, mlp, record, sgd, supervised, vectors

import statsbridge
from statsbridge.analyze.diagnosis import diagnose

STEPS = 60


def said(training: Training, folder: Path, **settings: Any) -> list[str]:
    torch.manual_seed(0)
    run = record(training, folder, **{"steps": STEPS, **settings})
    return [finding.kind for finding in diagnose(statsbridge.load(run))]


def a_step(model: nn.Module, after: Callable[[int], None], *, every: int = 1) -> Training:
    """`after` is called with the number of each step, once its gradients are there; they are cleared each `every`."""
    batches = vectors()

    def step(number: int) -> dict[str, Tensor]:
        inputs, targets = next(batches)
        loss = functional.cross_entropy(model(inputs), targets)
        if number % every == 0:
            model.zero_grad()
        loss.backward()
        after(number)
        return {"loss": loss}

    return Training(model, step)


def by_hand() -> Training:
    """No optimizer at all."""
    model = mlp(16, 32, 4)

    def move(number: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    return a_step(model, move)


def micro_batches() -> Training:
    """run.step() for each of sixteen micro-batches, the optimizer after them."""
    model = mlp(16, 32, 4)
    optimizer = sgd(model, 0.01)
    return a_step(model, lambda number: optimizer.step() if number % 16 == 15 else None, every=16)


def seldom_steps() -> Training:
    """A generator that steps after five steps of a critic, which is not recorded."""
    model = mlp(16, 32, 4)
    optimizer = sgd(model)
    return a_step(model, lambda number: optimizer.step() if number % 5 == 4 else None)


def warm_up_from_0() -> Training:
    model = mlp(16, 32, 4)
    return supervised(
        model,
        vectors(),
        optimizer=sgd(model),
        scheduler=lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda step: min(step / 30, 1.0)),
    )


def all_at_rate_0() -> Training:
    model = mlp(16, 32, 4)
    return supervised(model, vectors(), optimizer=sgd(model, 0.0))


def frozen_backbone() -> Training:
    model = mlp(16, 32, 32, 4)
    model[0].requires_grad_(False)
    return supervised(model, vectors(), optimizer=torch.optim.Adam(model[4].parameters(), lr=1e-3))


def only_evaluated() -> Training:
    model, batches = mlp(16, 32, 4).eval(), vectors()

    def step(number: int) -> dict[str, Tensor]:
        inputs, targets = next(batches)
        with torch.no_grad():
            return {"val/loss": functional.cross_entropy(model(inputs), targets)}

    return Training(model, step)


OTHERS = (
    by_hand, micro_batches, seldom_steps, warm_up_from_0, all_at_rate_0, frozen_backbone, only_evaluated,
)  # fmt: skip


@pytest.mark.parametrize("make", OTHERS)
def test_it_is_silent_where_something_steps_or_nothing_is_trained(make: Callable[[], Training], tmp_path: Path) -> None:
    assert "never_stepped" not in said(make(), tmp_path)


@pytest.mark.parametrize("settings", [{}, {"every": 10, "steps": 250}, {"sites": ["parameter", "parameter_grad"]}])
def test_it_speaks_however_the_steps_are_sampled(settings: dict[str, Any], tmp_path: Path) -> None:
    assert said(never_stepped(), tmp_path, **settings)[0] == "never_stepped"


def test_it_waits_for_twenty_samples_and_needs_the_parameters(tmp_path: Path) -> None:
    assert "never_stepped" not in said(never_stepped(), tmp_path, steps=19)
    assert "never_stepped" in said(never_stepped(), tmp_path, steps=20)
    assert "never_stepped" not in said(never_stepped(), tmp_path, sites=["activation", "parameter_grad"])


def test_a_training_whose_optimizer_steps_later_is_silent_from_there_on(tmp_path: Path) -> None:
    model = mlp(16, 32, 4)
    optimizer = sgd(model)
    training = a_step(model, lambda number: optimizer.step() if number >= 12 else None)
    assert "never_stepped" not in said(training, tmp_path)

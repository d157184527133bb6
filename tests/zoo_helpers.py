"""Small trainings: healthy ones of many kinds, and ones with a single planted fault each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import statsbridge

STEPS = 24


@dataclass(frozen=True)
class Training:
    """What is trained and how: `step` computes the losses of one batch, by name; `loss` is the one that counts."""

    model: nn.Module | dict[str, nn.Module]
    step: Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Broken:
    """`make`: the training. `kind`, `module`: what the top finding must say. `settings`: for `init`.

    `good`: the training that it is judged by, where it is.
    """

    make: Callable[[], Training]
    kind: str
    module: str | None
    steps: int = STEPS
    settings: dict[str, Any] = field(default_factory=dict)
    thresholds: dict[str, float] = field(default_factory=dict)
    severities: tuple[str, ...] = ("warning", "critical")
    good: Callable[[], Training] | None = None


class Then(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def record(training: Training, folder: Path, *, steps: int = STEPS, every: int = 1, **settings: Any) -> Path:
    """Train, and record; the run's folder. What the live watch says is not of interest here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", statsbridge.StatsBridgeWarning)
        run = statsbridge.init(training.model, every=every, dir=folder, **settings)
        for number in range(steps):
            run.step(**training.step(number))
        run.finish()
    assert run.path is not None
    return run.path


def supervised(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
    optimizer: torch.optim.Optimizer | None = None,
    zero: bool = True,
    clip: float | None = None,
    before: Callable[[int], None] | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> Training:
    """The usual loop. `before`: called with the number of each step, before it."""
    chosen = optimizer or torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = scheduler(chosen) if scheduler else None
    source = iter(batches)

    def step(number: int) -> dict[str, Any]:
        if before:
            before(number)
        inputs, targets = next(source)
        value = loss(model(inputs), targets)
        if zero:
            chosen.zero_grad()
        value.backward()
        norm = {} if clip is None else {"grad_norm": nn.utils.clip_grad_norm_(model.parameters(), clip)}
        chosen.step()
        if schedule is not None:
            schedule.step()
        return {"loss": value, **norm}

    return Training(model, step)


# ---------------------------------------------------------------------- data


def vectors(size: int = 16, classes: int = 4, batch: int = 64, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Gaussian inputs whose class is that of the largest of a few fixed linear functions of them."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(size, classes, generator=generator)
    while True:
        inputs = torch.randn(batch, size, generator=generator)
        yield inputs, (inputs @ truth).argmax(1)


def same_batch(batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    batch = next(batches)
    while True:
        yield batch


def regression(size: int = 16, batch: int = 64, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(size, 1, generator=generator) / size**0.5
    while True:
        inputs = torch.randn(batch, size, generator=generator)
        yield inputs, torch.sin(inputs @ truth) + 0.05 * torch.randn(batch, 1, generator=generator)


def images(batch: int = 16, classes: int = 4, side: int = 12, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Noise with a bright quarter; the class says which."""
    generator = torch.Generator().manual_seed(seed)
    half = side // 2
    while True:
        targets = torch.randint(0, classes, (batch,), generator=generator)
        inputs = 0.5 * torch.randn(batch, 1, side, side, generator=generator)
        for row, target in enumerate(targets.tolist()):
            top, left = half * (target // 2), half * (target % 2)
            inputs[row, :, top : top + half, left : left + half] += 1.5
        yield inputs, targets


def sequences(batch: int = 16, length: int = 12, words: int = 11, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Counting by a step of one's own, modulo the vocabulary: the next word follows from the two before."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(0, words, (batch, 1), generator=generator)
        stride = torch.randint(1, 4, (batch, 1), generator=generator)
        text = (start + stride * torch.arange(length + 1)) % words
        yield text[:, :-1], text[:, 1:]


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths[:-1]):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))

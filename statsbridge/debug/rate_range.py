"""The learning-rate range test: one short training whose rate grows with every step (Smith 2015, arXiv:1506.01186)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..errors import ConfigError
from ..wording import counted
from .batches import Loss, checked_loader, device_of, fresh, loss_value, with_gradients
from .optimizers import OptimizerChoice, checked_optimizer, make_optimizer, optimizers_in, trainable
from .preserving import preserved
from .progress import progress
from .ranks import shared
from .rate_curve import RateCurve, Sweep, read_curve
from .result import Number, Result

if TYPE_CHECKING:
    import plotly.graph_objects as go

Scale = Literal["exponential", "linear"]

_NAME = "learning_rate_range_test"
_SETTLED = 5  # losses that say what is usual at the start


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRangeResult(Result):
    """What the sweep shows.

    `table`: `rate`; `loss` of the batch before the step at that rate; `untrained`, the loss of the model as it is for
    the same batch; `smoothed`, the running mean over 5 of what the loss is above or below that, about its median.

    `numbers["suggested_by_steepest"]` is the rate at which the loss fell fastest, `numbers["suggested_by_minimum"]` a
    tenth of that at which it was lowest; None where the curve does not show them.
    """

    scale: Scale

    def figure(self) -> go.Figure:
        """Loss by learning rate with the suggestions. Raises ConfigError where plotly is not installed."""
        from ..view.figures_debug import rate_range_figure, title_of_test

        marks = {
            "falls fastest": _number(self.numbers["suggested_by_steepest"]),
            "lowest": _number(self.numbers["rate_of_lowest_loss"]),
            "a tenth of it": _number(self.numbers["suggested_by_minimum"]),
        }
        title = title_of_test(self.name, self.passed)
        return rate_range_figure(title, self.table, marks, logarithmic=self.scale == "exponential")


def learning_rate_range_test(
    model: nn.Module,
    loss: Loss,
    loader: Iterable[Any],
    *,
    optimizer: OptimizerChoice = None,
    lowest: float = 1e-7,
    highest: float = 10.0,
    steps: int = 100,
    scale: Scale = "exponential",
) -> RateRangeResult:
    """Train for some steps while the learning rate grows from `lowest` to `highest`; then put all back.

    It stops where the loss is not finite any more or has risen far above its start. Each loss is compared with that
    of the untrained model for the same batch, so that easy batches are not taken for learning; a rate is suggested
    only where the loss falls by more than what noise is left would.

    Args:
        model: the model, trained in training mode; afterwards it is as it was, to the bit.
        loss: a callable `loss(model, batch)`, or a criterion for batches of two, as in `overfit_one_batch`.
        loader: a DataLoader or another iterable of batches; gone through again where it is too short.
        optimizer: the one that is going to train, whose groups keep the ratio of their rates; or a callable that
            makes one from a list of parameters; Adam where None. What is suggested holds for this optimizer alone.
        lowest: the first learning rate.
        highest: the last one.
        steps: how many steps, of which each has its own rate.
        scale: whether the rate grows by a constant factor (`"exponential"`) or amount (`"linear"`).

    Raises ConfigError where an argument is wrong. What model and loss raise passes through; all is put back first.
    """
    _check(lowest, highest, steps, scale)
    checked_optimizer(optimizer)
    trainable(model)
    checked_loader(loader)
    space = np.geomspace if scale == "exponential" else np.linspace
    rates = space(lowest, highest, steps)
    # Of other loaders than torch's what is in them is kept: a list holds its batches itself.
    also = [loss, loader] if isinstance(loader, DataLoader) else [loss]
    with preserved(model, also=also):
        untrained = _untrained(model, loss, loader, steps)
    with preserved(model, *optimizers_in(optimizer), also=also):  # with the same chance, and so the same batches
        chosen = make_optimizer(optimizer, model)
        losses = _sweep(model, loss, loader, chosen, rates.tolist(), untrained)
        kind = type(chosen).__name__
    done = len(losses)
    sweep = Sweep(rates=rates[:done], losses=np.array(losses), untrained=np.array(untrained[:done]))
    curve = read_curve(sweep, logarithmic=scale == "exponential")
    return _judged(sweep, curve, scale, kind, complete=done == steps)


def _check(lowest: float, highest: float, steps: int, scale: str) -> None:
    if scale not in ("exponential", "linear"):
        raise ConfigError(f"scale={scale!r}: give 'exponential' or 'linear'")
    if not 0 < lowest < highest < math.inf:
        raise ConfigError(f"lowest={lowest}, highest={highest}: give two learning rates, 0 < lowest < highest")
    if steps < 20:
        raise ConfigError(f"steps={steps}: give at least 20, or the curve says nothing")


def _untrained(model: nn.Module, loss: Loss, loader: Iterable[Any], count: int) -> list[float]:
    """The losses of the model as it is, for the batches of the sweep."""
    device = device_of(model)
    model.train()
    with with_gradients():  # a loss may take gradients of its own
        batches = progress(itertools.islice(_endless(loader), count), f"{_NAME}, untrained", count)
        return [shared(float(loss_value(model, loss, fresh(batch, device)).detach()), model) for batch in batches]


def _sweep(
    model: nn.Module,
    loss: Loss,
    loader: Iterable[Any],
    optimizer: Optimizer,
    rates: list[float],
    untrained: list[float],
) -> list[float]:
    """The loss before each step; it ends early where the loss has become not finite or too large."""
    device = device_of(model)
    set_rate = _rate_setter(optimizer)
    losses: list[float] = []
    gains: list[float] = []
    model.train()
    with with_gradients():
        batches = progress(zip(rates, untrained, _endless(loader), strict=False), _NAME, len(rates))
        for rate, before, batch in batches:
            value = loss_value(model, loss, fresh(batch, device))
            losses.append(shared(float(value.detach()), model))
            gains.append(losses[-1] - before)
            if not value.requires_grad or _diverged(gains, abs(untrained[0])):
                break
            model.zero_grad(set_to_none=True)
            value.backward()  # type: ignore[no-untyped-call]
            set_rate(rate)
            optimizer.step()
    return losses


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    for epoch in itertools.count():
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            said = "gives no batch" if epoch == 0 else "gave batches once only"
            raise ConfigError(f"the loader {said}: give a DataLoader, or a list of batches")


def _rate_setter(optimizer: Optimizer) -> Any:
    """A function that sets the rate of the group with the largest one, the others in proportion."""
    before = [float(group["lr"]) for group in optimizer.param_groups]
    largest = max(before)
    shares = [one / largest if largest > 0 else 1.0 for one in before]

    def set_rate(rate: float) -> None:
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share

    return set_rate


def _diverged(gains: list[float], scale: float) -> bool:
    """Whether the last losses lie above the untrained model's by three times what was gained, and by more than noise.

    `gains`: loss minus that of the untrained model. `scale`: how large a loss is.
    """
    if not math.isfinite(gains[-1]):
        return True
    if len(gains) < 2 * _SETTLED:
        return False
    values = np.array(gains)
    gained = -float(np.convolve(values, np.full(3, 1 / 3), mode="valid").min())
    spread = float(np.std(values[:-3][: 3 * _SETTLED]))
    return float(np.median(values[-3:])) > max(3 * gained, 6 * spread, scale)


# ------------------------------------------------------------------ what it means


def _judged(sweep: Sweep, curve: RateCurve, scale: Scale, kind: str, *, complete: bool) -> RateRangeResult:
    rates, losses = sweep.rates.tolist(), sweep.losses.tolist()
    steepest = None if curve.steepest is None else rates[curve.steepest]
    lowest = None if curve.lowest is None else rates[curve.lowest]
    numbers: dict[str, Number] = {
        "suggested_by_steepest": steepest,
        "suggested_by_minimum": lowest / 10 if lowest is not None and curve.rises else None,
        "rate_of_lowest_loss": lowest,
        "stopped_at": None if complete and math.isfinite(losses[-1]) else rates[-1],
        "start": curve.start,
        "fall": curve.fall,
        "noise": curve.noise,
        "fall_told_from_noise": curve.needed,
        "optimizer": kind,
    }
    passed: bool | None = True
    if not curve.falls:
        passed, explanation = _without_fall(rates, losses, curve)
    else:
        explanation = _with_fall(steepest, lowest, curve, kind)
    smoothed = [value if math.isfinite(value) else None for value in curve.smoothed.tolist()]
    return RateRangeResult(
        name=_NAME,
        passed=passed,
        numbers=numbers,
        explanation=explanation,
        table={"rate": rates, "loss": losses, "untrained": sweep.untrained.tolist(), "smoothed": smoothed},
        scale=scale,
    )


def _with_fall(steepest: float | None, lowest: float | None, curve: RateCurve, kind: str) -> str:
    assert lowest is not None
    said = f"With {kind} the loss is lowest ({curve.start - curve.fall:.4g}) at a rate of {lowest:.3g}"
    if steepest is not None:
        said += f" and falls fastest at {steepest:.3g}"
    if curve.rises:
        said += (
            f". Begin with {lowest / 10:.2g} (a tenth of the first), or {steepest:.2g} where a schedule lowers it soon."
            if steepest is not None
            else f". Begin with {lowest / 10:.2g}."
        )
    else:
        said += ". It has not risen again: give a larger highest rate to see where it does."
    return said + " It holds for this optimizer, batch size and model as they are now."


def _without_fall(rates: list[float], losses: list[float], curve: RateCurve) -> tuple[bool | None, str]:
    """Why no rate is suggested; undecided where the curve could not have shown a fall that is there."""
    if not math.isfinite(losses[0]):
        return (
            False,
            f"The loss is {losses[0]} before the first step: no learning rate helps. Look at the data and the weights "
            "first.",
        )
    if len(losses) == 1:
        return False, "The loss has no gradient: it depends on no trainable parameter. overfit_one_batch says more."
    if curve.rises and len(losses) < 20:
        return None, (
            f"No rate is suggested: the loss diverged within {counted(len(losses), 'step')}, at a rate of "
            f"{rates[-1]:.3g}. Give a lower lowest rate."
        )
    if curve.needed > 0.1 * abs(curve.start):
        return None, (
            f"No rate is suggested: the losses differ by {curve.noise:.3g} (standard deviation) from batch to batch. A "
            f"fall of less than {curve.needed:.3g} cannot be told from that noise, and there is no larger one. "
            "Give larger batches or more steps."
        )
    return False, (
        f"No rate is suggested: at no rate did the loss fall by more than {curve.needed:.3g} below its start of "
        f"{curve.start:.4g}. Look for gradients that do not arrive (overfit_one_batch says where), "
        "or give a wider range of rates."
    )


def _number(value: Number) -> float | None:
    return value if isinstance(value, float) else None

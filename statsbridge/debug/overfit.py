"""Can the model learn one batch by heart? What cannot do that will learn nothing from more of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..wording import counted
from .batches import Loss, device_of, fresh, given_batch, loss_value, with_gradients, without_dropout
from .optimizers import OptimizerChoice, checked_optimizer, held_by, make_optimizer, optimizers_in, trainable
from .preserving import preserved
from .progress import progress
from .ranks import shared
from .result import Number, Result, named

if TYPE_CHECKING:
    import plotly.graph_objects as go

#: Adam's usual rate, then one for models that need more and one for those that need less.
_RATES = (1e-3, 1e-2, 1e-4)
_NOISY = 0.05  # of the last loss


@dataclass(frozen=True, slots=True, kw_only=True)
class OverfitResult(Result):
    """Whether one batch could be learnt. `table`: `step` and `loss`, the loss before each step and after the last."""

    def figure(self) -> go.Figure:
        """The loss by step. Raises ConfigError where plotly is not installed."""
        from ..view.figures_debug import losses_figure, title_of_test

        threshold = self.numbers["threshold"]
        assert isinstance(threshold, (int, float))
        return losses_figure(title_of_test(self.name, self.passed), _floats(self.table["loss"]), float(threshold))


@dataclass(slots=True)
class _Attempt:
    """One training on the batch, and what was seen of its gradients at the first step."""

    rate: float | None
    losses: list[float] = field(default_factory=list)
    detached: bool = False  # the loss has no graph
    unreached: list[str] = field(default_factory=list)  # trainable parameters without a gradient
    unheld: list[str] = field(default_factory=list)  # those that the optimizer does not hold
    all_zero: bool = False  # every gradient was exactly zero


def overfit_one_batch(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    optimizer: OptimizerChoice = None,
    steps: int = 200,
    threshold: float = 0.1,
) -> OverfitResult:
    """Train on one batch alone until its loss is below `threshold`, for at most `steps` steps; then put all back.

    The model is in training mode, its dropout modules in evaluation mode.

    Args:
        model: the model; afterwards it is as it was, to the bit.
        loss: a callable `loss(model, batch)` that returns one number; or a criterion, for a batch of two: an
            `nn.Module` or a function of `torch.nn.functional`, called as `loss(model(inputs), targets)`.
        batch: tensors in any structure; of a DataLoader its first batch is taken.
        optimizer: the one to use, with its own learning rate; or a callable that makes one from a list of parameters.
            Where None: Adam, with the learning rates 1e-3, 1e-2 and 1e-4 one after the other, until one is enough.
        steps: the most steps, for each learning rate.
        threshold: the loss to come below, in units of the loss. 0.1 suits a cross-entropy in nats.

    Raises ConfigError where an argument is wrong. What model and loss raise passes through; all is put back first.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps}: give at least 1")
    if not math.isfinite(threshold):
        raise ConfigError(f"threshold={threshold}: give a finite loss")
    checked_optimizer(optimizer)
    trainable(model)
    batch = given_batch(batch)
    choices: list[tuple[float | None, OptimizerChoice]] = [(None, optimizer)]
    if optimizer is None:
        choices = [(rate, partial(torch.optim.Adam, lr=rate)) for rate in _RATES]
    attempts: list[_Attempt] = []
    for rate, choice in choices:
        label = "overfit_one_batch" if rate is None else f"overfit_one_batch, Adam at {rate:g}"
        with preserved(model, *optimizers_in(choice), also=[loss, batch]):
            attempts.append(_train(model, loss, batch, choice, _Attempt(rate), steps, threshold, label))
        if attempts[-1].losses[-1] < threshold or attempts[-1].detached:
            break
    best = min(attempts, key=lambda attempt: _ranked(attempt.losses[-1]))
    noise = None if best.losses[-1] < threshold else _noise(model, loss, batch)
    return _judged(best, len(attempts), threshold, noise)


def _train(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    choice: OptimizerChoice,
    attempt: _Attempt,
    steps: int,
    threshold: float,
    label: str,
) -> _Attempt:
    """Step until the loss is low enough, not finite, or the steps are over."""
    device = device_of(model)
    optimizer = make_optimizer(choice, model)
    parameters = trainable(model)
    attempt.unheld = [name for name, one in parameters.items() if id(one) not in held_by(optimizer)]
    attempt.rate = attempt.rate or _rate(optimizer)
    with without_dropout(model), with_gradients():
        for step in progress(range(steps + 1), label, steps):
            value = loss_value(model, loss, fresh(batch, device))
            attempt.losses.append(shared(float(value.detach()), model))
            attempt.detached = not value.requires_grad
            over = attempt.losses[-1] < threshold or not math.isfinite(attempt.losses[-1])
            if (over and step > 0) or attempt.detached or step == steps:
                break
            model.zero_grad(set_to_none=True)
            value.backward()  # type: ignore[no-untyped-call]
            if step == 0:
                gradients = {name: one.grad for name, one in parameters.items()}
                attempt.unreached = [name for name, gradient in gradients.items() if gradient is None]
                attempt.all_zero = not any(bool(one.any()) for one in gradients.values() if one is not None)
            if not math.isfinite(attempt.losses[-1]):
                break
            optimizer.step()
    return attempt


def _noise(model: nn.Module, loss: Loss, batch: Any) -> float:
    """How far losses with the same weights lie apart: the model's or the loss's own randomness."""
    with preserved(model, also=[loss, batch]), without_dropout(model), with_gradients():
        losses = [float(loss_value(model, loss, fresh(batch, device_of(model))).detach()) for _ in range(4)]
    return max(losses) - min(losses)


def _rate(optimizer: Optimizer) -> float | None:
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def _ranked(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _floats(values: Sequence[Number]) -> list[float | None]:
    return [None if value is None else float(value) for value in values]


# ------------------------------------------------------------------ what it means


def _judged(attempt: _Attempt, attempts: int, threshold: float, noise: float | None) -> OverfitResult:
    losses = attempt.losses
    first, last = losses[0], losses[-1]
    finite = list(filter(math.isfinite, losses))
    numbers: dict[str, Number] = {
        "first_loss": first,
        "last_loss": last,
        "lowest_loss": min(finite) if finite else None,
        "threshold": threshold,
        "steps": len(losses) - 1,
        "learning_rate": attempt.rate,
        "noise": noise,
    }
    passed: bool | None = last < threshold
    if first < threshold and not attempt.detached and passed:
        passed = None
        explanation = (
            f"The loss was below {threshold:g} before the first step ({first:.4g}), so this says nothing. Give a "
            "threshold well below the loss at the start."
        )
    elif passed:
        explanation = f"The batch was learnt by heart in {counted(len(losses) - 1, 'step')}{_at(attempt)}."
    else:
        explanation = next(_reasons(attempt, threshold, noise)) + _others(attempts)
    if attempt.unreached and not attempt.detached:
        explanation += (
            f"\nNo gradient reaches {named(attempt.unreached)}: not used in the forward pass, or cut off by detach(), "
            "no_grad() or a call of .data, .item() or numpy."
        )
    table: dict[str, list[Number]] = {"step": list(range(len(losses))), "loss": list(losses)}
    return OverfitResult(name="overfit_one_batch", passed=passed, numbers=numbers, explanation=explanation, table=table)


def _reasons(attempt: _Attempt, threshold: float, noise: float | None) -> Iterator[str]:
    """Why the batch was not learnt, the surest sign first."""
    losses = attempt.losses
    first, last, steps = losses[0], losses[-1], counted(len(losses) - 1, "step")
    if not math.isfinite(last):
        yield _nonfinite_reason(attempt)
    if attempt.detached:
        yield (
            "The loss has no gradient: it does not depend on a trainable parameter. Look for detach(), no_grad(), "
            ".item(), argmax or numpy between model and loss, and for a loss that uses another model than the one "
            "it is given."
        )
    if attempt.unheld and len(set(losses)) == 1:
        yield (
            f"The loss did not change in {steps}, and the optimizer does not hold {named(attempt.unheld)}: make "
            "it from this model's parameters, after the last change of the model."
        )
    if attempt.all_zero:
        yield (
            "Every gradient is exactly zero. Look for dead units (all inputs of a ReLU negative), a saturated sigmoid "
            "or softmax, weights that are all zero, or a loss of rounded outputs."
        )
    if noise is not None and noise > _NOISY * abs(last):
        yield (
            f"Losses with the same weights differ by {noise:.3g}: model or loss are random beyond the dropout modules, "
            f"so that a fall from {first:.4g} to {last:.4g} says little. Turn off noise, functional dropout, random "
            "augmentation and a shuffling of the targets."
        )
    if last >= first - 0.01 * abs(first):
        yield (
            f"The loss did not fall in {steps} ({first:.4g} to {last:.4g}){_at(attempt)}. Look at a wrong sign or axis "
            "of the loss, targets that do not belong to their inputs (or are shuffled anew inside the loss), "
            "inputs that are all alike, and the learning rate."
        )
    yield (
        f"The loss fell from {first:.4g} to {last:.4g} in {steps}{_at(attempt)}, not below {threshold:g}. Give "
        "more steps or another learning rate first. If it stays: a model too small for the batch, equal inputs with "
        "different targets, a softmax applied twice, or a loss whose lowest value is above 0 (label smoothing, soft "
        "targets, a penalty on the weights), which needs a higher threshold."
    )


def _nonfinite_reason(attempt: _Attempt) -> str:
    losses = attempt.losses
    if len(losses) == 1:
        return (
            f"The loss is {losses[0]} before the first step. Look for NaN in the batch or the weights, log(0), a "
            "division by zero, or values beyond float16."
        )
    return (
        f"The loss became {losses[-1]} at step {len(losses) - 1}{_at(attempt)}: the learning rate is too large, or "
        "log, sqrt or a division is given 0. Try a tenth of the rate; look at the data for extreme values."
    )


def _at(attempt: _Attempt) -> str:
    return "" if attempt.rate is None else f" at a learning rate of {attempt.rate:g}"


def _others(attempts: int) -> str:
    return f" Of {attempts} learning rates tried this one came closest." if attempts > 1 else ""

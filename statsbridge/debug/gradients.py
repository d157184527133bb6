"""Is the gradient the derivative of the loss? Autograd against central differences, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..errors import ConfigError
from ..wording import counted
from .batches import Loss, device_of, fresh, given_batch, loss_value, with_gradients
from .derivative import RIGHT, WRONG, Comparison, compare
from .exact import Exact, float64_by_default
from .optimizers import trainable
from .preserving import preserved
from .progress import progress
from .result import Number, Result, named

if TYPE_CHECKING:
    import plotly.graph_objects as go

_NAME = "gradient_check"
_SMALLEST = 1e-2  # the unit of a parameter that is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientResult(Result):
    """Which gradients are right.

    `table`: one row a check: `parameter`, `kind` (`coordinate` or `direction`), `index` (of a complex parameter the
    last number says the real part, 0, or the imaginary, 1), `autograd`, `numeric`, `difference`, `verdict` and `reason`
    (see `statsbridge.debug.derivative.Comparison`). `wrong`: the names of the
    parameters whose gradient is wrong, in the order of the model.
    """

    wrong: tuple[str, ...] = ()

    def figure(self) -> go.Figure:
        """The relative difference of each check. Raises ConfigError where plotly is not installed."""
        from ..view.figures_debug import gradients_figure, title_of_test

        table: Any = self.table
        columns = (table["parameter"], table["difference"], table["verdict"])
        return gradients_figure(title_of_test(self.name, self.passed), *columns, limits=(RIGHT, WRONG))


@dataclass(frozen=True, slots=True)
class _Check:
    parameter: str
    kind: str
    index: str
    found: Comparison


def gradient_check(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    coordinates: int = 2,
    directions: int = 1,
    seed: int = 0,
) -> GradientResult:
    """Hold the gradient of every trainable parameter against central differences of the loss.

    A float64 copy of the model is measured, in the mode in which the model is, with the same random numbers and the
    same buffers at every evaluation, so that dropout and running statistics do not disturb. A derivative is right where
    the relative difference is below 1e-5, wrong where it is above 1e-3 and two step sizes agree on it. At a kink (a
    ReLU whose input is 0), and where the loss is rounded (float32 inside the model), it stays undecided.

    Args:
        model: the model; it is only copied. The loss has to use the model that it is given.
        loss: a callable `loss(model, batch)`, or a criterion for a batch of two, as in `overfit_one_batch`.
        batch: tensors in any structure; of a DataLoader its first batch is taken. A small one will do.
        coordinates: how many single elements of each parameter, every other one with a gradient that is not 0.
        directions: how many random directions of each parameter.
        seed: of the random choices.

    Raises ConfigError where an argument is wrong. What model and loss raise passes through; all is put back first.
    """
    if coordinates < 0 or directions < 0 or coordinates + directions < 1:
        raise ConfigError(f"coordinates={coordinates}, directions={directions}: give at least one of either")
    trainable(model)
    batch = given_batch(batch)
    with preserved(model, also=[loss, batch]):
        try:
            with float64_by_default():
                exact = Exact(model, loss, batch)
                autograd = exact.gradients()
                middle = exact.value()
        except Exception as error:
            with with_gradients():  # what is no fault of float64 is raised here too, and passes through
                loss_value(model, loss, fresh(batch, device_of(model)))
            return _not_in_float64(error)
        with float64_by_default():
            checks = list(_checks(exact, autograd, middle, coordinates, directions, seed))
    return _judged(checks, autograd, middle)


def _checks(
    exact: Exact,
    gradients: dict[str, torch.Tensor | None],
    middle: float,
    coordinates: int,
    directions: int,
    seed: int,
) -> Iterator[_Check]:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in progress(exact.parameters.items(), _NAME, len(exact.parameters)):
        if parameter.numel() == 0:
            continue
        values = _as_real(parameter.detach().clone())
        found_gradient = gradients[name]
        gradient = torch.zeros_like(values) if found_gradient is None else _as_real(found_gradient)
        for place in _places(gradient, coordinates, generator):
            # In the order of `reshape`, whatever order the parameter has in memory (channels_last, transposed).
            direction = torch.zeros_like(values, memory_format=torch.contiguous_format)
            direction.view(-1)[place] = 1.0
            size = max(abs(float(values.reshape(-1)[place])), float(values.square().mean().sqrt()), _SMALLEST)
            with exact.moving(name, direction) as at:
                found = compare(float(gradient.reshape(-1)[place]), at, middle, size)
            index = ", ".join(map(str, np.unravel_index(place, tuple(values.shape)))) if values.dim() else ""
            yield _Check(name, "coordinate", index, found)
        for _ in range(directions):
            direction = torch.randn(values.shape, generator=generator, dtype=torch.float64).to(values.device)
            direction /= direction.norm()
            size = max(float(values.norm()), _SMALLEST * math.sqrt(values.numel()))
            with exact.moving(name, direction) as at:
                found = compare(float((gradient * direction).sum()), at, middle, size)
            yield _Check(name, "direction", "", found)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Of complex numbers the real and imaginary parts, in a last axis: so torch has the gradient of a real loss."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _places(gradient: torch.Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Random elements, each once; every other one where the gradient is not 0, as far as there are such."""
    # Kept as a tensor: a list of the elements of a large embedding takes gigabytes.
    moved = gradient.reshape(-1).nonzero().reshape(-1)
    chosen: list[int] = []
    for number in range(min(count, gradient.numel())):
        among = moved[~torch.isin(moved, moved.new_tensor(chosen))] if number % 2 == 0 else moved[:0]
        size = len(among) or gradient.numel()
        drawn = int(torch.randint(size, (1,), generator=generator))
        place = int(among[drawn]) if len(among) else drawn
        while place in chosen:
            place = (place + 1) % gradient.numel()
        chosen.append(place)
    return chosen


# ------------------------------------------------------------------ what it means


def _judged(checks: list[_Check], gradients: dict[str, torch.Tensor | None], middle: float) -> GradientResult:
    by_verdict = {
        verdict: [check for check in checks if check.found.verdict == verdict]
        for verdict in ("right", "wrong", "undecided")
    }
    wrong = tuple(dict.fromkeys(check.parameter for check in by_verdict["wrong"]))
    agreeing = [check.found.difference for check in by_verdict["right"] if check.found.difference is not None]
    worst = max(by_verdict["wrong"], key=lambda check: check.found.difference or 0.0, default=None)
    numbers: dict[str, Number] = {
        "parameters": len(gradients),
        "checks": len(checks),
        "right": len(by_verdict["right"]),
        "wrong": len(by_verdict["wrong"]),
        "undecided": len(by_verdict["undecided"]),
        "largest_right_difference": max(agreeing, default=None),
        "largest_wrong_difference": None if worst is None else worst.found.difference,
        "loss": middle,
    }
    passed: bool | None = None
    if wrong:
        passed = False
        explanation = _wrong(wrong, gradients, worst)
    elif not math.isfinite(middle):
        explanation = f"The loss is {middle}: it has no gradient to check. Look at the data and the weights first."
    elif all(check.found.autograd == check.found.numeric == 0 for check in checks):
        explanation = (
            "Every gradient is 0 or missing, and the loss does not change either. Does the loss use the model that it "
            "is given? It is a copy: a loss that uses another one sees none of the changes."
        )
    elif len([check for check in by_verdict["undecided"] if check.found.reason != "rounding"]) > len(checks) // 2:
        explanation = f"Most derivatives could not be judged.{_undecided(by_verdict['undecided'])}"
    else:
        passed = True
        explanation = (
            f"Autograd agrees with central differences in {len(by_verdict['right'])} of "
            f"{counted(len(checks), 'derivative')} of {counted(len(gradients), 'parameter')}."
            f"{_undecided(by_verdict['undecided'])}"
        )
    return GradientResult(
        name=_NAME, passed=passed, numbers=numbers, explanation=explanation, table=_table(checks), wrong=wrong
    )


def _wrong(wrong: tuple[str, ...], gradients: dict[str, torch.Tensor | None], worst: _Check | None) -> str:
    assert worst is not None
    broken = [name for name in wrong if (gradient := gradients[name]) is not None and not gradient.isfinite().all()]
    if broken:
        others = [name for name in wrong if name not in broken]
        return (
            f"The gradient of {named(broken)} is not finite, though the loss is: one step with it spoils the weights. "
            f"The fault lies between the last of them, {broken[-1]}, and the loss: look for log, sqrt, a norm, a power "
            "or a division at 0, also in the branch that torch.where does not take."
        ) + (f" The gradient of {named(others)} is not the derivative of the loss either." if others else "")
    missing = [name for name in wrong if gradients[name] is None]
    said = (
        f"The gradient of {named(wrong)} is not the derivative of the loss: {worst.parameter}"
        f"{f'[{worst.index}]' if worst.index else ''} has {worst.found.autograd:.6g}, central differences say "
        f"{worst.found.numeric:.6g}."
    )
    if missing:
        said += (
            f" No gradient arrives at {named(missing)} at all, though the loss depends on it: look for detach(), "
            ".data, no_grad() or numpy on its way."
        )
    else:
        said += (
            f" The fault lies between the last of them, {wrong[-1]}, and the loss: look at the backward of the custom "
            "functions there (a weight not transposed, a missing factor or sum), and at gradients changed by hooks."
        )
    return said + " Where it is meant (a straight-through estimator, a stopped or reversed gradient), all is well."


def _undecided(checks: list[_Check]) -> str:
    if not checks:
        return ""
    meanings = {
        "kink": "at a kink (a ReLU or maximum exactly where it bends)",
        "rounding": "smaller than what the loss is rounded to",
        "flat": "a loss that changes in jumps (rounding, or low precision inside the model)",
        "unstable": "another value at each step size (kinks all around, or float32 inside the model)",
        "small": "off by between 1e-5 and 1e-3, which is no clear fault",
        "not finite": "not finite beside the point",
    }
    reasons = [check.found.reason for check in checks]
    parts = [f"{reasons.count(reason)} {meanings[reason]}" for reason in dict.fromkeys(reasons)]
    return f" Undecided: {'; '.join(parts)}."


def _table(checks: list[_Check]) -> dict[str, list[Number]]:
    return {
        "parameter": [check.parameter for check in checks],
        "kind": [check.kind for check in checks],
        "index": [check.index for check in checks],
        "autograd": [check.found.autograd for check in checks],
        "numeric": [check.found.numeric for check in checks],
        "difference": [check.found.difference for check in checks],
        "verdict": [check.found.verdict for check in checks],
        "reason": [check.found.reason for check in checks],
    }


def _not_in_float64(error: Exception) -> GradientResult:
    explanation = (
        f"The loss cannot be computed in float64 ({type(error).__name__}: {error}), so nothing was checked. Look for "
        "a loss that uses another model than the one it is given, and for tensors of a fixed type: weights of a "
        "criterion, constants of the model, a kernel for float32 alone."
    )
    return GradientResult(name=_NAME, passed=None, numbers={"checks": 0}, explanation=explanation, table=_table([]))

"""NaN and infinity: what they show in first, and what was finite before."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..thresholds import Thresholds
from .known import Flags, Floats, Integers, Known
from .memory import Memory
from .step import Alarm, Hits, Rows, Step, shown

_OUTSIDE = (
    "the loss function: log of 0, division by 0, or an overflow in it",
    "a target that is NaN or infinite",
)


class NonFinite:
    """Non-finite activations, gradients, parameters, updates and losses.

    An infinity that a module has put out from its first sample on, and that the loss has borne, is meant (a mask),
    and so are gradients of a step that a GradScaler has skipped.
    """

    def __init__(self, limits: Thresholds) -> None:
        self._meant = Memory(False, np.bool_)
        self._seen = Memory(False, np.bool_)

    def look(self, step: Step) -> Iterator[Hits | Alarm]:
        activations_finite = parameters_finite = None
        if step.rows is not None:
            activations, parameters = step.site("activation"), step.site("parameter")
            odd = self._unmeant(activations, step)
            activations_finite = not odd.any() if len(activations) else None
            parameters_finite = not parameters.nonfinite.any()
            if parameters.nonfinite.any():
                yield _hits("nonfinite_parameter", parameters, parameters.nonfinite, step)
            if odd.any():
                yield from self._activations(activations, odd, parameters_finite, step)
            yield from self._gradients(step, bool(parameters_finite and not odd.any()))
        yield from self._losses(step, activations_finite)

    def _unmeant(self, rows: Rows, step: Step) -> Flags:
        odd = rows.nonfinite
        first = ~self._seen[rows.ids]
        self._seen.set(rows.ids, True)
        if odd.any():
            borne = bool(step.losses) and all(math.isfinite(value) for value in step.losses.values())
            if borne and not (rows["nan_count"] > 0).any():
                self._meant.set(rows.ids[odd & first], True)
            odd = odd & ~(self._meant[rows.ids] & (rows["nan_count"] == 0))
        return odd

    def _activations(self, rows: Rows, odd: Flags, parameters_finite: bool | None, step: Step) -> Iterator[Hits]:
        causes = () if parameters_finite else ("its parameters, or those of a module before it, are not finite",)
        yield _hits("nonfinite_activation", rows, odd, step, causes=causes)

    def _gradients(self, step: Step, forward_finite: bool) -> Iterator[Hits]:
        assert step.rows is not None
        if step.rows["step_skipped"].any():
            return
        activation, parameter = step.site("activation_grad"), step.site("parameter_grad")
        odd = activation.nonfinite.any() or parameter.nonfinite.any()
        if odd:
            causes = () if forward_finite else ("values in the forward pass were not finite already",)
            ids = np.concatenate((activation.ids[activation.nonfinite], parameter.ids[parameter.nonfinite]))
            rows = step.rows.where(np.isin(step.rows.ids, ids))
            yield _hits("nonfinite_gradient", rows, rows.nonfinite, step, backward=True, causes=causes)
            return
        updates = step.site("update")
        if updates.nonfinite.any() and forward_finite and len(parameter):
            yield _hits("nonfinite_update", updates, updates.nonfinite, step)

    def _losses(self, step: Step, activations_finite: bool | None) -> Iterator[Alarm]:
        odd = next(((name, value) for name, value in step.losses.items() if not math.isfinite(value)), None)
        if odd is None:
            return
        name, value = odd
        if activations_finite:
            yield Alarm(
                "nonfinite_loss_outside",
                "critical",
                step.step,
                f"{name} is {value:g} although every recorded activation of the step is finite: it went wrong outside "
                "all modules, in the loss",
                value=value,
                causes=_OUTSIDE,
            )
        else:
            yield Alarm("nonfinite_loss", "critical", step.step, f"{name} is {value:g}", value=value)


def _hits(
    kind: str, rows: Rows, odd: Flags, step: Step, *, backward: bool = False, causes: tuple[str, ...] = ()
) -> Hits:
    nan, infinite = rows["nan_count"][odd], rows["inf_count"][odd]
    ids: Integers = rows.ids[odd]
    numbers = np.stack((nan, infinite, rows["count"][odd]), axis=1).tolist()
    counts = dict(zip(ids.tolist(), numbers, strict=True))
    values: Floats = nan + infinite
    known = step.known

    def say(name: str, identity: int, value: float) -> str:
        return _sentence(kind, known, name, identity, *counts[identity])

    return Hits(kind, "critical", ids, values, np.full(len(ids), step.step), 0.0, say, backward, causes)


def _sentence(kind: str, known: Known, name: str, identity: int, nan: float, infinite: float, count: float) -> str:
    tensor = known.tensor_name(identity)
    what = {
        "activation": f"the output of {shown(name)}",
        "activation_grad": f"the gradient at the output of {shown(name)}",
        "parameter": f"parameter {tensor} of {shown(name)}",
        "parameter_grad": f"the gradient of parameter {tensor} of {shown(name)}",
        "update": f"parameter {tensor} of {shown(name)} after the optimizer's step",
    }[known.site_name(identity)]
    parts = [f"{number:.0f} {word}" for number, word in ((nan, "NaN"), (infinite, "infinite")) if number]
    text = f"{what} has {' and '.join(parts)} of {count:.0f} elements"
    if kind == "nonfinite_update":
        return f"{text} although the parameter and all gradients were finite"
    return text

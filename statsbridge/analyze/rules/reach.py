"""Parameters that the training does not reach: without gradient, or in no optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..thresholds import Thresholds
from .known import Flags, Known
from .memory import Memory, Streak
from .step import Hits, Rows, Say, Step, match, shown

_FROM_THE_START = 3  # samples, of what was never otherwise


class NoGradient:
    """Trainable parameters that get no gradient: from the start, or no more. Or one that is exactly 0 throughout.

    As long as no optimizer is known, updates may be made by hand, and gradients cleared before `run.step()` could read
    them. Then only the outputs tell where the gradient is cut.
    """

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._none, self._zero = Streak(), Streak()
        self._had = Memory(False, np.bool_)
        self._optimizer = False

    def look(self, step: Step) -> Iterator[Hits]:
        self._optimizer = self._optimizer or _has_optimizer(step)
        if step.rows is None:
            return
        rows, known = step.site("parameter_grad"), step.known
        if not len(rows):
            return
        self._had.set(rows.ids[rows.measured], True)
        had = self._had[rows.ids]
        missing = rows["no_grad"] > 0
        self._none.update(rows.ids, missing, step.step, 1)
        length = self._none.length(rows.ids)
        found = length >= np.where(had, 2 * self._limits.persistence, _FROM_THE_START)
        idle = np.isinf(known.order[rows.ids]) | _rests(rows, step)  # its module does not run
        cut = found & ~idle
        if not self._optimizer and cut.any():
            cut &= _is_cut(rows, step)
        for severity, some in (("warning", cut), ("info", found & idle)):
            if some.any():
                ids = rows.ids[some]
                yield Hits(
                    "no_gradient" if severity == "warning" else "unused_module",
                    severity,  # type: ignore[arg-type]
                    ids,
                    np.zeros(len(ids)),
                    self._none.since(ids),
                    None,
                    _nothing(known) if severity == "warning" else _unused(known),
                    backward=severity == "warning",
                )
        yield from self._zeros(rows.where(rows.measured), step)

    def _zeros(self, rows: Rows, step: Step) -> Iterator[Hits]:
        known = step.known
        zero = (rows["l2"] == 0) & ~rows.nonfinite
        zero &= ~known.biases(rows.ids) & bool(len(rows) and not zero.all())
        found = self._zero.update(rows.ids, zero, step.step, self._limits.persistence)
        if found.any():
            ids = rows.ids[found]
            since = self._zero.since(ids)
            yield Hits("zero_gradient", "warning", ids, np.zeros(len(ids)), since, 0.0, _zero(known), backward=True)


def _has_optimizer(step: Step) -> bool:
    """Whether an optimizer has been seen by this step, which is to say that gradients were read when it stepped."""
    known = any(name == "grad_norm_applied" or name.startswith("lr/") for name in step.scalars)
    return known or (step.rows is not None and len(step.site("update")) > 0)


def _is_cut(rows: Rows, step: Step) -> Flags:
    """Whether no gradient comes to the output of the module of each either."""
    outputs = step.site("activation_grad")
    if not len(outputs):  # not recorded: where all gradients are gone, they may have been there
        return np.full(len(rows), rows.measured.any())
    modules = step.known.module
    reached = modules[outputs.ids[outputs.measured]]
    unreached = modules[outputs.ids[outputs["no_grad"] > 0]]
    flags: Flags = np.isin(modules[rows.ids], np.setdiff1d(unreached, reached))
    return flags


def _rests(rows: Rows, step: Step) -> Flags:
    """Whether the module of each has not run in this step, though it has before: an expert that got no sample."""
    known, outputs = step.known, step.site("activation")
    resting = outputs.ids[outputs["not_called"] > 0]
    flags: Flags = np.isin(known.module[rows.ids], known.module[resting]) if len(resting) else np.zeros(len(rows), bool)
    return flags


class NoOptimizer:
    """Parameters that have a gradient and no update, while others have one: no optimizer holds them."""

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._alone = Streak()

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None:
            return
        gradients, updates, known = step.site("parameter_grad"), step.site("update"), step.known
        gradients = gradients.where(gradients.measured & (gradients["l2"] > 0))
        if not len(updates) or not len(gradients):
            return
        alone: Flags = match(known.parameters(gradients.ids), known.parameters(updates.ids)) < 0
        found = self._alone.update(gradients.ids, alone, step.step, _FROM_THE_START)
        if found.any():
            ids = gradients.ids[found]
            since, norms = self._alone.since(ids), gradients["l2"][found]
            yield Hits("no_optimizer", "warning", ids, norms, since, None, _alone(known))


def _nothing(known: Known) -> Say:
    return lambda name, identity, value: (
        f"parameter {known.tensor_name(identity)} of {shown(name)} is trainable and gets no gradient"
    )


def _unused(known: Known) -> Say:
    return lambda name, identity, value: (
        f"{shown(name)} has the trainable parameter {known.tensor_name(identity)}, and does not run in training steps"
    )


def _zero(known: Known) -> Say:
    return lambda name, identity, value: (
        f"the gradient of parameter {known.tensor_name(identity)} of {shown(name)} is exactly 0 in all elements"
    )


def _alone(known: Known) -> Say:
    return lambda name, identity, value: (
        f"parameter {known.tensor_name(identity)} of {shown(name)} has a gradient (l2 norm {value:.3g}), and no "
        "optimizer updates it"
    )

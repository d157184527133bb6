"""How far the optimizer moves the parameters: too far, hardly, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..thresholds import Thresholds
from .gradients import weight_rows
from .known import Flags, Floats, Known
from .memory import Memory, Streak
from .step import Hits, Say, Step, match, shown

#: A weight whose elements are smaller than this is on its way from 0: its first updates are as large as itself.
_TINY = 1e-3


#: Learning rates and gradients below this share of what they were are those of the end of a training.
_DECAYED = 0.01

#: A gradient below this share of the largest one is 0 but for rounding, as that of a bias before a batch norm.
_ONLY_ROUNDING = 1e-5


class UpdateTooLarge:
    """‖Δθ‖/‖θ‖ of weights, near 1e-3 in a training that goes well."""

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._first = Memory(np.nan)
        self._warning, self._larger, self._critical = Streak(), Streak(), Streak()

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None:
            return
        limits, rows = self._limits, weight_rows(step, "update")
        ratio = rows["update_ratio"]
        size = rows["l2"] / np.where(ratio > 0, ratio, np.inf) / np.sqrt(np.maximum(rows["count"], 1))
        first = self._first[rows.ids]
        first = np.where(np.isnan(first), size, first)
        self._first.set(rows.ids, first)
        # Growing evenly from 0, the n-th update is 1/n of the weight.
        from_zero = first < _TINY
        # The first steps of a healthy training may be somewhat large.
        large = self._warning.update(rows.ids, ratio > limits.update_ratio, step.step, 2 * limits.persistence)
        large |= self._larger.update(rows.ids, ratio > 2 * limits.update_ratio, step.step, limits.persistence)
        large |= (ratio > limits.update_ratio_critical) & ~from_zero  # nothing is left of what it was
        patient = self._warning.length(rows.ids) >= 4 * limits.persistence
        far = self._critical.update(rows.ids, ratio > limits.update_ratio_critical, step.step, 2)
        rising = self._critical.length(rows.ids) >= limits.persistence
        for severity, found, limit in (
            ("critical", far & (~from_zero | rising), limits.update_ratio_critical),
            ("warning", large & (~from_zero | patient), limits.update_ratio),
        ):
            if found.any():
                ids = rows.ids[found]
                say = _larger(step.known, limit)
                yield Hits("update_too_large", severity, ids, ratio[found], self._warning.since(ids), limit, say)  # type: ignore[arg-type]


def _larger(known: Known, limit: float) -> Say:
    def say(name: str, identity: int, value: float) -> str:
        return (
            f"one step changes parameter {known.tensor_name(identity)} of {shown(name)} by {value:.3g} of its own norm "
            f"(limit {limit:g}; near 0.001 is usual)"
        )

    return say


class UpdateMissing:
    """Updates that are 0, lost in rounding, or next to nothing, of parameters that have a gradient.

    Small updates are not judged where the learning rates are far below what they were, as at the end of a schedule,
    nor where the gradient has become far smaller than it was at first, as at the end of a training. Nor is rounding
    where the gradient itself is only rounding.
    """

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._zero, self._rounded, self._small = Streak(), Streak(), Streak()
        self._highest = 0.0
        self._first = Memory(np.nan)

    def look(self, step: Step) -> Iterator[Hits]:
        rates = [value for name, value in step.scalars.items() if name.startswith("lr/")]
        self._highest = max([self._highest, *rates])
        if step.rows is None:
            return
        limits, known = self._limits, step.known
        updates, gradients = step.site("update"), step.site("parameter_grad")
        updates, gradients = updates.where(updates.measured), gradients.where(gradients.measured)
        place = match(known.parameters(updates.ids), known.parameters(gradients.ids))
        updates, gradients = updates.where(place >= 0), gradients.where(place[place >= 0])
        pulled = gradients["l2"] > 0
        zero = pulled & (updates["l2"] == 0) & (not rates or min(rates) == 0)
        moved = (1 - updates["zero_fraction"]) / np.maximum(1 - gradients["zero_fraction"], 1e-9)
        largest = np.max(gradients["l2"], initial=0, where=~gradients.nonfinite)
        real = gradients["l2"] > _ONLY_ROUNDING * largest
        rounded = pulled & real & ~zero & (moved < 1 - limits.update_rounded)
        first = self._first[updates.ids]
        first = np.where(np.isnan(first), gradients["l2"], first)
        self._first.set(updates.ids, first)
        going = not rates or max(rates) > _DECAYED * self._highest
        small = pulled & ~rounded & (updates["update_ratio"] < limits.update_ratio_small) & (updates["l2"] > 0)
        small &= going & (gradients["l2"] > _DECAYED * first) & ~known.biases(updates.ids)

        def found(
            kind: str, streak: Streak, holds: Flags, patience: int, values: Floats, limit: float
        ) -> Iterator[Hits]:
            hit = streak.update(updates.ids, holds, step.step, patience)
            if hit.any():
                ids = updates.ids[hit]
                say = _SAY[kind](known, limit)
                yield Hits(kind, "warning", ids, values[hit], streak.since(ids), limit, say)

        patience = limits.persistence
        yield from found("update_zero", self._zero, zero, patience, updates["l2"], 0.0)
        yield from found("update_rounded_away", self._rounded, rounded, patience, 1 - moved, limits.update_rounded)
        ratio, limit = updates["update_ratio"], limits.update_ratio_small
        yield from found("update_too_small", self._small, small, 2 * patience, ratio, limit)


def _none(known: Known, limit: float) -> Say:
    return lambda name, identity, value: (
        f"the optimizer leaves parameter {known.tensor_name(identity)} of {shown(name)} exactly as it is, although it "
        "has a gradient"
    )


def _lost(known: Known, limit: float) -> Say:
    return lambda name, identity, value: (
        f"{value:.1%} of the elements of parameter {known.tensor_name(identity)} of {shown(name)} that have a gradient "
        f"stay exactly as they are: their updates are rounded away (limit {limit:.0%})"
    )


def _smaller(known: Known, limit: float) -> Say:
    return lambda name, identity, value: (
        f"one step changes parameter {known.tensor_name(identity)} of {shown(name)} by {value:.2g} of its norm only "
        f"(limit {limit:g}; near 0.001 is usual)"
    )


_SAY = {"update_zero": _none, "update_rounded_away": _lost, "update_too_small": _smaller}

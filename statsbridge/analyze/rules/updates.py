"""How far the optimizer moves the parameters: too far, hardly, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..thresholds import Thresholds
from .gradients import weight_rows
from .known import Flags, Floats, Known
from .memory import Memory, Streak
from .step import Hits, Rows, Say, Step, match, shown

#: A weight that begins with smaller elements than this is on its way from 0: its first updates are as large as itself.
_TINY = 1e-3
#: Elements of one size have a root mean square of their mean magnitude, Gaussian ones one of 1.25 times as much.
_EVEN = 1.15
#: Seen from one sampled step to the next alone, updates must be so many times beyond their limit.
_FAR = 3
#: Once they have become as large as those of weights that are drawn at random, it is there.
_USUAL = 0.05

#: Learning rates and gradients below this share of what they were are those of the end of a training.
_DECAYED = 0.01

#: A gradient below this share of the largest one is 0 but for rounding, as that of a bias before a batch norm.
_ONLY_ROUNDING = 1e-5


class UpdateTooLarge:
    """‖Δθ‖/‖θ‖ of weights, near 1e-3 in a training that goes well.

    One update that leaves nothing of what was there is enough. Only where it is not the learning rate that made it so
    large, as in a line search, the next loss decides: lower than any before, all is well.
    """

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._first = Memory(np.nan)
        self._warning, self._larger, self._critical = Streak(), Streak(), Streak()
        self._doubtful: Hits | None = None
        self._lowest = np.inf

    def look(self, step: Step) -> Iterator[Hits]:
        loss = step.losses.get("loss")
        if loss is not None:
            if self._doubtful is not None and not loss < self._lowest:
                yield self._doubtful
            self._doubtful, self._lowest = None, min(self._lowest, loss)
        if step.rows is None:
            return
        limits, rows = self._limits, weight_rows(step, "update")
        ratio = rows["update_ratio"]
        size = rows["l2"] / np.where(ratio > 0, ratio, np.inf) / np.sqrt(np.maximum(rows["count"], 1))
        first = self._first[rows.ids]
        first = np.where(np.isnan(first), size, first)
        self._first.set(rows.ids, first)
        # Growing evenly from 0, the n-th update is 1/n of the weight; while the rate warms up it is 2/n.
        from_zero = first < _TINY
        # The first steps of a healthy training may be somewhat large.
        large = self._warning.update(rows.ids, ratio > limits.update_ratio, step.step, 2 * limits.persistence)
        large |= self._larger.update(rows.ids, ratio > 2 * limits.update_ratio, step.step, limits.persistence)
        at_once = (ratio > limits.update_ratio_critical) & ~from_zero & ~large
        patient = (self._warning.length(rows.ids) >= 4 * limits.persistence) & (size >= _USUAL)
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
        clear = _by_the_rate(rows, step) | (loss is None)
        for found in (at_once & clear, at_once & ~clear):
            if found.any():
                ids, limit = rows.ids[found], limits.update_ratio
                say = _larger(step.known, limit)
                hits = Hits("update_too_large", "warning", ids, ratio[found], self._warning.since(ids), limit, say)
                if clear[found].any():
                    yield hits
                else:
                    self._doubtful = hits


def _by_the_rate(rows: Rows, step: Step) -> Flags:
    """Whether each is the gradient times a learning rate (SGD), or that rate in every element (Adam, at first)."""
    rates = [value for name, value in step.scalars.items() if name.startswith("lr/") and value > 0]
    gradients, known = step.site("parameter_grad"), step.known
    place = match(known.parameters(rows.ids), known.parameters(gradients.ids))
    size = gradients["abs_mean"][place] if len(gradients) else np.full(len(rows), np.nan)
    size = np.where((place >= 0) & (size > 0), size, np.nan)
    clear = np.full(len(rows), not rates)
    even = rows["l2"] < _EVEN * rows["abs_mean"] * np.sqrt(rows["count"])
    for rate in rates:
        alone, times = rows["abs_mean"] / rate, rows["abs_mean"] / (rate * size)
        clear |= (even & (alone > 1 / 2) & (alone < 2)) | ((times > 1 / 2) & (times < 2))
    return clear


class WeightGrowth:
    """Weights whose norm grows so much from one sampled step to the next that the updates in between were too large.

    Where ‖θ‖ has grown by the factor F in n steps, the mean of their update ratios was at least F^(1/n) − 1.
    """

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._norms, self._steps = Memory(np.nan), Memory(0, np.int64)

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None:
            return
        rows, limit = weight_rows(step, "parameter"), self._limits.update_ratio
        norms, before, since = rows["l2"], self._norms[rows.ids], self._steps[rows.ids]
        passed = np.maximum(step.step - since, 1)
        count = np.sqrt(np.maximum(rows["count"], 1))
        factor = norms / np.where(before > 0, before, np.nan)
        ratio = factor ** (1 / passed) - 1
        far = (passed >= self._limits.persistence) & (ratio > _FAR * limit)
        # What begins at 0 has to grow, and what is smaller than usual may.
        found = far & (before > _TINY * count) & (norms > _USUAL * count)
        self._norms.set(rows.ids, norms)
        self._steps.set(rows.ids, step.step)
        if found.any():
            ids, known = rows.ids[found], step.known
            grown = dict(zip(ids.tolist(), factor[found].tolist(), strict=True))
            steps = dict(zip(ids.tolist(), passed[found].tolist(), strict=True))
            yield Hits(
                "update_too_large",
                "warning",
                ids,
                ratio[found],
                since[found],
                limit,
                lambda name, identity, value: (
                    f"parameter {known.tensor_name(identity)} of {shown(name)} became {grown[identity]:.3g} times as "
                    f"large in {steps[identity]} steps: by {value:.3g} of its own norm in each (limit {limit:g}; near "
                    "0.001 is usual)"
                ),
            )


def _larger(known: Known, limit: float) -> Say:
    def say(name: str, identity: int, value: float) -> str:
        return (
            f"one step changes parameter {known.tensor_name(identity)} of {shown(name)} by {value:.3g} of its own norm "
            f"(limit {limit:g}; near 0.001 is usual)"
        )

    return say


class UpdateMissing:
    """Updates that are 0, lost in rounding, or next to nothing, of parameters that have a gradient.

    Small updates are not judged where the learning rates are far below what they were, as at the end of a schedule.
    Neither these nor rounding are where the gradient has become far smaller than it was at first, as at the end of a
    training, nor is rounding where the gradient itself is only rounding.
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
        first = self._first[updates.ids]
        first = np.where(np.isnan(first), gradients["l2"], first)
        self._first.set(updates.ids, first)
        real &= gradients["l2"] > _DECAYED * first
        rounded = pulled & real & ~zero & (moved < 1 - limits.update_rounded)
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

"""Units that give 0 whatever comes in: behind a ReLU that is a module, and behind one that is a function."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..thresholds import Thresholds
from .known import Flags, Floats, Integers, Known
from .memory import Memory, Streak
from .step import Hits, Rows, Step, match, shown

RELU_LIKE = frozenset({"ReLU", "ReLU6", "Threshold"})
#: Wholly dead from one sample to the next is no accident of a batch.
_ALL = 0.999
#: So many elements do not all lie below 0 by chance.
_ENOUGH = 16


class DeadUnits:
    """ReLU outputs that are zero, in units that get no gradient: the zeros of a sparse network are not dead.

    A unit whose bias (or weights, where there is no bias) gets a gradient of exactly 0 is off for every sample of
    the batch. That units of share z zeros are all off by chance for n samples has the probability z^n.
    """

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._first = Memory(np.nan)
        self._warning, self._critical, self._all = Streak(), Streak(), Streak()

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None:
            return
        rows = step.leaves("activation")
        rows = rows.where(step.known.of_types(rows.ids, RELU_LIKE))
        if not len(rows):
            return
        limits, zeros = self._limits, rows["zero_fraction"]
        dead, chance = _dead_fraction(rows, step)
        known = ~np.isnan(dead)
        share = np.where(known, np.fmin(dead, zeros), zeros)
        first = self._first[rows.ids]
        self._first.set(rows.ids, np.where(np.isnan(first), share, first))
        worse = share >= np.where(np.isnan(first), np.inf, first) + limits.zero_fraction_growth
        sure = known & (dead >= (1 + chance) / 2)
        critical = sure & (share > limits.zero_fraction_critical)
        warning = (sure & (share > limits.zero_fraction) & worse) | critical
        warning |= ~known & (zeros > limits.zero_fraction_critical) & worse
        everything = (zeros >= _ALL) & (sure | ~known)
        whole = self._all.update(rows.ids, everything, step.step, 2)
        for severity, streak, holds, threshold in (
            ("critical", self._critical, critical, limits.zero_fraction_critical),
            ("warning", self._warning, warning, limits.zero_fraction),
        ):
            found = streak.update(rows.ids, holds, step.step, limits.persistence)
            found |= whole if severity == "critical" else False
            if found.any():
                since = np.where(whole[found], self._all.since(rows.ids[found]), streak.since(rows.ids[found]))
                yield Hits(
                    "dead_units",
                    severity,  # type: ignore[arg-type]
                    rows.ids[found],
                    share[found],
                    since,
                    threshold,
                    lambda name, identity, value, threshold=threshold: (  # type: ignore[misc]
                        f"{value:.1%} of the units of {shown(name)} are dead: always 0, without gradient "
                        f"(limit {threshold:.0%})"
                    ),
                )


def _dead_fraction(rows: Rows, step: Step) -> tuple[Floats, Floats]:
    """Of each ReLU the share of units without gradient in the layer before it, and what chance would make of it.

    NaN where that layer is not known: it is the one with parameters that was called last before, one depth below.
    """
    known, grads = step.known, step.site("parameter_grad")
    dead, chance = np.full(len(rows), np.nan), np.zeros(len(rows))
    grads = grads.where(grads.measured)
    if not len(grads):
        return dead, chance
    order = np.lexsort((~known.biases(grads.ids), known.order[grads.ids]))
    grads = grads.where(order)
    _, place = np.unique(known.module[grads.ids], return_index=True)
    place = place[np.argsort(known.order[grads.ids[place]], kind="stable")]
    feeders = grads.where(place)
    before = np.searchsorted(known.order[feeders.ids], known.order[rows.ids]) - 1
    feeder = feeders.ids[np.maximum(before, 0)]
    fits = (before >= 0) & (known.depth[feeder] == known.depth[rows.ids] - 1)
    dead[fits] = feeders["zero_fraction"][before[fits]]
    bias = fits & known.biases(feeder)
    units = feeders["count"][np.maximum(before, 0)]
    samples = np.where(bias, rows["count"] / np.maximum(units, 1), 1e9)
    chance = np.where(rows["zero_fraction"] >= 1, 0.0, rows["zero_fraction"] ** samples)
    return dead, chance


class DeadFunction:
    """Layers whose output is below 0 everywhere and gets no gradient: a ReLU behind it that is a function is dead.

    Of such a function nothing is recorded. What lies right before a ReLU that is a module is told of that.
    """

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._silent = Streak()

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None:
            return
        known, outputs, gradients = step.known, step.leaves("activation"), step.leaves("activation_grad")
        place = match(_outputs(known, gradients.ids), _outputs(known, outputs.ids))
        gradients, outputs = gradients.where(place >= 0), outputs.where(place[place >= 0])
        if not (gradients["l2"] > 0).any():
            return
        learning = match(known.modules_of(outputs.ids), known.modules_of(step.site("parameter_grad").ids)) >= 0
        below = (outputs["max"] < 0) & (outputs["count"] >= _ENOUGH) & learning & ~_before_a_dead_module(outputs, step)
        silent = below & (gradients["l2"] == 0)
        found = self._silent.update(gradients.ids, silent, step.step, self._limits.persistence)
        if found.any():
            ids = gradients.ids[found]
            highest = dict(zip(ids.tolist(), outputs["max"][found].tolist(), strict=True))
            yield Hits(
                "dead_units",
                "critical",
                ids,
                gradients["zero_fraction"][found],
                self._silent.since(ids),
                self._limits.zero_fraction_critical,
                lambda name, identity, value: (
                    f"the output of {shown(name)} is below 0 everywhere (at most {highest[identity]:.3g}) and gets no "
                    "gradient: what follows lets nothing through, as a ReLU does that is a function and no module"
                ),
            )


def _outputs(known: Known, ids: Integers) -> Integers:
    """A number that an output and the gradient at it have in common."""
    numbers: Integers = known.of(ids, "outputs", lambda: (known.parameters(ids) << 16) + known.call[ids])
    return numbers


def _before_a_dead_module(outputs: Rows, step: Step) -> Flags:
    """Whether each lies right before a ReLU that is a module and puts out nothing but 0."""
    rows, known = step.leaves("activation"), step.known
    dead = rows.where(known.of_types(rows.ids, RELU_LIKE) & (rows["zero_fraction"] >= _ALL))
    if not len(dead):
        return np.zeros(len(outputs), bool)
    flags: Flags = np.isin(known.depth[outputs.ids] + 1, known.depth[dead.ids])
    return flags

"""Outputs that are saturated, exploding or all alike, or that do not follow their weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..thresholds import Thresholds
from .dead import RELU_LIKE
from .known import Flags
from .memory import Memory, Streak
from .step import Hits, Rows, Step, match, shown

_SIGMOID, _TANH = frozenset({"Sigmoid"}), frozenset({"Tanh"})
# A module that puts out the same everywhere on purpose, or zeros for units that it drops.
_ALIKE_BY_DESIGN = frozenset({"Identity", "Flatten", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"})


class ActivationScale:
    """Outputs that explode, in the course of training or along depth, and outputs that are all alike."""

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._first = Memory(np.nan)
        self._large, self._huge, self._alike = Streak(), Streak(), Streak()

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None:
            return
        rows = step.leaves("activation")
        if not len(rows):
            return
        yield from self._exploding(rows, step)
        yield from self._collapsed(rows, step)

    def _exploding(self, rows: Rows, step: Step) -> Iterator[Hits]:
        limits, size = self._limits, rows["abs_mean"]
        first = self._first[rows.ids]
        first = np.where(np.isnan(first), size, first)
        self._first.set(rows.ids, first)
        shallow = step.known.places(rows.ids)[0]
        # What comes in may be large already; then the first module is too.
        reference = np.full(len(rows), max(1.0, float(size[shallow])))
        reference[step.known.depth[rows.ids] <= step.known.depth[rows.ids[shallow]]] = 1.0
        grown = (size > limits.activation_mean) & (first > 0)
        factor = np.maximum(size / reference, np.where(grown, size / np.maximum(first, 1e-3), 0))
        for severity, streak, limit in (
            ("critical", self._huge, limits.activation_growth_critical),
            ("warning", self._large, limits.activation_growth),
        ):
            found = streak.update(rows.ids, factor > limit, step.step, 2)
            if found.any():
                yield Hits(
                    "exploding_activation",
                    severity,  # type: ignore[arg-type]
                    rows.ids[found],
                    size[found],
                    streak.since(rows.ids[found]),
                    limit,
                    lambda name, identity, value, limit=limit: (  # type: ignore[misc]
                        f"the output of {shown(name)} has a mean magnitude of {value:.3g}: more than {limit:g} times "
                        "what it was at first, or what the first module puts out"
                    ),
                )

    def _collapsed(self, rows: Rows, step: Step) -> Iterator[Hits]:
        limits = self._limits
        exempt = step.known.of_types(rows.ids, RELU_LIKE | _ALIKE_BY_DESIGN) | (rows["count"] < 2)
        alike = ~exempt & (rows["std"] < limits.activation_std)
        found = self._alike.update(rows.ids, alike, step.step, limits.persistence)
        if found.any():
            yield Hits(
                "collapsed_activation",
                "critical",
                rows.ids[found],
                rows["std"][found],
                self._alike.since(rows.ids[found]),
                limits.activation_std,
                lambda name, identity, value: (
                    f"all elements of the output of {shown(name)} are alike: their standard deviation is {value:.2g} "
                    f"(limit {limits.activation_std:g})"
                ),
            )


class Saturation:
    """Sigmoid and tanh where they are flat: the mean of their derivative against its maximum.

    σ' = σ(1 − σ) has the mean μ − μ² − s² for outputs of mean μ and standard deviation s, at most 1/4; tanh' = 1 −
    tanh² has 1 − μ² − s², at most 1. The model's last module is left out: there it is how a classifier is sure.
    """

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._flat = Streak()

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None:
            return
        rows, known = step.leaves("activation"), step.known
        sigmoid, tanh = known.of_types(rows.ids, _SIGMOID), known.of_types(rows.ids, _TANH)
        if not (sigmoid.any() or tanh.any()):
            return
        square = rows["mean"] ** 2 + rows["std"] ** 2
        slope = np.where(sigmoid, 4 * (rows["mean"] - square), 1 - square)
        inner = known.depth[rows.ids] < known.deepest(rows.ids)
        limit = self._limits.saturation_slope
        flat = (sigmoid | tanh) & inner & (slope < limit)
        found = self._flat.update(rows.ids, flat, step.step, self._limits.persistence)
        if found.any():
            yield Hits(
                "saturated",
                "warning",
                rows.ids[found],
                slope[found],
                self._flat.since(rows.ids[found]),
                limit,
                lambda name, identity, value: (
                    f"{shown(name)} ({known.type_name(identity)}) is saturated: its mean slope is "
                    f"{max(value, 0):.2%} of the largest possible (limit {limit:.0%})"
                ),
            )


class StaleOutputs:
    """Outputs that repeat bit for bit although the module's own weights move."""

    _STATISTICS = ("mean", "std", "l2", "min", "max")

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._outputs = {name: Memory(np.nan) for name in self._STATISTICS}
        self._weights = {name: Memory(np.nan) for name in ("mean", "std", "l2")}
        self._repeats = Streak()

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None:
            return
        known, rows = step.known, step.leaves("activation")
        parameters = step.site("parameter")
        same = unchanged(rows, self._outputs) & (rows["std"] > 0)
        moved = parameters.where(parameters.measured & ~unchanged(parameters, self._weights, fresh=True))
        moving = match(known.modules_of(rows.ids), known.modules_of(moved.ids)) >= 0
        found = self._repeats.update(rows.ids, same & moving, step.step, self._limits.persistence)
        if found.any():
            yield Hits(
                "stale_outputs",
                "warning",
                rows.ids[found],
                rows["l2"][found],
                self._repeats.since(rows.ids[found]),
                None,
                lambda name, identity, value: (
                    f"the output of {shown(name)} repeats bit for bit (l2 norm {value:.6g}) while its own weights move"
                ),
            )


def unchanged(rows: Rows, memories: dict[str, Memory], *, fresh: bool = False) -> Flags:
    """Whether each row's statistics are those of the sample before; `fresh` for one that has none."""
    same, new = np.ones(len(rows), bool), np.zeros(len(rows), bool)
    for name, memory in memories.items():
        before = memory[rows.ids]
        same &= before == rows[name]
        new |= np.isnan(before)
        memory.set(rows.ids, rows[name])
    return np.where(new, fresh, same)

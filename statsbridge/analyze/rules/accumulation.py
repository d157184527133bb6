"""Gradients that add up from step to step, as where zero_grad() is missing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..thresholds import Thresholds
from .known import Flags, Floats, Integers
from .memory import Memory
from .step import Hits, Rows, Step, match, shown

#: How far the sum of a bias's gradient may be from that of its module's output gradient, where they are equal.
_ROUNDING = 0.02


class Accumulation:
    """Gradients of linear and convolutional layers that grow, by themselves and against those at their outputs.

    Weights and biases must agree: a weight's gradient also grows with the layer's input, a bias's does not. The proof
    to the contrary: the gradient of a bias sums to what the gradient at its layer's output sums to. Where that holds
    (or less, by clipping), nothing has been left over from the step before.
    """

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._ratio, self._size = Memory(np.nan), Memory(np.nan)
        self._count = 0
        self._since = 0
        self._begun = 0.0

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None:
            return
        weights, growth = self._growth(step)
        if not len(weights):
            return
        # Of two in the middle the lower: where it is missing, at least half of them grow.
        typical, limit = float(np.sort(growth)[(len(growth) - 1) // 2]), self._limits.gradient_accumulation
        if typical <= limit or _sums_agree(step):
            self._count = 0
            return
        if self._count == 0:
            self._since, self._begun = step.step, typical
        self._count += 1
        if self._count >= self._limits.persistence and typical > 1.2 * self._begun:
            grown = growth > limit
            yield Hits(
                "gradient_accumulating",
                "critical",
                weights.ids[grown],
                growth[grown],
                np.full(int(grown.sum()), self._since),
                limit,
                lambda name, identity, value: (
                    f"gradients of weights add up: that of {shown(name)} is {value:.3g} times what it was at first and "
                    f"still grows, while the gradient at its output does not (limit {limit:g})"
                ),
            )

    def _growth(self, step: Step) -> tuple[Rows, Floats]:
        """The layers' weights, and by how much their gradients have grown against those at the outputs."""
        growths = []
        for biases in (False, True):
            parameters, outputs = _layers(step, biases=biases)
            usable = (parameters["l2"] > 0) & (outputs["l2"] > 0)
            parameters, outputs = parameters.where(usable), outputs.where(usable)
            size = parameters["l2"]
            against = self._since_the_first(self._ratio, parameters, size / outputs["l2"])
            growths.append((parameters, np.minimum(against, self._since_the_first(self._size, parameters, size))))
        (weights, growth), (others, of_biases) = growths
        place = match(step.known.modules_of(weights.ids), step.known.modules_of(others.ids))
        if len(others):
            growth = np.where(place >= 0, np.minimum(growth, of_biases[place]), growth)
        return weights, growth

    @staticmethod
    def _since_the_first(memory: Memory, rows: Rows, values: Floats) -> Floats:
        first = memory[rows.ids]
        first = np.where(np.isnan(first), values, first)
        memory.set(rows.ids, first)
        factor: Floats = values / first
        return factor


def _layers(step: Step, *, biases: bool) -> tuple[Rows, Rows]:
    """The gradients of weights or biases of linear and convolutional layers, and those at the same layers' outputs.

    Of other modules the ratio of the two may grow by itself: a recurrent one uses its weights many times.
    """
    known, parameters, outputs = step.known, step.site("parameter_grad"), _once_called(step)
    added = frozenset(name for name in known.types.names if name == "Linear" or name.startswith("Conv"))
    wanted = parameters.measured & (known.biases(parameters.ids) == biases) & known.of_types(parameters.ids, added)
    updates = step.site("update")
    if len(updates):  # no optimizer's zero_grad() is there for a parameter that none holds
        wanted &= match(known.parameters(parameters.ids), known.parameters(updates.ids)) >= 0
    parameters = parameters.where(wanted)
    place = match(known.modules_of(parameters.ids), known.modules_of(outputs.ids))
    return parameters.where(place >= 0), outputs.where(place[place >= 0])


def _once_called(step: Step) -> Rows:
    """The output gradients of modules that were called once and put out one tensor."""
    rows = step.leaves("activation_grad")
    return rows.where(step.known.of(rows.ids, "called once", lambda: _alone(step.known.module[rows.ids])))


def _alone(modules: Integers) -> Flags:
    """Which of the modules are there once."""
    _, place, count = np.unique(modules, return_inverse=True, return_counts=True)
    alone: Flags = count[place] == 1
    return alone


def _sums_agree(step: Step) -> bool:
    """Whether biases prove that gradients are of this step alone; False where no bias can tell."""
    biases, outputs = _layers(step, biases=True)
    # A sum that cancels to nearly nothing is rounding.
    clear = np.abs(outputs["mean"]) > 1e-3 * outputs["abs_mean"]
    here = np.abs(biases["mean"] * biases["count"])[clear]
    there = np.abs(outputs["mean"] * outputs["count"])[clear]
    return bool(len(here)) and bool(np.all(here <= (1 + _ROUNDING) * there))

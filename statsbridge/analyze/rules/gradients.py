"""Gradients that vanish or explode, by their size and along depth."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..findings import Severity
from ..thresholds import Thresholds
from .known import Flags, Floats, Integers, Known
from .memory import Memory, Streak
from .step import Hits, Rows, Say, Step, match, shown

#: Rows of an embedding that the batch does not use have no gradient, so that its mean says little.
_EMBEDDINGS = frozenset({"Embedding", "EmbeddingBag"})

#: A gradient that has become so many times as large since it seemed lost is on its way back.
_RECOVERING = 3.0


def weight_rows(step: Step, site: str) -> Rows:
    """The measured rows of weights of layers: not of biases, embeddings or normalisations."""
    rows, known = step.site(site), step.known
    return rows.where(rows.measured & known.of(rows.ids, "weights", lambda: _are_weights(rows.ids, known)))


def _are_weights(ids: Integers, known: Known) -> Flags:
    norms = frozenset(name for name in known.types.names if "Norm" in name)
    return ~(known.biases(ids) | known.of_types(ids, _EMBEDDINGS | norms))


class GradientSize:
    """Gradients of outputs and weights that are very large, and of weights that are very small from the first on."""

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._large, self._small = Streak(), Streak()
        self._was_larger = Memory(False, np.bool_)
        self._begun = Memory(np.nan)

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None:
            return
        limits, weights = self._limits, weight_rows(step, "parameter_grad")
        outputs = step.leaves("activation_grad")
        ids = np.concatenate((outputs.ids, weights.ids))
        size = np.concatenate((outputs["abs_mean"], weights["abs_mean"]))
        found = self._large.update(ids, size > limits.gradient_large, step.step, 2)
        if found.any():
            since = self._large.since(ids[found])
            limit = limits.gradient_large
            say = _of_size(step.known, limit)
            yield Hits("exploding_gradient", "critical", ids[found], size[found], since, limit, say, backward=True)
        size, limit = weights["abs_mean"], limits.gradient_small
        small = (size < limit) & (size > 0) & ~self._was_larger[weights.ids]
        small &= ~_returns(size, weights, self._begun, small, self._small)
        self._was_larger.set(weights.ids[size >= limit], True)
        found = self._small.update(weights.ids, small, step.step, limits.persistence)
        if found.any():
            ids, since = weights.ids[found], self._small.since(weights.ids[found])
            say = _of_size(step.known, limit)
            yield Hits("vanishing_gradient", "warning", ids, size[found], since, limit, say, backward=True)


class GradientAlongDepth:
    """What becomes of the gradient from the output to the input.

    Two ratios must agree: the mean |gradient| of a layer's weights against that of the last layer's, and the norm of
    the gradient at its output against that at the model's. The first alone also follows the width of the layers.
    """

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._streaks: dict[tuple[str, Severity], tuple[Streak, Memory]] = {}
        self._lowest = Memory(np.nan)

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None:
            return
        limits, weights = self._limits, weight_rows(step, "parameter_grad")
        weights = weights.where(weights["abs_mean"] > 0)
        if not len(weights):
            return
        of_weights = weights["abs_mean"] / _last(weights, weights["abs_mean"], step.known)
        of_outputs = _of_outputs(weights, step)
        smallest = np.fmin(of_weights, of_outputs)
        # A branch may have little gradient (queries and keys of attention at the start): what is lost does not come
        # back nearer to the input.
        largest = _up_to_here(weights, np.fmax(of_weights, of_outputs), step.known)
        yield from self._judge(step, weights, "vanishing_gradient", "critical", largest, limits.gradient_ratio_critical)
        yield from self._judge(step, weights, "vanishing_gradient", "warning", largest, limits.gradient_ratio)
        yield from self._judge(step, weights, "exploding_gradient", "warning", smallest, limits.gradient_ratio_large)

    def _judge(
        self, step: Step, weights: Rows, kind: str, severity: Severity, ratio: Floats, limit: float
    ) -> Iterator[Hits]:
        streak, begun = self._streaks.setdefault((kind, severity), (Streak(), Memory(np.nan)))
        holds = ratio > limit
        if kind == "vanishing_gradient":
            # Branches that begin at next to nothing by design (LayerScale, a last layer of zeros) soon get theirs.
            lowest = np.fmin(ratio, self._lowest[weights.ids])
            self._lowest.set(weights.ids, lowest)
            holds = (ratio < limit) & ~((ratio > _RECOVERING * lowest) & (ratio > self._limits.gradient_ratio_critical))
            holds &= ~_returns(ratio, weights, begun, holds, streak)
        found = streak.update(weights.ids, holds, step.step, self._limits.persistence)
        if found.any():
            ids = weights.ids[found]
            say = _of_depth(limit)
            yield Hits(kind, severity, ids, ratio[found], streak.since(ids), limit, say, backward=True)


def _returns(values: Floats, rows: Rows, begun: Memory, holds: Flags, streak: Streak) -> Flags:
    """Whether each has become much larger since the streak that it is in began; then another one begins."""
    returns: Flags = values > _RECOVERING * begun[rows.ids]
    fresh = ~holds | returns | (streak.length(rows.ids) == 0)
    begun.set(rows.ids[fresh], values[fresh])
    return returns


def _last(rows: Rows, values: Floats, known: Known) -> Floats:
    """For each row the value of the one that is last in the data flow of its model."""
    last: Floats = values[known.of(rows.ids, "last", lambda: _places_of_last(rows.ids, known))]
    return last


def _places_of_last(ids: Integers, known: Known) -> Integers:
    roots = known.roots(ids)
    order = np.lexsort((known.order[ids], known.depth[ids], roots))
    ends: Integers = order[np.searchsorted(roots[order], roots, side="right") - 1]
    return ends


def _up_to_here(rows: Rows, values: Floats, known: Known) -> Floats:
    """For each row the largest value of those of its model that are as near to the input, or nearer."""
    largest: Floats = np.full(len(rows), -np.inf)
    for mine, level, levels in known.of(rows.ids, "levels", lambda: _levels(rows.ids, known)):
        highest = np.full(levels, -np.inf)
        np.maximum.at(highest, level, values[mine])
        largest[mine] = np.maximum.accumulate(highest)[level]
    return largest


def _levels(ids: Integers, known: Known) -> list[tuple[Integers, Integers, int]]:
    """Of each model the places of its identities, the level of each from the input on, and how many there are."""
    found, roots, depth = [], known.roots(ids), known.depth[ids]
    for root in np.unique(roots):
        mine = np.flatnonzero(roots == root)
        levels, level = np.unique(depth[mine], return_inverse=True)
        found.append((mine, level, len(levels)))
    return found


def _of_outputs(weights: Rows, step: Step) -> Floats:
    """The norm of the gradient at each layer's output over that at its model's; NaN where it was not measured."""
    known, outputs = step.known, step.leaves("activation_grad")
    outputs = outputs.where(outputs["l2"] > 0)
    if not len(outputs):
        return np.full(len(weights), np.nan)
    ratios = outputs["l2"] / _last(outputs, outputs["l2"], known)
    modules, place = known.of(outputs.ids, "first calls", lambda: _first_calls(outputs.ids, known))
    wanted = match(known.modules_of(weights.ids), modules)
    return np.where(wanted >= 0, ratios[place[wanted]], np.nan) if len(modules) else np.full(len(weights), np.nan)


def _first_calls(ids: Integers, known: Known) -> tuple[Integers, Integers]:
    """The modules, and the place of the first output of each one's first call."""
    first_calls = np.flatnonzero(known.call[ids] == 0)
    modules, place = np.unique(known.module[ids[first_calls]], return_index=True)
    modules.flags.writeable = False
    return modules, first_calls[place]


def _of_size(known: Known, limit: float) -> Say:
    def say(name: str, identity: int, value: float) -> str:
        tensor = known.tensor_name(identity)
        what = f"parameter {tensor} of {shown(name)}" if tensor else f"the output of {shown(name)}"
        return f"the gradient of {what} has a mean magnitude of {value:.3g} (limit {limit:g})"

    return say


def _of_depth(limit: float) -> Say:
    def say(name: str, identity: int, value: float) -> str:
        return (
            f"the gradient at {shown(name)} is {value:.3g} times that at the last layer (limit {limit:g}): it "
            f"{'grows' if limit > 1 else 'is lost'} on its way back to the input"
        )

    return say

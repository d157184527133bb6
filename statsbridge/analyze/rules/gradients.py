"""Gradients that vanish or explode, by their size and along depth."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..findings import Severity
from ..thresholds import Thresholds
from .known import Floats, Known
from .memory import Memory, Streak
from .step import Hits, Rows, Say, Step, match, shown

#: Rows of an embedding that the batch does not use have no gradient, so that its mean says little.
_EMBEDDINGS = frozenset({"Embedding", "EmbeddingBag"})


def weight_rows(step: Step, site: str) -> Rows:
    """The measured rows of weights of layers: not of biases, embeddings or normalisations."""
    rows, known = step.site(site), step.known
    norms = frozenset(name for name in known.types.names if "Norm" in name)
    left_out = known.biases(rows.ids) | known.of_types(rows.ids, _EMBEDDINGS | norms)
    return rows.where(rows.measured & ~left_out)


class GradientSize:
    """Gradients of outputs and weights that are very large, and of weights that are very small from the first on."""

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._large, self._small = Streak(), Streak()
        self._was_larger = Memory(False, np.bool_)

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
        self._streaks: dict[tuple[str, Severity], Streak] = {}

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
        streak = self._streaks.setdefault((kind, severity), Streak())
        holds = ratio > limit if kind == "exploding_gradient" else ratio < limit
        found = streak.update(weights.ids, holds, step.step, self._limits.persistence)
        if found.any():
            ids = weights.ids[found]
            say = _of_depth(limit)
            yield Hits(kind, severity, ids, ratio[found], streak.since(ids), limit, say, backward=True)


def _last(rows: Rows, values: Floats, known: Known) -> Floats:
    """For each row the value of the one that is last in the data flow of its model."""
    roots = known.roots(rows.ids)
    order = np.lexsort((known.order[rows.ids], known.depth[rows.ids], roots))
    ends = np.searchsorted(roots[order], roots, side="right") - 1
    last: Floats = values[order[ends]]
    return last


def _up_to_here(rows: Rows, values: Floats, known: Known) -> Floats:
    """For each row the largest value of those of its model that are as near to the input, or nearer."""
    largest: Floats = np.full(len(rows), -np.inf)
    roots, depth = known.roots(rows.ids), known.depth[rows.ids]
    for root in np.unique(roots):
        mine = np.flatnonzero(roots == root)
        levels, level = np.unique(depth[mine], return_inverse=True)
        highest = np.full(len(levels), -np.inf)
        np.maximum.at(highest, level, values[mine])
        largest[mine] = np.maximum.accumulate(highest)[level]
    return largest


def _of_outputs(weights: Rows, step: Step) -> Floats:
    """The norm of the gradient at each layer's output over that at its model's; NaN where it was not measured."""
    known, outputs = step.known, step.leaves("activation_grad")
    outputs = outputs.where(outputs["l2"] > 0)
    if not len(outputs):
        return np.full(len(weights), np.nan)
    ratios = outputs["l2"] / _last(outputs, outputs["l2"], known)
    first_calls = known.call[outputs.ids] == 0
    modules, place = np.unique(known.module[outputs.ids[first_calls]], return_index=True)
    ratios, wanted = ratios[first_calls][place], match(known.module[weights.ids], modules)
    return np.where(wanted >= 0, ratios[wanted], np.nan) if len(modules) else np.full(len(weights), np.nan)


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

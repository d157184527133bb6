"""From the rows of one sampled step to the columns of the `stats` table. Runs in the background thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .calls import Place
from .facts import Fact
from .filters import SITES, Filters
from .modules import ModuleEntry
from .rows import Columns, Key, Row, Rows
from .shards import WHOLE, Layout, Part, Scalar
from .statistics import STATISTICS

_ALWAYS = ("tensor", "tensor_grad")  # sites that nobody has to ask for


class StepNumbers(NamedTuple):
    """The `stats` columns of one step, and the scalars that follow from them: the global ratio of update to
    parameters, or the two norms that it is made of where every process knows but its part. And what else is to be told.
    """

    stats: Columns
    scalars: dict[str, Scalar | Part]
    facts: list[Fact]


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a step has in common with the one before: which rows there are, and where they stand.

    `of`: what it was made from. `order` [rows written]: the rows in data-flow order. `columns`: those that name them,
    tuples: `to_table` keeps what it makes of these. `updates`, `before` [pairs]: the rows of an update and of the
    parameter before it.
    """

    of: tuple[Sequence[Key], Sequence[Place], Sequence[ModuleEntry], frozenset[str]]
    order: np.ndarray
    columns: Mapping[str, tuple[Any, ...]]
    updates: np.ndarray
    before: np.ndarray


_last = threading.local()  # the last frame of each background thread: that is, of each run


def step_columns(
    rows: Rows,
    places: Sequence[Place],
    entries: Sequence[ModuleEntry],
    filters: Filters,
    layout: Layout,
    whole: bool,
) -> StepNumbers:
    """Finish the statistics, put the rows in data-flow order and name them.

    `places`: of the rows. The global ratio is known only where the rows hold the `whole` of the models' updates.
    """
    numbers = rows.statistics()
    made = list(rows)
    frame = _frame([row.key for row in made], places, entries, filters.sites)
    ratios, scalars = _update_ratios(made, numbers, frame, layout)
    order = frame.order.tolist()
    columns: Columns = {name: _take(values, frame.order) for name, values in numbers.items()}
    if columns["histogram"] is not None:
        null = np.isnan(columns["min"])
        columns["histogram"] = [None if none else row for row, none in zip(columns["histogram"], null, strict=True)]
    for name in STATISTICS:
        if name not in filters.statistics:
            columns[name] = np.full(len(order), np.nan)
    columns["update_ratio"] = ratios[frame.order]
    columns.update(frame.columns)
    shares = [made[n].share for n in order]
    if any(shares):
        columns["shard"] = [None if share is None else share.shard for share in shares]
        columns["shards"] = [None if share is None else share.shards for share in shares]
    return StepNumbers(columns, scalars if whole else {}, [])


def _frame(
    keys: Sequence[Key], places: Sequence[Place], entries: Sequence[ModuleEntry], sites: frozenset[str]
) -> _Frame:
    """The frame of the step before where that was about the same: to compare is quick, for it had the same objects."""
    of = (keys, places, entries, sites)
    frame: _Frame | None = getattr(_last, "frame", None)
    if frame is None or frame.of != of:
        frame = _last.frame = _new_frame(*of)
    return frame


def _new_frame(
    keys: Sequence[Key], places: Sequence[Place], entries: Sequence[ModuleEntry], sites: frozenset[str]
) -> _Frame:
    order = [n for n in _data_flow_order(keys, places) if keys[n].site in sites or keys[n].site in _ALWAYS]
    modules = [entries[keys[n].module] if keys[n].module >= 0 else None for n in order]
    columns: dict[str, tuple[Any, ...]] = {
        "module": tuple(entry.name if entry else "" for entry in modules),
        "type": tuple(entry.type if entry else None for entry in modules),
        "call": tuple(keys[n].call for n in order),
        "order": tuple(places[n].order for n in order),
        "depth": tuple(places[n].depth for n in order),
        "site": tuple(keys[n].site for n in order),
        "tensor": tuple(keys[n].tensor for n in order),
    }
    parameters = {(key.module, key.tensor): n for n, key in enumerate(keys) if key.site == "parameter"}
    updates = [n for n, key in enumerate(keys) if key.site == "update" and (key.module, key.tensor) in parameters]
    before = [parameters[keys[n].module, keys[n].tensor] for n in updates]
    return _Frame(
        (keys, places, entries, sites), _indices(order), columns, updates=_indices(updates), before=_indices(before)
    )


def _indices(rows: Sequence[int]) -> np.ndarray:
    return np.array(rows, dtype=np.intp)


def _data_flow_order(keys: Sequence[Key], places: Sequence[Place]) -> list[int]:
    def rank(n: int) -> tuple[bool, int, int, int, int, str]:
        key, order = keys[n], places[n].order
        return (order is None, order or 0, key.module, key.call, SITES.index(key.site), key.tensor)

    return sorted(range(len(keys)), key=rank)


def _take(values: Any, order: np.ndarray) -> Any:
    if values is None or isinstance(values, np.ndarray):
        return values if values is None else values[order]
    return tuple(values[n] for n in order.tolist())


def _update_ratios(
    rows: Sequence[Row], numbers: Columns, frame: _Frame, layout: Layout
) -> tuple[np.ndarray, dict[str, Scalar | Part]]:
    """‖Δθ‖ / ‖θ before‖ of each update over its finite elements (null where the denominator is 0), and of all."""
    ratios = np.full(len(rows), np.nan)
    update, before = frame.updates, frame.before
    if not len(update):
        return ratios, {}
    l2 = numbers["l2"]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios[update] = np.where(l2[before] > 0, l2[update] / l2[before], np.nan)
    shares = {rows[n].share for n in update.tolist()}
    if shares <= {None, WHOLE}:
        denominator = _norm(numbers, before)
        ratio = _norm(numbers, update) / denominator if denominator else None
        return ratios, {} if ratio is None else {"update_ratio": layout.of_whole(ratio)}
    counted = np.array([rows[n].counted for n in update.tolist()])
    share = layout.own_share()
    norms = {"update_norm": _norm(numbers, update[counted]), "param_norm_before": _norm(numbers, before[counted])}
    return ratios, {name: Part(norm, share) for name, norm in norms.items()}


def _norm(numbers: Columns, rows: np.ndarray) -> float:
    """The L2 norm of the rows' tensors together, of all their elements: NaN or Inf where they have one."""
    if numbers["nan_count"][rows].any():
        return math.nan
    if numbers["inf_count"][rows].any():
        return math.inf
    l2 = numbers["l2"][rows]
    return math.hypot(*l2[~np.isnan(l2)])

"""From the rows of one sampled step to the columns of the `stats` table. Runs in the background thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .calls import Place
from .filters import SITES, Filters
from .modules import ModuleEntry
from .rows import Columns, Key, Rows
from .statistics import STATISTICS


class StepNumbers(NamedTuple):
    """The `stats` columns of one step, and the global ratio of update to parameters (None: not known)."""

    stats: Columns
    update_ratio: float | None


def step_columns(
    rows: Rows,
    keys: Sequence[Key],
    places: Sequence[Place],
    entries: Sequence[ModuleEntry],
    filters: Filters,
    whole: bool,
) -> StepNumbers:
    """Finish the statistics, put the rows in data-flow order and name them.

    The global ratio is known only where the rows hold the `whole` of the models' updates.
    """
    numbers = rows.statistics()
    ratios, global_ratio = _update_ratios(keys, numbers)
    order = [n for n in _data_flow_order(keys, places) if _wanted(keys[n], filters)]
    take = np.array(order, dtype=np.intp)
    columns: Columns = {name: _take(values, take) for name, values in numbers.items()}
    if columns["histogram"] is not None:
        null = np.isnan(columns["min"])
        columns["histogram"] = [None if none else row for row, none in zip(columns["histogram"], null, strict=True)]
    for name in STATISTICS:
        if name not in filters.statistics:
            columns[name] = np.full(len(order), np.nan)
    columns["update_ratio"] = ratios[take]
    modules = [entries[keys[n].module] if keys[n].module >= 0 else None for n in order]
    columns["module"] = [entry.name if entry else "" for entry in modules]
    columns["type"] = [entry.type if entry else None for entry in modules]
    columns["call"] = [keys[n].call for n in order]
    columns["order"] = [places[n].order for n in order]
    columns["depth"] = [places[n].depth for n in order]
    columns["site"] = [keys[n].site for n in order]
    columns["tensor"] = [keys[n].tensor for n in order]
    return StepNumbers(columns, global_ratio if whole else None)


def _wanted(key: Key, filters: Filters) -> bool:
    return key.site in filters.sites or key.site in ("tensor", "tensor_grad")


def _data_flow_order(keys: Sequence[Key], places: Sequence[Place]) -> list[int]:
    def rank(n: int) -> tuple[bool, int, int, int, int, str]:
        key, order = keys[n], places[n].order
        return (order is None, order or 0, key.module, key.call, SITES.index(key.site), key.tensor)

    return sorted(range(len(keys)), key=rank)


def _take(values: Any, order: np.ndarray) -> Any:
    if values is None or isinstance(values, np.ndarray):
        return values if values is None else values[order]
    return [values[n] for n in order]


def _update_ratios(keys: Sequence[Key], numbers: Columns) -> tuple[np.ndarray, float | None]:
    """‖Δθ‖ / ‖θ before‖ of each update over its finite elements (null where the denominator is 0), and of all."""
    ratios = np.full(len(keys), np.nan)
    parameters = {(key.module, key.tensor): n for n, key in enumerate(keys) if key.site == "parameter"}
    pairs = [
        (n, parameters[key.module, key.tensor])
        for n, key in enumerate(keys)
        if key.site == "update" and (key.module, key.tensor) in parameters
    ]
    if not pairs:
        return ratios, None
    update, before = np.array(pairs).T
    l2 = numbers["l2"]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios[update] = np.where(l2[before] > 0, l2[update] / l2[before], np.nan)
    denominator = _norm(numbers, before)
    return ratios, _norm(numbers, update) / denominator if denominator else None


def _norm(numbers: Columns, rows: np.ndarray) -> float:
    """The L2 norm of the rows' tensors together, of all their elements: NaN or Inf where they have one."""
    if numbers["nan_count"][rows].any():
        return math.nan
    if numbers["inf_count"][rows].any():
        return math.inf
    l2 = numbers["l2"][rows]
    return math.hypot(*l2[~np.isnan(l2)])

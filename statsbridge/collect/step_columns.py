"""From the rows of one sampled step to the columns of the `stats` table. Runs in the background thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .calls import Place
from .facts import Fact
from .filters import SITES, Filters
from .modules import ModuleEntry
from .rows import Columns, Key, Row, Rows
from .shards import WHOLE, Layout, Part, Scalar
from .statistics import STATISTICS


class StepNumbers(NamedTuple):
    """The `stats` columns of one step, and the scalars that follow from them: the global ratio of update to
    parameters, or the two norms that it is made of where every process knows but its part. And what else is to be told.
    """

    stats: Columns
    scalars: dict[str, Scalar | Part]
    facts: list[Fact]


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
    keys = [row.key for row in made]
    ratios, scalars = _update_ratios(made, numbers, layout)
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
    shares = [made[n].share for n in order]
    if any(shares):
        columns["shard"] = [None if share is None else share.shard for share in shares]
        columns["shards"] = [None if share is None else share.shards for share in shares]
    return StepNumbers(columns, scalars if whole else {}, [])


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


def _update_ratios(
    rows: Sequence[Row], numbers: Columns, layout: Layout
) -> tuple[np.ndarray, dict[str, Scalar | Part]]:
    """‖Δθ‖ / ‖θ before‖ of each update over its finite elements (null where the denominator is 0), and of all."""
    ratios = np.full(len(rows), np.nan)
    parameters = {(row.key.module, row.key.tensor): n for n, row in enumerate(rows) if row.key.site == "parameter"}
    pairs = [
        (n, parameters[row.key.module, row.key.tensor])
        for n, row in enumerate(rows)
        if row.key.site == "update" and (row.key.module, row.key.tensor) in parameters
    ]
    if not pairs:
        return ratios, {}
    update, before = np.array(pairs).T
    l2 = numbers["l2"]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios[update] = np.where(l2[before] > 0, l2[update] / l2[before], np.nan)
    shares = {rows[n].share for n, _ in pairs}
    if shares <= {None, WHOLE}:
        denominator = _norm(numbers, before)
        ratio = _norm(numbers, update) / denominator if denominator else None
        return ratios, {} if ratio is None else {"update_ratio": layout.of_whole(ratio)}
    counted = np.array([rows[n].counted for n, _ in pairs])
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

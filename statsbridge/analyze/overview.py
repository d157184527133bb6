"""One step of one site, module by module in the order of the data flow: the numbers behind the table."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statsbridge.errors import ConfigError

from .choices import unknown_choice
from .marks import GRADIENT_SITES, Mark, Thresholds, gradient_ratio_mark, marks

SORTS = ("depth", "value", "change")

_GRADIENT_STATISTICS = ("l2", "abs_mean", "std")
_TENSOR_STATISTICS = ("mean", "std", "abs_max")
# What is worth a glance at each site; the sparkline follows the second entry.
SITE_STATISTICS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "activation": (("mean", "std", "zero_fraction", "abs_max"), "std"),
    "activation_grad": (_GRADIENT_STATISTICS, "l2"),
    "parameter_grad": (_GRADIENT_STATISTICS, "l2"),
    "parameter": (("std", "l2"), "l2"),
    "update": (("update_ratio", "l2"), "update_ratio"),
    "tensor": (_TENSOR_STATISTICS, "std"),
    "tensor_grad": (_GRADIENT_STATISTICS, "l2"),
    "optimizer_state": (_TENSOR_STATISTICS, "std"),
}


@dataclass(frozen=True, slots=True)
class Trend:
    """One statistic of one row over the sampled steps.

    `values` has one entry for each of the overview's `steps`, None where nothing was recorded. `nonfinite`
    says at which steps the tensor held a NaN or an infinity.
    """

    values: tuple[float | None, ...]
    nonfinite: tuple[bool, ...]

    @property
    def first(self) -> float | None:
        return next((value for value in self.values if value is not None), None)

    @property
    def last(self) -> float | None:
        return next((value for value in reversed(self.values) if value is not None), None)

    @property
    def change(self) -> float | None:
        """(last − first) / |first|: infinite where only the first is 0, None with fewer than two values."""
        first, last = self.first, self.last
        if first is None or last is None or sum(value is not None for value in self.values) < 2:
            return None
        if first == 0:
            return math.copysign(math.inf, last) if last else 0.0
        return (last - first) / abs(first)


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of one module call at the step shown. `depth` and `order` are None if never traced."""

    depth: int | None
    order: int | None
    module: str
    type: str
    call: int
    tensor: str
    status: str | None
    values: Mapping[str, float | None]
    trends: Mapping[str, Trend]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class GradientRatio:
    """Mean |gradient| of the first layer in data-flow order, over that of the last one."""

    first: str
    last: str
    value: float
    mark: Mark | None


@dataclass(frozen=True, slots=True)
class Overview:
    """The rows of one step and site, and what their columns are.

    `steps` are all sampled steps of the site; `absent` counts the module calls and tensors that were
    recorded at another step and not at `step`.
    """

    site: str
    step: int
    steps: tuple[int, ...]
    statistics: tuple[str, ...]
    trends: tuple[str, ...]
    rows: tuple[Row, ...]
    absent: int
    gradient_ratio: GradientRatio | None


def statistics_of(stats: pa.Table) -> tuple[str, ...]:
    """The names of the numeric statistics in a `stats` table, and `abs_max` = max(|min|, |max|)."""
    names = stats.schema.names
    numeric = [
        name
        for name in names[names.index("count") :]
        if pa.types.is_integer(stats.schema.field(name).type) or pa.types.is_floating(stats.schema.field(name).type)
    ]
    # What tells processes and the pieces of a sharded tensor apart is no number of a tensor.
    return (*(name for name in numeric if name not in ("rank", "shard", "shards")), "abs_max")


def overview(
    stats: pa.Table,
    *,
    site: str = "activation",
    statistics: Sequence[str] | None = None,
    step: int | None = None,
    modules: str = "*",
    sort: str = "depth",
    thresholds: Thresholds | None = None,
) -> Overview:
    """Arrange one step of one site as rows in data-flow order.

    Args:
        stats: the `stats` table of a run, ranks merged.
        site: what was measured.
        statistics: columns of `stats`, or `abs_max`; None for the usual ones of the site.
        step: a sampled step; None for the last one.
        modules: a glob over module paths.
        sort: `depth` (then order of execution), `value` (largest magnitude of the first trend first) or
            `change` (largest relative change of it first); what is missing comes last.
        thresholds: the limits of the marks; None for the usual ones.

    Raises:
        ConfigError: an argument names nothing that was recorded; the message gives the choices.
    """
    if sort not in SORTS:
        raise unknown_choice("sort", sort, SORTS)
    sites = pc.unique(_plain(stats["site"])).to_pylist()
    if not sites:
        raise ConfigError("no statistics in this run yet: they are written once a sampled step is closed")
    if site not in sites:
        raise unknown_choice("site", site, sorted(sites))
    shown, trends = _columns(stats, site, statistics)
    table = stats.filter(pc.equal(_plain(stats["site"]), site))
    steps = np.unique(table["step"].to_numpy())
    if step is None:
        step = int(steps[-1])
    elif step not in steps:
        nearest = sorted(steps.tolist(), key=lambda sampled: abs(sampled - step))
        raise unknown_choice("step", f"{step} (not sampled)", nearest)
    table = _matching(table, modules)
    keys = _keys(table)
    series = {name: _series(table, name, keys, steps) for name in trends}
    nonfinite = _series(table, "nan_count", keys, steps) + _series(table, "inf_count", keys, steps) > 0
    at_step = np.flatnonzero(table["step"].to_numpy() == step)
    numbers = table.take(at_step).to_pylist()
    rows = [
        _row(one, shown, {name: _trend(series[name][key], nonfinite[key]) for name in trends}, site, thresholds)
        for one, key in zip(numbers, keys[at_step], strict=True)
    ]
    return Overview(
        site=site,
        step=step,
        steps=tuple(steps.tolist()),
        statistics=shown,
        trends=trends,
        rows=_sorted(rows, sort, trends[0]),
        absent=len(np.unique(keys)) - len(rows),
        gradient_ratio=_gradient_ratio(numbers, thresholds) if site in GRADIENT_SITES else None,
    )


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string())


def _columns(stats: pa.Table, site: str, statistics: Sequence[str] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if statistics is None:
        shown, trend = SITE_STATISTICS[site]
        return shown, (trend,)
    valid = statistics_of(stats)
    wanted = tuple(dict.fromkeys(statistics))
    for name in wanted:
        if name not in valid:
            raise unknown_choice("statistic", name, valid, shown=len(valid))
        if name == "update_ratio" and site != "update":
            raise ConfigError(f"statistic update_ratio belongs to site update, not {site}: --site update")
    return wanted, wanted


def _matching(table: pa.Table, modules: str) -> pa.Table:
    names = pc.unique(_plain(table["module"])).to_pylist()
    matching = [name for name in names if fnmatch.fnmatchcase(name, modules)]
    if not matching:
        raise unknown_choice("module", modules, [name for name in names if name])
    return table.filter(pc.is_in(_plain(table["module"]), pa.array(matching)))


def _keys(table: pa.Table) -> np.ndarray:
    """A number for each row that is the same for the same (module, call, tensor), dense from 0."""
    keys = np.zeros(table.num_rows, dtype=np.int64)
    for name in ("module", "call", "tensor"):
        column = table[name].combine_chunks()
        if not pa.types.is_integer(column.type):
            column = column.cast(pa.string()).fill_null("")
        codes = column.dictionary_encode().indices.to_numpy(zero_copy_only=False)
        keys = keys * (int(codes.max()) + 1) + codes
    return np.unique(keys, return_inverse=True)[1]


def _column(table: pa.Table, name: str) -> np.ndarray:
    if name == "abs_max":
        greatest: np.ndarray = np.maximum(np.abs(_column(table, "min")), np.abs(_column(table, "max")))
        return greatest
    values: np.ndarray = table[name].cast(pa.float64()).to_numpy()
    return values


def _series(table: pa.Table, name: str, keys: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """One statistic as [keys, steps] float64, NaN where there is none: `stats` itself holds no NaN."""
    grid = np.full((int(keys.max()) + 1, len(steps)), np.nan)
    grid[keys, np.searchsorted(steps, table["step"].to_numpy())] = _column(table, name)
    return grid


def _trend(values: np.ndarray, nonfinite: np.ndarray) -> Trend:
    return Trend(tuple(None if math.isnan(value) else value for value in values.tolist()), tuple(nonfinite.tolist()))


def _row(
    one: Mapping[str, Any],
    shown: tuple[str, ...],
    trends: Mapping[str, Trend],
    site: str,
    thresholds: Thresholds | None,
) -> Row:
    numbers = dict(one)
    extremes = one["min"], one["max"]
    numbers["abs_max"] = None if None in extremes else max(abs(extreme) for extreme in extremes)
    return Row(
        depth=one["depth"],
        order=one["order"],
        module=one["module"],
        type=one["type"] or "",
        call=one["call"],
        tensor=one["tensor"] or "",
        status=one["status"],
        values={name: numbers[name] for name in shown},
        trends=trends,
        marks=marks(site, one["type"] or "", numbers, thresholds),
    )


def _sorted(rows: list[Row], sort: str, leading: str) -> tuple[Row, ...]:
    def place(row: Row) -> tuple[float, float]:
        return _place(row.depth, row.order)

    def size(row: Row) -> float:
        value = row.values[leading] if sort == "value" else row.trends[leading].change
        return math.inf if value is None else -abs(value)

    in_order = sorted(rows, key=place)
    return tuple(in_order if sort == "depth" else sorted(in_order, key=size))


def _place(depth: int | None, order: int | None) -> tuple[float, float]:
    return (math.inf if depth is None else depth, math.inf if order is None else order)


def _gradient_ratio(numbers: Sequence[Mapping[str, Any]], thresholds: Thresholds | None) -> GradientRatio | None:
    """First over last layer; among parameters the weights, because a bias may have no gradient by design."""
    placed = [one for one in numbers if one["abs_mean"] is not None and one["depth"] is not None]
    placed = [one for one in placed if one["tensor"] == "weight"] or placed
    placed.sort(key=lambda one: _place(one["depth"], one["order"]))
    if len(placed) < 2:
        return None
    first = placed[0]
    last = next(one for one in placed if one["depth"] == placed[-1]["depth"])
    if first is last or last["abs_mean"] == 0:
        return None
    value = first["abs_mean"] / last["abs_mean"]
    return GradientRatio(first["module"], last["module"], value, gradient_ratio_mark(value, thresholds))

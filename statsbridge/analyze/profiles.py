"""One statistic of one site along the depth of the model, over the steps, and by type of module."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ConfigError
from ..log.schema import SCHEMAS
from .choices import unknown_choice

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Places = Mapping[tuple[str, int], tuple[Any, ...]]

#: What tells the rows of one site and step apart.
IDENTITY = ("module", "call", "tensor")
#: What is said of the module call.
PLACE = ("type", "depth", "order")
_COUNTS = ("nan_count", "inf_count")
_NUMBERS = tuple(
    field.name for field in SCHEMAS["stats"] if (pa.types.is_integer(field.type) or pa.types.is_floating(field.type))
)
#: Every number of a tensor that there is a picture or a profile of.
STATISTICS = (*_NUMBERS[_NUMBERS.index("count") : _NUMBERS.index("shard")], "abs_max")


@dataclass(frozen=True, slots=True)
class Matrix:
    """One statistic of one site: modules in data-flow order by sampled steps.

    `rows`: one for each module call and tensor, with the columns position, module, call, tensor, type, depth, order; by
    depth, then order, then call, what has no depth last. `steps` [steps]: where the site was sampled, ascending.
    `values` [rows, steps]: float64, NaN where there is none. `nonfinite` [rows, steps]: whether the tensor held a NaN
    or an infinity.
    """

    site: str
    statistic: str
    rows: pa.Table
    steps: Integers
    values: Floats
    nonfinite: Flags

    @property
    def nbytes(self) -> int:
        """What it holds in memory."""
        return int(self.values.nbytes + self.nonfinite.nbytes + self.steps.nbytes + self.rows.nbytes)

    def column(self, step: int | None) -> int:
        """The place of a step, of the last one for None. Raises ConfigError that names the nearest sampled ones."""
        if step is None:
            return len(self.steps) - 1
        found = np.flatnonzero(self.steps == step)
        if len(found) == 0:
            raise not_sampled(step, self.steps)
        return int(found[0])


def not_sampled(step: int, steps: Iterable[int]) -> ConfigError:
    """The error for a step that was not sampled, the nearest ones first."""
    nearest = sorted((int(one) for one in steps), key=lambda sampled: (abs(sampled - step), sampled))
    return unknown_choice("step", f"{step} (not sampled)", nearest)


def check_statistic(statistic: str, site: str) -> None:
    """Raise ConfigError unless rows of `site` may have this statistic."""
    if statistic not in STATISTICS:
        raise unknown_choice("statistic", statistic, STATISTICS, shown=len(STATISTICS))
    if statistic == "update_ratio" and site != "update":
        raise ConfigError(f"statistic update_ratio belongs to site update, not {site}: give site='update'")


def columns_for(*statistics: str) -> tuple[str, ...]:
    """The columns of `stats` that `matrices` needs for these statistics."""
    numbers = [name for one in statistics for name in (("min", "max") if one == "abs_max" else (one,))]
    return tuple(dict.fromkeys(("seq", "attempt", "step", *IDENTITY, *PLACE, *_COUNTS, *numbers)))


def places_of(modules: pa.Table) -> Places:
    """What the last trace says of each module call: (module, call) → the columns `PLACE`."""
    traced = modules.sort_by([("attempt", "ascending"), ("seq", "ascending")])
    names = ("module", "call", *PLACE)
    found = zip(*(traced[name].to_pylist() for name in names), strict=True)
    return {(module, call): tuple(place) for module, call, *place in found}


def with_places(rows: pa.Table, known: Places) -> pa.Table | None:
    """`rows` with the columns `PLACE` as `known` has them; None where it lacks one of the calls."""
    calls, number = numbered(rows, ("module", "call"))
    one_of_each = np.zeros(number, np.int64)
    one_of_each[calls] = np.arange(len(calls))
    identities = rows.take(pa.array(one_of_each)).select(["module", "call"]).to_pylist()
    places = [known.get((one["module"], one["call"])) for one in identities]
    if None in places or not places:
        return None
    for name, values in zip(PLACE, zip(*filter(None, places), strict=True), strict=True):
        kind = SCHEMAS["stats"].field(name).type
        column = pa.array(values, pa.string()).dictionary_encode() if name == "type" else pa.array(values, kind)
        rows = rows.append_column(name, column.take(pa.array(calls)))
    return rows


def matrices(rows: pa.Table, site: str, statistics: Sequence[str]) -> list[Matrix]:
    """Arrange rows of one site, ranks merged, of which there is at least one. Steps without a value are there too."""
    step, attempt = rows["step"].to_numpy(), rows["attempt"].to_numpy()
    keys, numbers = numbered(rows)
    steps = np.sort(pc.unique(rows["step"]).to_numpy())
    # Of several attempts at a step the last one counts: it is put there last.
    order = np.argsort(attempt, kind="stable") if (attempt != attempt[0]).any() else np.arange(len(attempt))
    places = np.full((numbers, len(steps)), -1)
    places[keys[order], _places_among(steps, step)[order]] = order
    there = places >= 0
    latest = places[np.arange(numbers), len(steps) - 1 - there[:, ::-1].argmax(axis=1)]
    described = rows.take(pa.array(latest)).select([*IDENTITY, *PLACE, "seq"])
    by_flow = _flow_order(described)
    places, there = places[by_flow], there[by_flow]
    broken = (rows["nan_count"].to_numpy() + rows["inf_count"].to_numpy()) > 0
    nonfinite = there & broken[places]
    listed = described.take(pa.array(by_flow))
    names = [*IDENTITY, "type", "depth", "order"]
    columns = [pa.array(np.arange(numbers)), *(_plain(listed[name]) for name in names)]
    shown = pa.table(columns, ["position", *names])
    values = (np.where(there, _values(rows, one)[places], np.nan) for one in statistics)
    return [Matrix(site, one, shown, steps, found, nonfinite) for one, found in zip(statistics, values, strict=True)]


def joined(pieces: Sequence[Matrix]) -> Matrix:
    """Matrices of one site and statistic, each of other modules, as one."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    steps = np.unique(np.concatenate([one.steps for one in pieces]))
    listed = pa.concat_tables([one.rows.drop_columns("position") for one in pieces])
    by_flow = _flow_order(listed)
    places = np.empty(len(by_flow), np.int64)
    places[by_flow] = np.arange(len(by_flow))
    values, nonfinite = np.full((len(places), len(steps)), np.nan), np.zeros((len(places), len(steps)), bool)
    begin = 0
    for one in pieces:
        there = np.ix_(places[begin : begin + len(one.values)], _places_among(steps, one.steps))
        values[there], nonfinite[there] = one.values, one.nonfinite
        begin += len(one.values)
    rows = listed.take(pa.array(by_flow)).add_column(0, "position", pa.array(np.arange(len(places))))
    return Matrix(first.site, first.statistic, rows, steps, values, nonfinite)


def depth_profile(found: Matrix, step: int | None) -> pa.Table:
    """One step of a matrix, with the lowest and the highest value that each row had over all its steps.

    Columns position, module, call, tensor, type, depth, order, step, value, low, high; value is null where there is
    none, and so are low and high where there never was one.
    """
    at = found.column(step)
    profile = found.rows.append_column("step", pa.array(np.full(found.rows.num_rows, found.steps[at])))
    low, high = extremes(found.values)
    for name, numbers in (("value", found.values[:, at]), ("low", low), ("high", high)):
        profile = profile.append_column(name, pa.array(numbers, from_pandas=True))
    return profile


def by_type(found: Matrix, step: int | None) -> pa.Table:
    """The modules of each type at one step: columns type, members, value (their median), low, high.

    Types in the order in which the data meets them; `members` counts those that have a number. Null where none has.
    """
    values = found.values[:, found.column(step)]
    types = np.array([kind or "" for kind in found.rows["type"].to_pylist()], dtype=object)
    names = list(dict.fromkeys(types.tolist()))
    groups = [values[types == name] for name in names]
    groups = [numbers[~np.isnan(numbers)] for numbers in groups]
    columns = [pa.array(names, pa.string()), pa.array([len(numbers) for numbers in groups], pa.int64())]
    for measure in (np.median, np.min, np.max):
        columns.append(pa.array([float(measure(one)) if len(one) else None for one in groups], pa.float64()))
    return pa.table(columns, ["type", "members", "value", "low", "high"])


def gradient_flow(gradients: Matrix, others: Sequence[Matrix | None]) -> pa.Table:
    """Norms of gradient, parameter and update of each parameter at one step, in data-flow order.

    `gradients` and `others` (parameter, update, update ratio) have one step each. Columns position, module, call, type,
    tensor, depth, gradient_norm, parameter_norm, update_norm, gradient_to_parameter, update_to_parameter: L2 norms,
    null where one was not measured; a ratio is null too where the parameter's norm is 0.
    """
    rows = gradients.rows
    names = list(zip(*(rows[name].to_pylist() for name in ("module", "tensor")), strict=True))
    gradient = gradients.values[:, 0]
    parameter, update, ratio = (_aligned(names, other) for other in others)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(parameter > 0, gradient / parameter, np.nan)
    flow = rows.select(["position", "module", "call", "type", "tensor", "depth"])
    for name, numbers in (
        ("gradient_norm", gradient),
        ("parameter_norm", parameter),
        ("update_norm", update),
        ("gradient_to_parameter", relative),
        ("update_to_parameter", ratio),
    ):
        flow = flow.append_column(name, pa.array(numbers, from_pandas=True))
    return flow


def extremes(values: Floats) -> tuple[Floats, Floats]:
    """Lowest and highest of each row of [rows, steps], NaN where a row has no number."""
    missing = np.isnan(values)
    nothing = missing.all(axis=1)
    low = np.where(missing, np.inf, values).min(axis=1)
    high = np.where(missing, -np.inf, values).max(axis=1)
    return np.where(nothing, np.nan, low), np.where(nothing, np.nan, high)


def _aligned(names: Sequence[tuple[str, str]], other: Matrix | None) -> Floats:
    if other is None:
        return np.full(len(names), np.nan)
    there = zip(*(other.rows[name].to_pylist() for name in ("module", "tensor")), strict=True)
    known = dict(zip(there, other.values[:, 0].tolist(), strict=True))
    return np.array([known.get(name, np.nan) for name in names], np.float64)


def _values(rows: pa.Table, statistic: str) -> Floats:
    if statistic == "abs_max":
        return np.maximum(np.abs(_values(rows, "min")), np.abs(_values(rows, "max")))
    numbers: Floats = rows[statistic].cast(pa.float64()).to_numpy()
    return numbers


def numbered(rows: pa.Table, names: Sequence[str] = IDENTITY) -> tuple[Integers, int]:
    """The number of each row's identity, and how many there are."""
    keys = np.zeros(rows.num_rows, np.int64)
    most = 1
    for name in names:
        column = rows[name].combine_chunks()
        codes = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        indices = pc.fill_null(codes.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64) + 1
        most *= len(codes.dictionary) + 1
        keys = keys * (len(codes.dictionary) + 1) + indices
    if most > 4 * len(keys) + 1000:
        there, numbers = np.unique(keys, return_inverse=True)
        return numbers, len(there)
    present = np.zeros(most, bool)
    present[keys] = True
    return (np.cumsum(present) - 1)[keys], int(present.sum())


def _places_among(steps: Integers, wanted: Integers) -> Integers:
    """The place of each of `wanted` among the ascending `steps`, which has them all."""
    first, last = int(steps[0]), int(steps[-1])
    if last - first > 64 * len(steps):
        places: Integers = np.searchsorted(steps, wanted)
        return places
    numbers = np.zeros(last - first + 1, np.int64)  # many times as fast
    numbers[steps - first] = np.arange(len(steps))
    return numbers[wanted - first]


def _flow_order(described: pa.Table) -> Integers:
    """By depth, then order, then call, what has none last; then as written, where `seq` says so, else as they are."""
    last = np.iinfo(np.int64).max
    names = [name for name in ("seq", "call", "order", "depth") if name in described.column_names]
    return np.lexsort([pc.fill_null(described[name], last).to_numpy() for name in names])


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Text as strings, `""` for null."""
    if not (pa.types.is_dictionary(column.type) or pa.types.is_string(column.type)):
        return column
    return pc.fill_null(column.cast(pa.string()), "")

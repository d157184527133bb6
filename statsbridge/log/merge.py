"""Rows of several ranks become one row each: what the model did, not what one rank saw of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..moments import COUNTS, STATISTICS, Integers, merge_rows
from .schema import as_lists

Flags = npt.NDArray[np.bool_]

_KEY = ("attempt", "step", "module", "call", "site", "tensor")
# Of these a rank holds all or a share; where no share was recorded, as by schema version 1, it was all of it.
_OF_THE_MODEL = ("parameter", "parameter_grad", "update", "optimizer_state")
# Where a row has no numbers for one of these reasons, there were none on its rank to miss.
_NOTHING_HERE = ("empty", "replicated")
# Equal tensors may have been measured on unlike machines.
_ROUNDING = 1e-5


def merge_ranks(stats: pa.Table) -> pa.Table:
    """`stats` with one row for each (attempt, step, module, call, site, tensor).

    `stats` is sorted by (rank, seq). What each rank has of its own (the activations of its part of the batch) and
    the shards of one tensor merge exactly, as if all elements had been measured together, but for
    `kl_unit_gaussian`, which is null there; `update_ratio` is that of the merged norms. Of ranks that hold the same
    elements the lowest one's row counts. Everything that is not a statistic is the lowest rank's; a status is that of
    the lowest rank that has one, and none where numbers are missing only on ranks that had no elements.

    A number of a part of a tensor is no number of the tensor. Where not every shard was recorded the status is
    `shards_missing`, and where ranks that should hold the same elements do not (their counts differ, or minimum or
    maximum by more than rounding) it is `copies_differ`. The rows of a single process are returned unchanged.
    """
    cut = (_filled(stats, "shards") > 1).any()
    if stats.num_rows == 0 or (not cut and pc.count_distinct(stats["rank"]).as_py() == 1):
        return stats
    pieces = _pieces(stats, _KEY, pc.is_in(stats["site"].cast(pa.string()), pa.array(_OF_THE_MODEL)).to_numpy())
    merged = stats.take(pa.array(pieces.base))
    several = np.bincount(pieces.group, pieces.used, len(pieces.base)) > 1
    taken = np.flatnonzero(pieces.used & several[pieces.group])
    spoiled = np.zeros(len(several), bool)
    if len(taken):
        rows, owners = stats.take(pa.array(taken)), pieces.group[taken]
        merged, spoiled = _merge_status(_merge_numbers(merged, rows, owners), rows, owners)
    merged = _without_numbers(merged, spoiled & pieces.cut)
    for reason, where in (("shards_missing", pieces.missing), ("copies_differ", _copies_differ(stats, pieces))):
        merged = _without_numbers(_fill(merged, "status", np.flatnonzero(where), reason), where)
    return _with_ratios(merged, pieces.cut) if pieces.cut.any() else merged


def merge_scalars(scalars: pa.Table) -> pa.Table:
    """`scalars` with one row for each norm that the ranks know together, under its own name.

    `scalars` is sorted by (rank, seq). The rows `shard/…` of all ranks give `grad_norm`, `grad_norm_applied`,
    `param_norm` and `update_ratio`; what each rank has recorded of the whole model is there once, as the lowest rank
    has it. All else stays as it is: the user's own values, which no rule says how to combine, shards of which some
    are missing, and values that should be the same on all ranks and are not.
    """
    shared = np.flatnonzero(_filled(scalars, "shards") > 0)
    if len(shared) == 0:
        return scalars
    rows = scalars.take(pa.array(shared))
    pieces = _pieces(rows, ("attempt", "step", "iteration", "name"), np.zeros(len(shared), bool))
    values, groups = rows["value"].to_numpy(), len(pieces.base)
    same = np.isclose(values, values[pieces.twin], rtol=_ROUNDING, atol=0, equal_nan=True)
    known = ~pieces.missing & (np.bincount(pieces.group, ~same, groups) == 0)
    norms = np.zeros(groups)
    np.hypot.at(norms, pieces.group[pieces.used], values[pieces.used])
    # An infinity beside a NaN is the answer to np.hypot, and no norm.
    norms[pieces.group[np.isnan(values)]] = np.nan
    norms = np.where(pieces.cut, norms, values[pieces.base])
    base = rows.take(pa.array(pieces.base))
    names = base["name"].to_pylist()
    alone = []
    whens = list(zip(*(base[name].to_pylist() for name in ("attempt", "step", "iteration")), strict=True))
    below = {whens[n]: n for n, name in enumerate(names) if name == "shard/param_norm_before"}
    for n in [n for n, name in enumerate(names) if name == "shard/update_norm"]:
        before = below.get(whens[n])
        if before is None or not (known[n] and known[before]):
            known[[n] if before is None else [n, before]] = False
            continue
        names[n] = "update_ratio"
        alone.append(before)
        if norms[before] == 0:
            alone.append(n)
        else:
            norms[n] /= norms[before]
    places = np.flatnonzero(known)
    changed = shared[pieces.base[places]]
    plain = [names[n].removeprefix("shard/") for n in places]
    result = _replace(scalars, "value", changed, pa.array(norms[places]))
    result = _replace(result, "name", changed, pa.array(plain, pa.string()).dictionary_encode())
    result = _fill(_fill(result, "shard", changed, 0), "shards", changed, 1)
    keep = np.ones(scalars.num_rows, bool)
    keep[shared[known[pieces.group]]] = False
    keep[changed] = True
    keep[shared[pieces.base[alone]]] = False
    return result.filter(pa.array(keep))


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Which rows of several ranks are about the same thing, and which of them count.

    `group` [rows]: the number of what a row is about. `used` [rows]: whether it counts, that is, no lower rank has a
    row of the same elements. `twin` [rows]: the row that counts for its elements. `base` [groups]: the first that
    counts. `cut` [groups]: whether it is cut into shards. `missing` [groups]: whether some of these are not there.
    """

    group: Integers
    used: Flags
    twin: Integers
    base: Integers
    cut: Flags
    missing: Flags


def _pieces(rows: pa.Table, key: Sequence[str], of_the_model: Flags) -> _Pieces:
    """`of_the_model`: of which rows each rank has a copy, where it has recorded no share."""
    group, base = _groups(rows, key)
    groups = len(base)
    shard, shards = _filled(rows, "shard"), _filled(rows, "shards")
    own = (shards == 0) & ~of_the_model
    # What is a rank's own is no other's: numbers beyond those of shards.
    piece = np.where(own, int(shard.max()) + 1 + rows["rank"].to_numpy(), shard)
    elements = group * (int(piece.max()) + 2) + piece + 1
    _, first, inverse = np.unique(elements, return_index=True, return_inverse=True)
    twin = first[inverse]
    # A process outside of a tensor's mesh has no shard of it: -1.
    used = (twin == np.arange(len(twin))) & (shard >= 0)
    numbers = np.flatnonzero(used)[::-1]
    base[group[numbers]] = numbers
    wanted = np.zeros(groups, np.int64)
    np.maximum.at(wanted, group, shards)
    present = np.bincount(group, used, groups)
    return _Pieces(group, used, twin, base, wanted > 1, (wanted > 1) & (present < wanted))


def _groups(rows: pa.Table, key: Sequence[str]) -> tuple[Integers, Integers]:
    """The group number of each row, and the first row of each group, groups in the order of these rows."""
    group = np.zeros(rows.num_rows, np.int64)
    for name in key:
        column = rows[name].combine_chunks()
        codes = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        indices = pc.fill_null(codes.indices, -1).to_numpy().astype(np.int64) + 1
        # Renumbered at every column, so that the products cannot overflow.
        group = np.unique(group * (int(indices.max()) + 1) + indices, return_inverse=True)[1]
    _, first, inverse = np.unique(group, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[inverse], first[order]


def _merge_numbers(merged: pa.Table, rows: pa.Table, owners: Integers) -> pa.Table:
    """`merged` with the statistics of `rows` merged into the rows `owners`."""
    numbers, members = np.unique(owners, return_inverse=True)
    columns = {name: rows[name].to_numpy() for name in (*COUNTS, *STATISTICS)}
    histogram = histograms(rows)
    if histogram is not None:
        columns["histogram"] = histogram
    results = merge_rows(columns, members, len(numbers))
    for name in (*COUNTS, *STATISTICS):
        merged = _replace(merged, name, numbers, pa.array(results[name], from_pandas=True))
    bins = pa.nulls(len(numbers), pa.list_(pa.int64()))
    if histogram is not None:
        bins = pc.if_else(pa.array(np.isnan(results["min"])), bins, as_lists(results["histogram"]))
    merged = _replace(merged, "histogram", numbers, bins)
    shared = np.unique(owners[_filled(rows, "shards") > 0])
    return _fill(_fill(merged, "shard", shared, 0), "shards", shared, 1)


def histograms(rows: pa.Table) -> Integers | None:
    """The histograms, shape [rows, bins], of zeros where there are no numbers; None where some are missing."""
    there = rows["histogram"].is_valid().to_numpy()
    finite = rows["count"].to_numpy() - rows["nan_count"].to_numpy() - rows["inf_count"].to_numpy()
    if not there.any() or (finite[~there] > 0).any():
        return None
    flat = rows["histogram"].combine_chunks().flatten().to_numpy()
    bins = np.zeros((rows.num_rows, len(flat) // int(there.sum())), np.int64)
    bins[there] = flat.reshape(int(there.sum()), -1)
    return bins


def _merge_status(merged: pa.Table, rows: pa.Table, owners: Integers) -> tuple[pa.Table, Flags]:
    """`merged` with the status of the rows `owners`; the second: which have numbers of some of their rows only."""
    groups = merged.num_rows
    silent = rows["status"].is_valid().to_numpy()
    nothing = pc.is_in(rows["status"].cast(pa.string()), pa.array(_NOTHING_HERE)).to_numpy()
    only_nothing = np.bincount(owners, ~nothing, groups) == 0
    telling = np.flatnonzero(silent & (~nothing | only_nothing[owners]))
    numbers = np.unique(owners)
    merged = _replace(merged, "status", numbers, pa.nulls(len(numbers), merged["status"].type))
    said, first = np.unique(owners[telling], return_index=True)
    merged = _replace(merged, "status", said, rows["status"].take(pa.array(telling[first])).combine_chunks())
    failed = np.bincount(owners, silent & ~nothing, groups) > 0
    return merged, failed & (np.bincount(owners, ~silent, groups) > 0)


def _copies_differ(stats: pa.Table, pieces: _Pieces) -> Flags:
    """In which groups rows that should be of the same elements are not, as far as their shares were recorded."""
    counted = stats["status"].is_null().to_numpy() & (_filled(stats, "shards") > 0)
    copies = np.flatnonzero(counted & counted[pieces.twin] & (pieces.twin != np.arange(len(counted))))
    twins = pieces.twin[copies]
    low, high = stats["min"].to_numpy(), stats["max"].to_numpy()
    reach = _ROUNDING * np.fmax(np.abs(low), np.abs(high))[twins]
    differ = np.zeros(len(copies), bool)
    for name in COUNTS:
        numbers = stats[name].to_numpy()
        differ |= numbers[copies] != numbers[twins]
    for numbers in (low, high):
        differ |= np.abs(numbers[copies] - numbers[twins]) > reach
    return np.bincount(pieces.group[copies], differ, len(pieces.base)) > 0


def _with_ratios(merged: pa.Table, cut: Flags) -> pa.Table:
    """`merged` with the `update_ratio` of updates that were cut: of the norms of the whole."""
    site = merged["site"].cast(pa.string())
    updates = np.flatnonzero(cut & pc.equal(site, "update").to_numpy())
    parameters = np.flatnonzero(pc.equal(site, "parameter").to_numpy())
    about, _ = _groups(merged, [name for name in _KEY if name != "site"])
    l2 = merged["l2"].to_numpy()
    before = np.full(merged.num_rows, np.nan)
    before[about[parameters]] = l2[parameters]
    before = before[about[updates]]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(before > 0, l2[updates] / before, np.nan)
    return _replace(merged, "update_ratio", updates, pa.array(ratios, from_pandas=True))


def _without_numbers(table: pa.Table, where: Flags) -> pa.Table:
    """`table` without statistics in the rows `where`, as in every row in which nothing was measured."""
    places = np.flatnonzero(where)
    for name in COUNTS:
        table = _fill(table, name, places, 0)
    for name in (*STATISTICS, "update_ratio", "histogram"):
        table = _replace(table, name, places, pa.nulls(len(places), table[name].type))
    return table


def _filled(table: pa.Table, name: str) -> Integers:
    """A column of integers, 0 for null."""
    numbers: Integers = pc.fill_null(table[name], 0).to_numpy()
    return numbers


def _fill(table: pa.Table, name: str, places: Integers, value: object) -> pa.Table:
    """`table` with one value at the rows `places` of column `name`."""
    kind = table[name].type
    values = pa.array([value] * len(places), kind.value_type if pa.types.is_dictionary(kind) else kind)
    return _replace(table, name, places, values.cast(kind) if values.type == kind else values.dictionary_encode())


def _replace(table: pa.Table, name: str, positions: Integers, values: pa.Array) -> pa.Table:
    """`table` with `values` at the rows `positions` of column `name`."""
    if len(positions) == 0:
        return table
    chosen = np.arange(table.num_rows)
    chosen[positions] = table.num_rows + np.arange(len(positions))
    both = pa.chunked_array([*table[name].chunks, values], type=table[name].type).unify_dictionaries()
    number = table.schema.get_field_index(name)
    return table.set_column(number, table.schema.field(name), both.take(pa.array(chosen)))

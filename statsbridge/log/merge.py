"""Rows of several ranks become one row each: what the model did, not what one rank saw of it."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..moments import COUNTS, STATISTICS, Integers, merge_rows
from .schema import as_lists

_KEY = ("attempt", "step", "module", "call", "site", "tensor")
# Under data parallelism each rank holds all of these: adding them up would count them once a rank.
_REPLICATED = ("parameter", "parameter_grad", "update")


def merge_ranks(stats: pa.Table) -> pa.Table:
    """`stats` with one row for each (attempt, step, module, call, site, tensor).

    `stats` is sorted by (rank, seq). Rows of several ranks merge exactly, but for `kl_unit_gaussian`, which
    is null there. Everything that is not a statistic is the lowest rank's (a status: of the lowest rank that
    has one), and so is the whole row of a parameter, its gradient or its update. With one rank the rows are
    returned unchanged.
    """
    if stats.num_rows == 0 or pc.count_distinct(stats["rank"]).as_py() == 1:
        return stats
    group, lowest = _groups(stats)
    replicated = pc.is_in(stats["site"].cast(pa.string()), pa.array(_REPLICATED)).to_numpy()
    shared = np.bincount(group)[group] > 1
    taken = np.flatnonzero(shared & ~replicated)
    merged = stats.take(pa.array(lowest))
    if len(taken) == 0:
        return merged
    rows = stats.take(pa.array(taken))
    numbers, members = np.unique(group[taken], return_inverse=True)
    columns = {name: rows[name].to_numpy() for name in (*COUNTS, *STATISTICS)}
    if has_histograms := rows["histogram"].null_count == 0:
        columns["histogram"] = rows["histogram"].combine_chunks().flatten().to_numpy().reshape(len(taken), -1)
    results = merge_rows(columns, members, len(numbers))
    for name in (*COUNTS, *STATISTICS):
        merged = _replace(merged, name, numbers, pa.array(results[name], from_pandas=True))
    bins = as_lists(results["histogram"]) if has_histograms else pa.nulls(len(numbers), pa.list_(pa.int64()))
    merged = _replace(merged, "histogram", numbers, bins)
    with_status = np.flatnonzero(rows["status"].is_valid().to_numpy())
    said, first = np.unique(group[taken][with_status], return_index=True)
    return _replace(merged, "status", said, rows["status"].take(pa.array(with_status[first])).combine_chunks())


def _groups(stats: pa.Table) -> tuple[Integers, Integers]:
    """The group number of each row, and the first row of each group, groups in the order of these rows."""
    group = np.zeros(stats.num_rows, np.int64)
    for name in _KEY:
        column = stats[name].combine_chunks()
        codes = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        indices = pc.fill_null(codes.indices, -1).to_numpy().astype(np.int64) + 1
        # Renumbered at every column, so that the products cannot overflow.
        group = np.unique(group * (int(indices.max()) + 1) + indices, return_inverse=True)[1]
    _, first, inverse = np.unique(group, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[inverse], first[order]


def _replace(table: pa.Table, name: str, positions: Integers, values: pa.Array) -> pa.Table:
    """`table` with `values` at the rows `positions` of column `name`."""
    chosen = np.arange(table.num_rows)
    chosen[positions] = table.num_rows + np.arange(len(positions))
    both = pa.chunked_array([*table[name].chunks, values], type=table[name].type).unify_dictionaries()
    number = table.schema.get_field_index(name)
    return table.set_column(number, table.schema.field(name), both.take(pa.array(chosen)))

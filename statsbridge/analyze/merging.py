"""Rows of statistics merged over steps, calls, modules or types, as if all their elements had been measured at once."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..log.merge import histograms
from ..log.schema import as_lists
from ..moments import COUNTS, STATISTICS, AnyArray, merge_rows
from .choices import unknown_choice
from .profiles import numbered

#: What rows may be merged over; a call is a call of one module, so it goes with it.
DIMENSIONS = ("step", "call", "tensor", "module", "type")
_KEY = ("step", "module", "type", "call", "site", "tensor")


def columns_kept(dimensions: Sequence[str]) -> tuple[str, ...]:
    """The columns that still tell rows apart. Raises ConfigError for something that cannot be merged over."""
    for dimension in dimensions:
        if dimension not in DIMENSIONS:
            raise unknown_choice("dimension", dimension, DIMENSIONS)
    gone = {*dimensions, *(["call"] if "module" in dimensions else [])}
    return tuple(name for name in _KEY if name not in gone)


def merge_over(rows: pa.Table, dimensions: Sequence[str]) -> pa.Table:
    """One row for each combination of what is left when `dimensions` are merged, sorted by it.

    Args:
        rows: rows of `stats`, ranks merged.
        dimensions: some of `DIMENSIONS`.

    Returns:
        The columns that are left of step, module, type, call, site, tensor; `rows`, how many were merged; the counts
        and statistics of `stats`, and `histogram` where every row with numbers has one. Exact (see `moments`), but for
        `kl_unit_gaussian`, which does not merge: null where more than one row went in. A statistic that is null in one
        of the rows is null, unless that row has no elements.

    Raises ConfigError for something that cannot be merged over.
    """
    keys = columns_kept(dimensions)
    number, count = numbered(rows, keys)
    one_of_each = np.zeros(count, np.int64)
    one_of_each[number] = np.arange(rows.num_rows)
    groups = rows.take(pa.array(one_of_each)).select(list(keys))
    groups = pa.table([_plain(column) for column in groups.columns], list(keys))
    order = pc.sort_indices(groups, [(name, "ascending") for name in keys]).to_numpy()
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    owner = place[number]
    columns: dict[str, AnyArray] = {name: rows[name].to_numpy() for name in (*COUNTS, *STATISTICS)}
    bins = histograms(rows)
    if bins is not None:
        columns["histogram"] = bins
    merged = merge_rows(columns, owner, count)
    sizes = np.bincount(owner, minlength=count)
    alone = sizes == 1
    merged["kl_unit_gaussian"][alone] = columns["kl_unit_gaussian"][one_of_each[order][alone]]
    result = groups.take(pa.array(order)).append_column("rows", pa.array(sizes))
    for name in (*COUNTS, *STATISTICS):
        result = result.append_column(name, pa.array(merged[name], from_pandas=True))
    nothing = pa.nulls(count, pa.list_(pa.int64()))
    return result.append_column("histogram", nothing if bins is None else as_lists(merged["histogram"]))


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Text as strings, `""` for null: nulls do not join."""
    return pc.fill_null(column.cast(pa.string()), "") if pa.types.is_dictionary(column.type) else column

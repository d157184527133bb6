"""The `histogram` column as histograms that a tracker can draw."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pyarrow as pa

from ..moments import HISTOGRAM_BINS, ZERO_BIN, histogram_edges
from .contract import Histogram, Series
from .identities import Floats, Integers, StatsRows


@cache
def _inner_edges() -> Floats:
    """The edges between the bins that are left when the three around zero are one."""
    edges = histogram_edges()
    inner: Floats = np.concatenate((edges[: ZERO_BIN - 1], edges[ZERO_BIN + 1 :]))
    inner.flags.writeable = False
    return inner


def drawable(counts: Integers, low: float, high: float) -> tuple[Integers, Floats]:
    """Counts and edges of one row of the `histogram` column, without the empty bins at both ends.

    Exact zeros and what lies within ±2⁻⁶⁴ are one bin, because a bin of no width cannot be drawn. The bins
    beyond ±2³², which have no end, end at the extremes `low` and `high`; at the largest float where those are
    not known.
    """
    around_zero = counts[ZERO_BIN - 1 : ZERO_BIN + 2].sum(keepdims=True)
    joined = np.concatenate((counts[: ZERO_BIN - 1], around_zero, counts[ZERO_BIN + 2 :]))
    inner = _inner_edges()
    limit = np.finfo(np.float64).max
    start = np.nextafter(low, -np.inf) if low <= inner[0] else -limit
    end = np.nextafter(high, np.inf) if high >= inner[-1] else limit
    edges = np.concatenate(([max(start, -limit)], inner, [min(end, limit)]))
    used = np.flatnonzero(joined)
    first, last = (int(used[0]), int(used[-1])) if len(used) else (0, 0)
    return joined[first : last + 1], edges[first : last + 2]


def counted_rows(rows: StatsRows, wanted: np.ndarray) -> Integers:
    """The numbers of those `wanted` rows whose histogram counts anything."""
    chosen = np.flatnonzero(wanted & rows.present("histogram"))
    counted: Integers = chosen[_counts(rows, chosen).any(axis=1)]
    return counted


def _counts(rows: StatsRows, chosen: Integers) -> Integers:
    """The histograms of these rows, int64 [rows, bins]."""
    column = rows.table["histogram"].take(pa.array(chosen)).combine_chunks()
    counts: Integers = column.flatten().to_numpy().reshape(len(chosen), HISTOGRAM_BINS)
    return counts


def make_histograms(rows: StatsRows, chosen: Integers, series: Sequence[Series]) -> list[Histogram]:
    """The histograms of the rows `chosen`, of the curves `series`, in that order."""
    counts = _counts(rows, chosen)
    low, high = rows.column("min")[chosen].tolist(), rows.column("max")[chosen].tolist()
    steps, times = rows.step[chosen].tolist(), rows.time[chosen].tolist()
    return [
        Histogram(one, step, time, *drawable(row, lowest, highest))
        for one, step, time, row, lowest, highest in zip(series, steps, times, counts, low, high, strict=True)
    ]

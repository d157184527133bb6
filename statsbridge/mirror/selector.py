"""From committed rows to what a tracker gets: curves within a budget, histograms, alerts and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..wording import counted
from .aggregates import PooledRows
from .contract import Batch, Event, Point
from .curves import Curves
from .heat import HeatMaps
from .histograms import counted_rows, make_histograms
from .identities import Floats, Integers, StatsRows, moments
from .scalar_curves import ScalarCurves, ScalarRows
from .selection import Selection
from .statistic_curves import HAND_LOGGED, NewCurve, StatisticCurves, decide

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from .tail import Chunk

_SCALAR, _SMOOTHED, _STATISTIC, _AGGREGATE, _HISTOGRAM = range(5)
_ARRAYS = ("moment", "aside", "curve", "step", "time", "value")
_NOT_CURVES = frozenset({"histogram"})


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Points in the making, one entry of each array a point.

    `moment`: the training step in whose course they were recorded; `aside`: they are for another step.
    """

    part: int
    moment: Integers
    aside: np.ndarray
    curve: Integers
    step: Integers
    time: Integers
    value: Floats | Integers

    def chosen(self, which: np.ndarray) -> _Numbers:
        return _Numbers(self.part, *(getattr(self, name)[which] for name in _ARRAYS))


class Selector:
    """One mirror's choice, and what it remembers: curves begun, moving averages, the heat maps.

    Give it the chunks of a run in order, from the first. What it makes of a row does not depend on how the
    rows were cut into chunks.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._curves = Curves(selection.max_series)
        self._scalars = ScalarCurves(self._curves, selection.smoothing)
        self._statistics = StatisticCurves(selection, self._curves)
        self._heat = HeatMaps(selection)
        self._modules: dict[str, bool] = {}

    def add(self, chunk: Chunk) -> list[Batch]:
        """The points and histograms of the next rows: of each step in a row, steps ascending within a batch.

        What `run.log` recorded for another step than the one it was called in makes a batch of its own.
        """
        scalars = self._scalars.rows(chunk.scalars)
        stats = self._chosen(chunk.stats)
        attempt = np.concatenate((scalars.attempt, stats["attempt"].to_numpy()))
        moment = moments(attempt, np.concatenate((scalars.position, stats["step"].to_numpy())))
        split = len(scalars.step)
        rows = self._statistics.identities.rows(stats, moment[split:])
        pooled = self._pooled(rows)
        began = self._begin(scalars, moment[:split], rows, pooled)
        parts = [*self._of_scalars(scalars, moment[:split]), *self._of_stats(rows), *self._of_pools(pooled, began)]
        self._heat.add(rows, self._statistics.identities, attempt[split:])
        attempt_at = np.zeros(int(moment.max(initial=-1)) + 1, np.int64)
        attempt_at[moment] = attempt
        return self._batches(parts, rows, attempt_at)

    def events(self, chunk: Chunk) -> list[Event]:
        """The events that become alerts."""
        severities = pc.unique(chunk.events["severity"].cast(pa.string())).to_pylist()
        alerting = [severity for severity in severities if severity and self._selection.alerting(severity)]
        chosen = chunk.events.filter(
            pc.is_in(chunk.events["severity"].cast(pa.string()), pa.array(alerting, pa.string()))
        )
        times = chosen["time"].cast(pa.int64()).to_pylist()
        fields = [name for name in Event.__dataclass_fields__ if name != "time"]
        return [
            Event(**{name: row[name] for name in fields}, time=time)
            for row, time in zip(chosen.to_pylist(), times, strict=True)
        ]

    def figures(self, final: bool) -> list[tuple[str, go.Figure, int]]:
        """The heat maps that are due, as (name, figure, last step). `final`: nothing more will come."""
        return self._heat.figures(final)

    def left_out(self) -> str | None:
        """What the budget had no room for so far, in a sentence; None where there was room for all."""
        missing = self._curves.left_out
        if not missing:
            return None
        words = {
            "scalar": ("scalar", ""),
            "aggregate": ("aggregate", " by type"),
            "statistic": ("statistic", " of modules"),
        }
        made = ", ".join(
            counted(sum(series.kind == kind for series in self._curves.series), noun) + rest
            for kind, (noun, rest) in words.items()
        )
        lost = " and ".join(
            counted(missing[kind], noun) + rest for kind, (noun, rest) in words.items() if missing[kind]
        )
        return (
            f"the tracker gets {counted(len(self._curves.series), 'curve')} ({made}); "
            f"max_series={self._selection.max_series} leaves out {lost}. `statsbridge show` has everything"
        )

    # ------------------------------------------------------------------ inside

    def _chosen(self, stats: pa.Table) -> pa.Table:
        """The rows of modules that were asked for, of whole tensors."""
        if stats["shards"].null_count < stats.num_rows:
            # One rank's piece of a sharded tensor has the whole one's name but not its numbers.
            stats = stats.filter(pc.fill_null(pc.less_equal(stats["shards"], 1), True))
        if self._selection.modules == ("*",):
            return stats
        column = stats["module"].combine_chunks()
        for name in column.dictionary.to_pylist():
            if name not in self._modules:
                self._modules[name] = self._selection.module(name)
        wanted = np.array([self._modules[name] for name in column.dictionary.to_pylist()] + [False])
        # What a user logs by hand belongs to no module, so no pattern means to leave it out.
        by_hand = pc.is_in(stats["site"].cast(pa.string()), pa.array(sorted(HAND_LOGGED))).to_numpy()
        kept = wanted[pc.fill_null(column.indices, -1).to_numpy(zero_copy_only=False)] | by_hand
        return stats.filter(pa.array(kept))

    def _pooled(self, rows: StatsRows) -> PooledRows:
        if self._selection.aggregates:
            return self._statistics.pools.merge(rows, self._statistics.identities)
        nothing = np.zeros(0, np.int64)
        return PooledRows(nothing, nothing, nothing, nothing, {})

    def _begin(self, scalars: ScalarRows, moment: Integers, rows: StatsRows, pooled: PooledRows) -> dict[int, int]:
        """Make the curves that begin in this chunk, step by step; the moment at which each of them begins."""
        self._statistics.grow()
        waiting: dict[int, list[NewCurve]] = {}
        for new in self._statistics.new(rows, pooled):
            waiting.setdefault(new.moment, []).append(new)
        unseen = self._scalars.unseen(scalars)
        began: dict[int, int] = {}
        for now in sorted({*waiting, *moment[unseen].tolist()}):
            self._scalars.begin(scalars, unseen[moment[unseen] == now])
            began.update(dict.fromkeys(decide(self._curves, waiting.get(now, [])), now))
        return began

    def _of_scalars(self, rows: ScalarRows, moment: Integers) -> list[_Numbers]:
        aside = rows.step != rows.position
        raw = self._scalars.numbers(rows)
        smoothed, averages = self._scalars.smoothed(rows)
        parts = [
            _Numbers(_SCALAR, moment, aside, raw, rows.step, rows.time, rows.value),
            _Numbers(_SMOOTHED, moment, aside, smoothed, rows.step, rows.time, averages),
        ]
        return [part.chosen(part.curve >= 0) for part in parts]

    def _of_stats(self, rows: StatsRows) -> list[_Numbers]:
        nothing = np.zeros(len(rows.step), bool)
        parts = []
        for statistic in self._statistics.of_identity.statistics(0):
            if statistic in _NOT_CURVES:
                continue
            curve = self._statistics.of_identity.column(statistic, rows.identity)
            values = rows.column(statistic)
            part = _Numbers(_STATISTIC, rows.moment, nothing, curve, rows.step, rows.time, values)
            parts.append(part.chosen((curve >= 0) & ~np.isnan(values)))
        return parts

    def _of_pools(self, rows: PooledRows, began: dict[int, int]) -> list[_Numbers]:
        start = np.full(len(self._curves.series) + 1, -1)
        for number, moment in began.items():
            start[number] = moment
        nothing = np.zeros(len(rows.step), bool)
        parts = []
        for statistic in self._statistics.of_pool.statistics(0):
            if statistic not in rows.columns:
                continue
            curve = self._statistics.of_pool.column(statistic, rows.pool)
            values = rows.columns[statistic]
            part = _Numbers(_AGGREGATE, rows.moment, nothing, curve, rows.step, rows.time, values)
            parts.append(part.chosen((curve >= 0) & ~np.isnan(values) & (rows.moment >= start[curve])))
        return parts

    def _batches(self, parts: Sequence[_Numbers], rows: StatsRows, attempt_at: Integers) -> list[Batch]:
        """All parts in the order of the steps, cut at a new attempt, and where a step is not the current one."""
        curve = self._statistics.of_identity.column("histogram", rows.identity)
        at = counted_rows(rows, curve >= 0)
        # In place of a value the number of the row.
        row = _Numbers(
            _HISTOGRAM, rows.moment[at], np.zeros(len(at), bool), curve[at], rows.step[at], rows.time[at], at
        )
        parts = [*parts, row]
        moment, aside, curve, step, time, value = (
            np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS
        )
        part = np.repeat([part.part for part in parts], [len(part.step) for part in parts])
        # Stable: within one of these the order of recording stays.
        order = np.lexsort((part, aside, moment))
        part, aside, step, attempt = part[order], aside[order], step[order], attempt_at[moment[order]]
        series = np.empty(len(self._curves.series), object)
        series[:] = self._curves.series
        is_point = part != _HISTOGRAM
        at = order[is_point]
        columns = (series[curve[at]].tolist(), step[is_point].tolist(), time[at].tolist(), value[at].tolist())
        # As Point._make does, which would cost a call of Python's for each.
        points = list(map(partial(tuple.__new__, Point), zip(*columns, strict=True)))
        at = order[~is_point]
        histograms = make_histograms(rows, value[at].astype(np.int64), series[curve[at]].tolist())
        cuts = np.flatnonzero((np.diff(step) < 0) | np.diff(aside) | np.diff(attempt)) + 1
        bounds = [0, *cuts.tolist(), len(step)] if len(step) else [0]
        before = np.concatenate(([0], np.cumsum(is_point))).tolist()
        return [
            Batch(
                tuple(points[before[a] : before[b]]), tuple(histograms[a - before[a] : b - before[b]]), int(attempt[a])
            )
            for a, b in pairwise(bounds)
        ]

"""Statistics of modules, and of types, as points: which of them have a curve, and their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .aggregates import PooledRows, Pools, pooled_statistics
from .contract import Series
from .curves import LEFT_OUT, UNSEEN, Candidate, Curves, aggregate_name, statistic_name
from .identities import Floats, Identities, Integers, StatsRows
from .selection import ALL_STATISTICS, Selection

HAND_LOGGED = frozenset({"tensor", "tensor_grad"})
NONFINITE = ("nan_count", "inf_count")

# In the order in which the budget is spent: what a user logged by hand, aggregates, modules; what comes last are
# biases and further calls, whose module is represented already.
_BY_HAND, _AGGREGATE, _MODULE = 0, 1, 2


@dataclass(slots=True)
class CurveTable:
    """Of each thing (an identity, a pool) and each statistic the number of its curve, UNSEEN or LEFT_OUT."""

    numbers: Integers = field(default_factory=lambda: np.zeros((0, len(ALL_STATISTICS)), np.int64))

    def grow(self, wanted: Sequence[Sequence[str]]) -> None:
        """Add things: for each the statistics that may become curves."""
        if not wanted:
            return
        more = np.full((len(wanted), len(ALL_STATISTICS)), LEFT_OUT, np.int64)
        for row, names in enumerate(wanted):
            more[row, [ALL_STATISTICS.index(name) for name in names]] = UNSEEN
        self.numbers = np.concatenate((self.numbers, more))

    def column(self, statistic: str, things: Integers) -> Integers:
        """The numbers of the curves of one statistic."""
        numbers: Integers = self.numbers[things, ALL_STATISTICS.index(statistic)]
        return numbers

    def statistics(self, state: int) -> list[str]:
        """The statistics that are in this state (or, for 0, have a curve) for some thing."""
        there = self.numbers >= 0 if state >= 0 else self.numbers == state
        return [ALL_STATISTICS[column] for column in np.flatnonzero(there.any(axis=0)).tolist()]


@dataclass(frozen=True, slots=True)
class NewCurve:
    """A candidate, the moment of its first number, and where its number goes."""

    moment: int
    candidate: Candidate
    table: CurveTable
    thing: int
    statistic: str


@dataclass(slots=True)
class StatisticCurves:
    """The curves of statistics so far."""

    selection: Selection
    curves: Curves
    identities: Identities = field(default_factory=Identities)
    pools: Pools = field(default_factory=Pools)
    of_identity: CurveTable = field(default_factory=CurveTable)
    of_pool: CurveTable = field(default_factory=CurveTable)

    def grow(self) -> None:
        """Make room for the identities and pools that have appeared."""
        known = len(self.of_identity.numbers)
        self.of_identity.grow([list(self.selection.ranks(new.site)) for new in self.identities.all[known:]])
        known = len(self.of_pool.numbers)
        self.of_pool.grow([self._pooled(pool.site) for pool in self.pools.all[known:]])

    def _pooled(self, site: str) -> list[str]:
        ranks = self.selection.ranks(site)
        if not ranks:
            return []
        counts = NONFINITE if self.selection.statistics is None else ()
        return list(dict.fromkeys((*pooled_statistics(list(ranks)), *counts)))

    def new(self, rows: StatsRows, pooled: PooledRows) -> list[NewCurve]:
        """The candidates of a chunk: all that has its first number in it."""
        found = []
        for statistic in self.of_identity.statistics(UNSEEN):
            values = rows.present(statistic)
            for thing, row in _first_numbers(self.of_identity, statistic, rows.identity, values):
                found.append(self._of_module(thing, statistic, int(rows.moment[row])))
        for statistic in self.of_pool.statistics(UNSEEN):
            if statistic not in pooled.columns:
                continue
            values = _begins(statistic, pooled.columns[statistic])
            for thing, row in _first_numbers(self.of_pool, statistic, pooled.pool, values):
                found.append(self._of_type(thing, statistic, int(pooled.moment[row])))
        return found

    def _of_module(self, number: int, statistic: str, moment: int) -> NewCurve:
        about = self.identities.all[number]
        series = Series(
            name=statistic_name(about.site, statistic, about.module, about.call, about.tensor),
            kind="statistic",
            statistic=statistic,
            site=about.site,
            module=about.module,
            type=about.type,
            tensor=about.tensor,
            call=about.call,
            depth=about.depth,
        )
        group = _BY_HAND if about.site in HAND_LOGGED else _MODULE
        last = about.call > 0 or about.tensor.split(".")[0].endswith("bias")
        rank = (group, int(last), self.selection.ranks(about.site)[statistic])
        place = (_or_last(about.depth), _or_last(about.order))
        return NewCurve(moment, Candidate(series, rank, place), self.of_identity, number, statistic)

    def _of_type(self, number: int, statistic: str, moment: int) -> NewCurve:
        pool = self.pools.all[number]
        series = Series(
            name=aggregate_name(pool.site, statistic, pool.type, pool.tensor),
            kind="aggregate",
            statistic=statistic,
            site=pool.site,
            type=pool.type,
            tensor=pool.tensor,
        )
        rank = (_AGGREGATE, 0, self.selection.ranks(pool.site).get(statistic, -1))
        return NewCurve(moment, Candidate(series, rank, (0, number)), self.of_pool, number, statistic)


def _or_last(value: int | None) -> float:
    return math.inf if value is None else value


def _begins(statistic: str, values: Floats) -> np.ndarray:
    """Where a curve may begin: a count of NaNs is worth one only once there are any."""
    present: np.ndarray = values > 0 if statistic in NONFINITE else ~np.isnan(values)
    return present


def _first_numbers(table: CurveTable, statistic: str, things: Integers, present: np.ndarray) -> list[tuple[int, int]]:
    """(thing, row) of the first number of each thing that has no curve of this statistic yet."""
    rows = np.flatnonzero(present & (table.column(statistic, things) == UNSEEN))
    found, first = np.unique(things[rows], return_index=True)
    return list(zip(found.tolist(), rows[first].tolist(), strict=True))


def decide(curves: Curves, new: Sequence[NewCurve]) -> list[int]:
    """Choose among candidates of one moment; the numbers of the curves that were made."""
    numbers = curves.choose([one.candidate for one in new])
    for one, number in zip(new, numbers, strict=True):
        one.table.numbers[one.thing, ALL_STATISTICS.index(one.statistic)] = number
    return [number for number in numbers if number >= 0]

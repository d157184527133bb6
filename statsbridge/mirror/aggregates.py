"""One row for all modules of a type: their elements pooled, as if they had been measured together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..moments import COUNTS, STATISTICS, merge_rows
from .identities import Floats, Identities, Integers, StatsRows


class Pool(NamedTuple):
    """What an aggregate is about: all rows of one site whose modules are of one type."""

    site: str
    type: str
    tensor: str


@dataclass(frozen=True, slots=True)
class PooledRows:
    """One row for each (step, pool); `pool` numbers `Pools.all`, `columns` are statistics, NaN where null."""

    pool: Integers
    moment: Integers
    step: Integers
    time: Integers
    columns: dict[str, Floats]


@dataclass(slots=True)
class Pools:
    """Everything that has been pooled so far, numbered in the order of appearance."""

    all: list[Pool] = field(default_factory=list)
    _numbers: dict[Pool, int] = field(default_factory=dict)
    _of_identity: list[int] = field(default_factory=list)

    def merge(self, rows: StatsRows, identities: Identities) -> PooledRows:
        """The pooled rows of a chunk, by step and then by pool.

        Rows of modules whose type is not known (tensors logged by hand) are in none.
        """
        for identity in identities.all[len(self._of_identity) :]:
            pool = Pool(identity.site, identity.type, identity.tensor)
            if identity.type and pool not in self._numbers:
                self._numbers[pool] = len(self.all)
                self.all.append(pool)
            self._of_identity.append(self._numbers.get(pool, -1))
        pool_of = np.array(self._of_identity, np.int64)[rows.identity]
        used = np.flatnonzero(pool_of >= 0)
        if not len(used):
            nothing = np.zeros(0, np.int64)
            return PooledRows(nothing, nothing, nothing, nothing, {})
        keys = rows.moment[used] * len(self.all) + pool_of[used]
        _, first, group = np.unique(keys, return_index=True, return_inverse=True)
        columns: dict[str, Floats | Integers] = {name: rows.count(name)[used] for name in COUNTS}
        columns |= {name: rows.column(name)[used] for name in STATISTICS}
        merged = merge_rows(columns, group, len(first))
        taken = used[first]
        pooled = {name: np.asarray(values, np.float64) for name, values in merged.items()}
        pooled["update_ratio"] = _ratios(rows, used, group, len(first), identities)
        return PooledRows(pool_of[taken], rows.moment[taken], rows.step[taken], rows.time[taken], pooled)


def _ratios(rows: StatsRows, used: Integers, group: Integers, groups: int, identities: Identities) -> Floats:
    """‖all updates‖ / ‖all parameters before‖; NaN for other sites, and where a parameter's norm is not known.

    NaN too where no row of the group has a ratio of its own: a policy may have taken it away, and then it must not
    leave by way of the norms either. Of the group, not of the chunk, whose bounds must not matter.
    """
    own = np.bincount(group[~np.isnan(rows.column("update_ratio")[used])], minlength=groups) > 0
    if not own.any():
        return np.full(groups, np.nan)
    parameters = _parameters_of(rows, identities)
    l2 = rows.column("l2")
    # Of parameters too only those that have an update count: one that is frozen has none.
    measured = ~np.isnan(l2[used])
    updates, owner = used[measured], group[measured]
    at = parameters[updates]
    before = np.where(at >= 0, l2[np.maximum(at, 0)], np.nan)
    changed, there = _norms(l2[updates], owner, groups), _norms(before, owner, groups)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio: Floats = np.where(there > 0, changed / there, np.nan)
    ratio[~own | (np.bincount(owner, minlength=groups) == 0)] = np.nan
    return ratio


def _parameters_of(rows: StatsRows, identities: Identities) -> Integers:
    """For each row of site `update` the row of its parameter in the same step; −1 where there is none."""
    found = np.full(len(rows.identity), -1, np.int64)
    sites = np.array([identity.site == "update" for identity in identities.all], bool)
    updates = np.flatnonzero(sites[rows.identity])
    if not len(updates):
        return found
    partner = {
        number: identities.find(identity.module, identity.call, "parameter", identity.tensor)
        for number, identity in enumerate(identities.all)
        if identity.site == "update"
    }
    wanted = np.array(
        [-1 if (other := partner[number]) is None else other for number in rows.identity[updates].tolist()]
    )
    found[updates] = _find(rows, wanted, updates)
    return found


def _find(rows: StatsRows, wanted: Integers, at: Integers) -> Integers:
    """The row of identity `wanted[i]` in the step of row `at[i]`, −1 where there is none."""
    size = int(rows.identity.max()) + 1
    keys = rows.moment * size + rows.identity
    order = np.argsort(keys, kind="stable")
    asked = rows.moment[at] * size + wanted
    place = np.minimum(np.searchsorted(keys[order], asked), len(keys) - 1)
    hit = order[place]
    result: Integers = np.where((wanted >= 0) & (keys[hit] == asked), hit, -1)
    return result


def _norms(values: Floats, owner: Integers, groups: int) -> Floats:
    """The root of the sum of squares of each group, in units of its largest: squares of 1e-200 vanish."""
    largest = np.zeros(groups)
    np.fmax.at(largest, owner, values)
    unit = np.where(largest > 0, largest, 1.0)
    squares = np.bincount(owner, (values / unit[owner]) ** 2, groups)
    norms: Floats = np.sqrt(squares) * unit
    return norms


def pooled_statistics(names: Sequence[str]) -> list[str]:
    """Those of `names` that an aggregate has: `kl_unit_gaussian` and histograms do not pool."""
    return [name for name in names if name not in {"kl_unit_gaussian", "histogram"}]

"""The rows of `stats` as rules take them: numbers, step after step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .rules.known import Integers, Known, column
from .rules.layout import Columns, Layout
from .rules.step import Rows
from .rules.underflow import around_the_least

_STATISTICS = (
    "count", "nan_count", "inf_count", "mean", "std", "min", "max", "abs_mean", "l2", "zero_fraction", "update_ratio",
)  # fmt: skip
_PLACE = ("depth", "order")
#: Reasons why a row has no numbers, that rules look at.
STATUSES = ("no_grad", "not_called", "step_skipped", "not_stepped")
#: The columns of `stats` that rules look at.
COLUMNS = (
    "attempt", "step", "iteration", "module", "type", "call", *_PLACE[::-1], "site", "tensor", *_STATISTICS,
    "histogram", "status",
)  # fmt: skip

Numbers = npt.NDArray[Any]


class Block:
    """Rows of many steps: whom each is about, and its numbers.

    `slices`: (attempt, step) → the first of its rows and the one after the last.
    """

    def __init__(
        self,
        known: Known,
        keys: tuple[Numbers, Numbers],
        identities: Numbers,
        columns: Columns,
    ) -> None:
        """`keys` [rows]: attempts and steps. `identities` [rows]: -1 for a row that is not looked at.

        The arrays of `columns` are its own from now on.
        """
        self._known = known
        by_row = dict(columns.by_row)
        starts, is_sorted = _starts(*keys)
        if not is_sorted or (identities < 0).any():
            kept = np.flatnonzero(identities >= 0)
            kept = kept[np.lexsort((keys[1][kept], keys[0][kept]))]
            keys, identities = (keys[0][kept], keys[1][kept]), identities[kept]
            for name in by_row:
                by_row[name] = by_row[name][kept]
            starts, _ = _starts(*keys)
        self._identities = identities
        self._columns = Columns(by_row, columns.by_identity)
        self._last: tuple[Numbers, Layout] | None = None
        self.slices = _slices(*keys, starts)

    def rows(self, key: tuple[int, int]) -> Rows:
        """The rows of one step. Where they lie in the data flow is noted."""
        here = slice(*self.slices[key])
        identities = self._identities[here]
        is_new = self._last is None or not np.array_equal(identities, self._last[0])
        if is_new:
            self._last = identities, self._known.layout(identities.astype(np.int64))
        assert self._last is not None
        rows = Rows(self._last[1], self._columns, here)
        if is_new or any(name in self._columns.by_row for name in _PLACE):
            self._known.place(rows.ids, rows["depth"], rows["order"])
        return rows


def block_of(table: pa.Table, keys: tuple[Integers, Integers], known: Known) -> Block:
    """The rows of a table with the columns of `stats`; `keys` [rows]: their attempts and steps."""
    identities = known.identities(table)
    numbers = numbers_of(table)
    missing = {name: np.full(len(known), default_of(name)) for name in STATUSES if name not in numbers}
    return Block(known, keys, identities, Columns(numbers, missing))


def numbers_of(table: pa.Table) -> dict[str, Numbers]:
    """What rules look at of each row, without what no row has: statuses, what follows from histograms."""
    numbers: dict[str, Numbers] = {name: column(table, name) for name in (*_STATISTICS, *_PLACE)}
    status = table["status"]
    if status.null_count < len(status):
        plain = status.cast(pa.string())
        numbers |= {name: pc.equal(plain, name).fill_null(False).to_numpy() for name in STATUSES}
    histogram = table["histogram"] if "histogram" in table.column_names else None
    if histogram is not None and histogram.null_count < len(histogram):
        numbers |= around_the_least(histogram)
    return numbers


def default_of(name: str) -> float | bool:
    """The number of a row that has none."""
    return False if name in STATUSES else np.nan


def slices_of(attempts: Integers, steps: Integers) -> dict[tuple[int, int], tuple[int, int]]:
    """(attempt, step) → the first of its rows and the one after the last, of rows in that order."""
    return _slices(attempts, steps, _starts(attempts, steps)[0])


def _starts(attempts: Numbers, steps: Numbers) -> tuple[Integers, bool]:
    """Where rows of another step begin, and whether the steps are in order."""
    changes = np.ones(len(steps), bool)
    changes[1:] = (steps[1:] != steps[:-1]) | (attempts[1:] != attempts[:-1])
    starts = np.flatnonzero(changes)
    keys = list(zip(attempts[starts].tolist(), steps[starts].tolist(), strict=True))
    return starts, all(before < after for before, after in pairwise(keys))


def _slices(attempts: Numbers, steps: Numbers, starts: Integers) -> dict[tuple[int, int], tuple[int, int]]:
    ends = np.append(starts[1:], len(steps))[: len(starts)]
    keys = zip(attempts[starts].tolist(), steps[starts].tolist(), strict=True)
    return dict(zip(keys, zip(starts.tolist(), ends.tolist(), strict=True), strict=True))

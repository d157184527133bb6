"""Rows of `stats` as arrays: whose numbers they are, and the numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_KEY = ("module", "call", "site", "tensor")


class Identity(NamedTuple):
    """What a row is about; `type`, `depth` and `order` as they were when it first appeared."""

    module: str
    call: int
    site: str
    tensor: str
    type: str
    depth: int | None
    order: int | None


@dataclass(frozen=True, slots=True)
class StatsRows:
    """The rows of one chunk's `stats`, one entry of each array a row.

    `identity` numbers `Identities.all`; `moment` the different (attempt, step) of the chunk, ascending.
    """

    table: pa.Table
    identity: Integers
    moment: Integers
    step: Integers
    time: Integers

    def column(self, name: str) -> Floats:
        """A statistic as float64, NaN where it is null."""
        values: Floats = self.table[name].cast(pa.float64()).to_numpy()
        return values

    def present(self, name: str) -> np.ndarray:
        """Whether each row has this column."""
        valid: np.ndarray = pc.is_valid(self.table[name]).to_numpy()
        return valid

    def count(self, name: str) -> Integers:
        """A count, 0 where it is null."""
        return integers(self.table[name])


@dataclass(slots=True)
class Identities:
    """Everything that rows have been about so far, numbered in the order of appearance."""

    all: list[Identity] = field(default_factory=list)
    _numbers: dict[tuple[str, int, str, str], int] = field(default_factory=dict)

    def find(self, module: str, call: int, site: str, tensor: str) -> int | None:
        """The number of an identity; None where there was no such row yet."""
        return self._numbers.get((module, call, site, tensor))

    def rows(self, stats: pa.Table, moment: Integers) -> StatsRows:
        """The rows of a `stats` table, new identities numbered. `moment`: see `StatsRows`."""
        code = np.zeros(stats.num_rows, np.int64)
        values: dict[str, list[object]] = {}
        codes: dict[str, Integers] = {}
        for name in _KEY:
            column = stats[name].combine_chunks()
            if name == "call":
                column = column.dictionary_encode()
            # One more than the code, so that null has a code too.
            codes[name] = pc.fill_null(column.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64) + 1
            values[name] = [0 if name == "call" else "", *column.dictionary.to_pylist()]
            code = code * len(values[name]) + codes[name]
        # A chunk has too few different names for these products to overflow.
        first, inverse = np.unique(code, return_index=True, return_inverse=True)[1:]
        numbers = np.empty(len(first), np.int64)
        about = stats.select(["type", "depth", "order"])
        for number in np.argsort(first, kind="stable").tolist():
            row = int(first[number])
            module, call, site, tensor = (values[name][int(codes[name][row])] for name in _KEY)
            key = (str(module), int(str(call)), str(site), str(tensor))
            known = self._numbers.get(key)
            if known is None:
                type_, depth, order = (about[name][row].as_py() for name in ("type", "depth", "order"))
                known = self._numbers[key] = len(self.all)
                self.all.append(Identity(*key, type_ or "", depth, order))
            numbers[number] = known
        step, time = integers(stats["step"]), integers(stats["time"].cast(pa.int64()))
        return StatsRows(stats, numbers[inverse], moment, step, time)


def moments(attempt: Integers, step: Integers) -> Integers:
    """A number for each row: equal where attempt and step are, and ascending with them."""
    attempts, steps = _distinct(attempt), _distinct(step)
    code = np.searchsorted(attempts, attempt) * len(steps) + np.searchsorted(steps, step)
    moment: Integers = np.searchsorted(_distinct(code), code)
    return moment


def _distinct(values: Integers) -> Integers:
    """Different values, ascending. Unlike np.unique fast for what is nearly in order already."""
    ordered = np.sort(values, kind="stable")
    distinct: Integers = ordered[np.concatenate((ordered[:1] == ordered[:1], np.diff(ordered) > 0))]
    return distinct


def integers(column: pa.ChunkedArray) -> Integers:
    """A column as int64, 0 where it is null."""
    values: Integers = pc.fill_null(column, 0).to_numpy()
    return values

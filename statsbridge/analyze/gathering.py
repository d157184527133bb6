"""The rows of a large run, step after step, from parts that are sorted by series: each row group is read once.

A number that is the same in all rows of an identity is held once for it: most runs have no NaN, and what a module
holds and where it lies do not change. The others are put in order by the number that each row has from its writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..log.parts import Part
from .blocks import COLUMNS, STATUSES, Block, default_of, numbers_of
from .rules.known import Integers, Known, Names
from .rules.layout import Columns
from .rules.memory import Memory

#: Rows that are put in order together, about; a part of more is not divided.
_WINDOW = 1 << 21
_AT_ONCE = 1 << 16  # rows: what is in memory twice
_TEXTS = ("module", "type", "site", "tensor")
_READ = ("seq", "shards", *(name for name in COLUMNS if name != "iteration"))

Numbers = npt.NDArray[Any]
#: The rows of a part with some columns, some rows at a time.
Read = Callable[[Part, Sequence[str]], Iterable[pa.Table]]


class NotInOrderError(Exception):
    """The rows were not written step after step, or are shards of tensors: they have to be read otherwise."""


def blocks_of(parts: Sequence[Part], read: Read, known: Known) -> Iterator[tuple[Block, int | None]]:
    """The rows of `parts`, of one rank and without a gap, as blocks of whole steps, the last one before the next.

    Each with the step below which there are no further rows; None for the last block.

    Raises NotInOrderError, after some blocks too, and what `read` raises.
    """
    about, last = _About(), -1
    windows = list(_windows(parts))
    for window in windows:
        gathered = _Window(about, window[0].first, sum(part.rows for part in window))
        for part in window:
            for rows in _ahead(read(part, _READ)):
                if rows.num_rows:
                    gathered.put(rows)
        block = gathered.block(known)
        steps = [last, *(step for _, step in block.slices)]
        if any(later < before or later == last for before, later in pairwise(steps)):
            raise NotInOrderError
        last = steps[-1]
        yield block, None if window is windows[-1] else last + 1
        del block, gathered


def _ahead(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same, each read while the one before it is worked on."""
    left = iter(tables)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, left, None)
        while (table := coming.result()) is not None:
            coming = pool.submit(next, left, None)
            yield table


def _windows(parts: Sequence[Part]) -> Iterator[list[Part]]:
    window: list[Part] = []
    for part in sorted(parts, key=lambda part: part.first):
        if window and sum(one.rows for one in window) + part.rows > _WINDOW:
            yield window
            window = []
        window.append(part)
    if window:
        yield window


class _About:
    """What rows are about, by a number of its own: `Known` numbers in the order of the training, which comes later."""

    def __init__(self) -> None:
        self._names = {name: Names("") for name in _TEXTS}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._what: list[tuple[int, ...]] = []  # numbers of _TEXTS, and the call
        self._known = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._what)

    def segments(self, rows: pa.Table) -> tuple[Integers, Integers]:
        """Where rows of another series begin, and the number of each series."""
        columns = [self._names[name].numbers(rows[name]) for name in _TEXTS]
        columns.append(pc.fill_null(rows["call"], 0).to_numpy())
        changes = np.ones(rows.num_rows, bool)
        changes[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
        starts = np.flatnonzero(changes)
        whats = np.stack([column[starts] for column in columns], axis=1)
        unique, inverse = np.unique(whats, axis=0, return_inverse=True)
        numbers = np.array([self._number(tuple(what)) for what in unique.tolist()], np.int64)
        return starts, numbers[inverse]

    def _number(self, what: tuple[int, ...]) -> int:
        number = self._numbers.setdefault(what, len(self._what))
        if number == len(self._what):
            self._what.append(what)
        return number

    def identities(self, known: Known, firsts: Integers, steps: Integers) -> Integers:
        """The identity of each number. New ones are told to `known` as a training tells them: step after step.

        `firsts` [numbers]: the first row of each. `steps` [numbers]: a number of its step.
        """
        new = np.arange(len(self._known), len(self))
        new = new[np.argsort(firsts[new], kind="stable")]
        identities = np.append(self._known, np.full(len(new), -1))
        for together in np.split(new, np.flatnonzero(np.diff(steps[new])) + 1):
            if len(together):
                identities[together] = known.identities(self._table(together))
        self._known = identities
        return identities

    def _table(self, numbers: Integers) -> pa.Table:
        whats = [self._what[number] for number in numbers.tolist()]
        columns: dict[str, Any] = {
            name: pa.array([self._names[name].names[what[place]] for what in whats], pa.string())
            for place, name in enumerate(_TEXTS)
        }
        return pa.table({**columns, "call": pa.array([what[-1] for what in whats], pa.int64())})


class _Column:
    """One number of each row: by what the rows are about as long as that decides it, then by row."""

    def __init__(self, default: float | bool) -> None:
        self.by_row: Numbers | None = None
        self.by_number = Memory(default, type(default))

    def put(self, values: Numbers, segments: _Segments, window: _Window) -> None:
        if self.by_row is None:
            firsts = values[segments.starts]
            new = ~window.seen[segments.numbers]
            self.by_number.set(segments.numbers[new], firsts[new])
            known = self.by_number[segments.numbers]
            if _equal(known, firsts) and _equal(values, np.repeat(firsts, segments.lengths)):
                return
            self.by_row = self.spread(window.numbers)
        self.by_row[segments.places] = values[segments.order]

    def spread(self, numbers: Numbers) -> Numbers:
        """The value of each row, as far as what it is about decides that; `numbers` [rows]: what that is."""
        by_row = np.empty(len(numbers), self.by_number[numbers[:0]].dtype)
        for at in range(0, len(by_row), _AT_ONCE):
            by_row[at : at + _AT_ONCE] = self.by_number[numbers[at : at + _AT_ONCE]]
        return by_row


class _Segments(NamedTuple):
    """Some rows in stretches of one series each.

    `starts`, `lengths`, `numbers` [stretches]: where each begins, its rows, what it is about. `order` [rows]: the rows
    by their `places` [rows] in the window: memory that is written from its beginning to its end is written faster.
    """

    starts: Integers
    lengths: Integers
    numbers: Integers
    order: Integers
    places: Integers


class _Window:
    """The rows of neighbouring parts, in the order in which they were written.

    `numbers` [rows]: what each is about, -1 for a row that there is not. `seen`: the numbers that were met.
    """

    def __init__(self, about: _About, first: int, rows: int) -> None:
        self._about, self._first = about, first
        self.numbers: Numbers = np.full(rows, -1, np.int32)
        self.seen = Memory(False, np.bool_)
        self._attempts, self._steps = np.zeros(rows, np.int32), np.zeros(rows, np.int64)
        self._columns: dict[str, _Column] = {}
        self._firsts = Memory(np.iinfo(np.int64).max, np.int64)

    def put(self, rows: pa.Table) -> None:
        """Put some rows where they belong. Raises NotInOrderError."""
        places = rows["seq"].to_numpy() - self._first
        if rows["step"].null_count or rows["attempt"].null_count or pc.max(rows["shards"]).as_py() not in (None, 1):
            raise NotInOrderError
        starts, numbers = self._about.segments(rows)
        order = np.argsort(places, kind="stable")
        segments = _Segments(starts, np.diff(starts, append=len(places)), numbers, order, places[order])
        found = numbers_of(rows)
        for name in dict.fromkeys((*self._columns, *found)):
            column = self._columns.setdefault(name, _Column(default_of(name)))
            values = found.get(name)
            column.put(np.full(len(places), default_of(name)) if values is None else values, segments, self)
        self.numbers[segments.places] = np.repeat(numbers, segments.lengths)[order]
        self._attempts[segments.places] = rows["attempt"].to_numpy()[order]
        self._steps[segments.places] = rows["step"].to_numpy()[order]
        self._firsts.set(numbers[::-1], np.minimum(self._firsts[numbers], places[starts])[::-1])
        self.seen.set(numbers, True)

    def block(self, known: Known) -> Block:
        """The rows as a block; the window is of no use after it."""
        about = np.arange(len(self._about))
        firsts = np.minimum(self._firsts[about], len(self._steps) - 1)
        identities = self._about.identities(known, firsts, self._steps[firsts])
        about = about[(identities >= 0) & self.seen[about]]
        by_identity = {}
        for name, column in self._columns.items():
            if column.by_row is None:
                values, held = column.by_number[about], np.full(len(known), default_of(name))
                held[identities[about]] = values
                if _equal(held[identities[about]], values):
                    by_identity[name] = held
                else:  # of a module whose type has changed: two of our numbers, and one identity
                    column.by_row = column.spread(self.numbers)
        for name in STATUSES:
            if name not in self._columns:
                by_identity[name] = np.full(len(known), default_of(name))
        by_row = {name: column.by_row for name, column in self._columns.items() if column.by_row is not None}
        self.numbers = np.append(identities, -1).astype(np.int32)[self.numbers]
        return Block(known, (self._attempts, self._steps), self.numbers, Columns(by_row, by_identity))


def _equal(one: Numbers, other: Numbers) -> bool:
    """Whether all numbers are the same, NaN as well."""
    return np.array_equal(one, other, equal_nan=True)

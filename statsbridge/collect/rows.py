"""The rows of one sampled step: filled by the hooks, turned into columns in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .shards import Share
from .statistics import Piece, Reducer, Wanted, pack

Columns = dict[str, Any]

#: Module index of rows that belong to no module: tensors logged by hand.
BY_HAND = -1


class Key(NamedTuple):
    """What a row is about: index of the module's entry (or `BY_HAND`), call, site, tensor."""

    module: int
    call: int
    site: str
    tensor: str


@lru_cache(maxsize=1 << 16)
def key_of(module: int, call: int, site: str, tensor: str) -> Key:
    """The same key as in the window before: new ones are work for Python's garbage collector."""
    return Key(module, call, site, tensor)


@dataclass(slots=True)
class Row:
    """One row of `stats` in the making; its pieces (one a micro-batch) merge into one set of numbers.

    Most rows have one, and no list for it: what waits for the background is what Python's garbage collector has to
    look through.
    """

    number: int
    key: Key
    status: str | None = None
    piece: Piece | None = None
    further: list[Piece] | None = None  # of the micro-batches after the first
    measured: bool = False
    share: Share | None = None  # which part of a whole the row is of
    counted: bool = True  # whether no other process counts the same elements

    def take(self) -> list[Piece]:
        """Its pieces, which it holds no longer."""
        pieces = [] if self.piece is None else [self.piece, *(self.further or ())]
        self.piece = self.further = None
        return pieces


class Rows:
    """The rows of one sampled step. `hand_over` and `close` belong to the training thread."""

    def __init__(self, wanted: Wanted) -> None:
        self._rows: dict[Key, Row] = {}
        self._kept: list[Piece] = []
        self._pending = 0
        self._reducer = Reducer(wanted)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def row(self, key: Key) -> Row:
        """The row with this key, made where there is none yet."""
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = Row(len(self._rows), key)
        return row

    def add(self, key: Key, piece: Piece) -> None:
        """Merge the numbers of one more tensor into a row."""
        row = self.row(key)
        if row.piece is None:
            row.piece = piece
        elif row.further is None:
            row.further = [piece]
        else:
            row.further.append(piece)
        row.measured = True
        self._pending += piece.nbytes

    def replace(self, key: Key, piece: Piece) -> None:
        """Forget what the row held: only the last optimizer step of a window counts."""
        row = self.row(key)
        self._pending += piece.nbytes - sum(old.nbytes for old in row.take())
        row.piece = piece
        row.measured = True

    def keep(self, piece: Piece) -> Piece:
        """Bring the values of a piece to the host with those of the rows: somebody else is going to look at them."""
        self._kept.append(piece)
        return piece

    def spreads(self) -> np.ndarray:
        """How much the samples of a batch differ in each row, by number. Background thread, as `statistics`."""
        return self._reducer.spreads(len(self._rows))

    @property
    def pending(self) -> int:
        """Bytes that the pieces in these rows hold."""
        return self._pending

    def hand_over(self, keep: frozenset[str] = frozenset()) -> Callable[[], None]:
        """Start the copy of all pending pieces to the host; the work that is left for the background thread.

        Rows of the sites in `keep` stay: they may still be replaced.
        """
        numbers: list[int] = []
        pieces: list[Piece] = []
        kept = 0
        for row in self._rows.values():
            if row.key.site in keep:
                kept += sum(piece.nbytes for piece in (row.piece, *(row.further or ())) if piece is not None)
                continue
            taken = row.take()
            numbers += [row.number] * len(taken)
            pieces += taken
        # A container's output is its last child's: one piece can stand in several rows.
        pack(list({id(piece): piece for piece in (*pieces, *self._kept)}.values()))
        self._pending = kept
        return lambda: self._reducer.add(numbers, pieces)

    def statistics(self) -> Columns:
        """The statistics columns, one entry a row by number. Background thread, after all work handed over."""
        columns = self._reducer.finish(len(self._rows))
        status: list[str | None] = list(columns["status"])
        silent = np.zeros(len(status), dtype=bool)
        for row in self._rows.values():
            if row.status is not None:
                status[row.number] = row.status
                silent[row.number] = True
        if silent.any():
            _silence(columns, silent)
        columns["status"] = status
        return columns


def _silence(columns: Columns, silent: np.ndarray) -> None:
    """Rows with a status of their own have no numbers, whatever pieces had reached them."""
    for values in columns.values():
        if isinstance(values, np.ndarray):
            values[silent] = np.nan if values.dtype.kind == "f" else 0

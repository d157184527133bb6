"""The rows of one table and rank from some `seq` on, read part by part, whatever parts hold them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..errors import DamagedPart, LogError
from ..log.parts import Part, parse_part, part_folder, read_part
from ..log.schema import SCHEMAS

# A network disk that fails once is tried again at the next read; one that goes on failing is a damaged part.
READ_ATTEMPTS = 5


class TableTail:
    """A window on one table: `rows` begins at `first` and grows at its end by `fill`.

    A part is chosen by the range in its name: of all that hold the next row the widest, so it does not matter
    when parts are merged into wider ones, nor how their rows are sorted inside.

    `first`: seq of the first row of `rows`, or of the next to come. `end`: the seq after the last row that was
    there when `list` was last called. `until`: only rows before it (None: all). `lost`: what could not be read
    and was passed over, as (text, rows); whoever reads it empties it.
    """

    def __init__(self, run: Path, table: str, rank: int, first: int, until: int | None = None) -> None:
        self.table = table
        self.first = first
        self.lost: list[tuple[str, int]] = []
        self.rows: pa.Table = SCHEMAS[table].empty_table()
        self.end = first
        self._folder = part_folder(run, table, rank)
        self._rank = rank
        self._next = first
        self._until = until
        self._known: dict[str, Part | None] = {}
        self._ahead: list[Part] = []  # parts that begin after the next row, the nearest last
        self._here: list[Part] = []  # parts that may hold it
        self._failures: dict[str, int] = {}
        self._damaged: dict[str, DamagedPart] = {}

    @property
    def at_end(self) -> bool:
        """Whether `rows` holds all that was listed."""
        return self._next >= self.end

    def list(self) -> None:
        """Look which parts there are now, and so which rows."""
        self._find_parts()
        end = max((part.last + 1 for part in (*self._ahead, *self._here)), default=self._next)
        self.end = max(self._next, end if self._until is None else min(end, self._until))

    def _find_parts(self) -> None:
        try:
            names = os.listdir(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            names = []
        # Most names are known already: parsing all of a long run's at each look would cost training time.
        known = self._known
        self._known = {
            name: known[name] if name in known else parse_part(self._folder / name, self.table, self._rank)
            for name in names
        }
        parts = [part for part in self._known.values() if part is not None and part.last >= self._next]
        self._ahead = sorted(parts, key=lambda part: part.first, reverse=True)
        self._here = []

    def fill(self, rows: int) -> None:
        """Read parts until there are at least that many rows, or no more parts.

        Raises LogError where a part cannot be read just now; try again later.
        """
        pieces = [self.rows]
        count = self.rows.num_rows
        while count < rows and not self.at_end:
            piece = self._read_next()
            if piece is not None:
                pieces.append(piece)
                count += piece.num_rows
                # At once: what was read must not be lost to an error of the next part.
                self.rows = pa.concat_tables(pieces)
                pieces = [self.rows]

    def take(self, count: int) -> pa.Table:
        """The first `count` rows, which leave the window."""
        taken = self.rows.slice(0, count).unify_dictionaries().combine_chunks()
        self.rows = self.rows.slice(count)
        self.first = self._next if self.rows.num_rows == 0 else self.rows["seq"][0].as_py()
        return taken

    def _read_next(self) -> pa.Table | None:
        """The rows of the part that holds the next one; None where that is to be tried again."""
        for _ in range(READ_ATTEMPTS):
            part = self._widest()
            if part is None:
                # Parts may have been merged between the listing and now: what we look for has a new name.
                self._find_parts()
                part = self._widest()
            if part is None:
                self._pass_over()
                return None
            try:
                return self._cut(part)
            except FileNotFoundError:
                self._find_parts()
        raise LogError(f"the parts of {self.table} in {self._folder} vanish while they are read")

    def _widest(self) -> Part | None:
        while self._ahead and self._ahead[-1].first <= self._next:
            self._here.append(self._ahead.pop())
        self._here = [part for part in self._here if part.last >= self._next]
        fitting = [part for part in self._here if part.path.name not in self._damaged]
        return max(fitting, key=lambda part: part.last - part.first, default=None)

    def _cut(self, part: Part) -> pa.Table | None:
        try:
            table = read_part(part)
        except DamagedPart as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from None
            name = part.path.name
            self._failures[name] = self._failures.get(name, 0) + 1
            if isinstance(error.__cause__, OSError) and self._failures[name] < READ_ATTEMPTS:
                raise LogError(str(error)) from error
            self._damaged[name] = error
            return None
        seq = table["seq"].to_numpy()
        stop = part.last + 1 if self._until is None else min(part.last + 1, self._until)
        wanted = np.flatnonzero((seq >= self._next) & (seq < stop))
        in_order = wanted[np.argsort(seq[wanted], kind="stable")]
        self._next = stop
        if len(in_order) == len(seq) and np.array_equal(in_order, np.arange(len(seq))):
            return table
        return table.take(pa.array(in_order))

    def _pass_over(self) -> None:
        """Go on after rows that no readable part holds."""
        after = min((part.last + 1 for part in self._here), default=self.end)
        if self._ahead:
            after = min(after, self._ahead[-1].first)
        after = min(after, self.end)
        why = [str(self._damaged[part.path.name]) for part in self._here]
        missing = f"no part holds rows {self._next} to {after - 1} of {self.table}"
        self.lost.append((why[0] if why else missing, after - self._next))
        self._next = after

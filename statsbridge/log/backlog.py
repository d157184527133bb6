"""Rows between memory and disk: numbered, cut into parts, and kept while the disk cannot take them."""

import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa

from .files import make_folder, sync_folder, write_durably
from .parts import encode, part_folder

# What waits for a disk that is full: some minutes to hours of a run. Beyond it new rows are dropped, not old
# ones: what is there stays without gaps.
BACKLOG_BYTES = 256 << 20
PART_BYTES = 64 << 20

# Modules first: a reader that lists the tables the other way round finds the module of every row of `stats`.
WRITE_ORDER = ("modules", "stats", "scalars", "events")


@dataclass(frozen=True, slots=True)
class _Ready:
    """A part that is encoded and numbered: the same bytes under the same name until they are on disk."""

    name: str
    data: pa.Buffer
    rows: int
    nbytes: int


class Backlog:
    """The rows of one rank that are not on disk yet. Used by the writer's thread only.

    `dropped` counts the rows of each table that found no room; `nbytes` is the size of what waits.
    `wrote` is told the table and the bytes of every part that is on disk; `may_write` is asked before each. `first`
    is the number of the next row of each table, where that is not 0.
    """

    def __init__(
        self,
        run: Path,
        rank: int,
        attempt: int,
        wrote: Callable[[str, int], None] = lambda table, size: None,
        *,
        may_write: Callable[[], bool] = lambda: True,
        first: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._run = run
        self._wrote = wrote
        self._may_write = may_write
        self._rank = rank
        self._attempt = attempt
        self._waiting: dict[str, deque[tuple[pa.Table, int]]] = {table: deque() for table in WRITE_ORDER}
        self._ready: dict[str, _Ready] = {}
        self._next = {table: first.get(table, 0) for table in WRITE_ORDER}
        self._durable_folders: set[str] = set()
        self.nbytes = 0
        self.dropped: dict[str, int] = {}

    def add(self, table: str, rows: pa.Table) -> None:
        """Take the rows of one piece of work, which will share one part, or count them as dropped."""
        nbytes = rows.nbytes  # it takes Arrow a while to add them up
        if self.nbytes and self.nbytes + nbytes > BACKLOG_BYTES:
            self._drop(table, rows.num_rows)
            return
        self._waiting[table].append((rows, nbytes))
        self.nbytes += nbytes

    def write(self) -> Exception | None:
        """Write all that waits; the first thing that went wrong, or None when all is on disk."""
        failure: Exception | None = None
        for table in WRITE_ORDER:
            try:
                self._write_table(table)
            except Exception as error:  # of whatever kind: the other tables are fine, and the writer's thread lives on
                failure = failure or error
        return failure

    def give_up(self) -> int:
        """Count what still waits as dropped; the number of these rows."""
        lost = 0
        for table, waiting in self._waiting.items():
            ready = self._ready.pop(table, None)
            rows = sum(rows.num_rows for rows, _ in waiting)
            # Where only the fsync of its folder failed, the part is there for every reader.
            # What a disk in trouble cannot tell is lost, as far as we know.
            if ready is not None and not os.path.exists(part_folder(self._run, table, self._rank) / ready.name):
                rows += ready.rows
            waiting.clear()
            self._drop(table, rows)
            lost += rows
        self.nbytes = 0
        return lost

    def _write_table(self, table: str) -> None:
        while (part := self._ready.get(table) or self._encode_next(table)) is not None and self._may_write():
            folder = part_folder(self._run, table, self._rank)
            self._make_folder(table, folder)
            write_durably(folder / part.name, part.data)
            del self._ready[table]
            self._next[table] += part.rows
            self.nbytes -= part.nbytes
            self._wrote(table, part.data.size)

    def _make_folder(self, table: str, folder: Path) -> None:
        if table in self._durable_folders and folder.is_dir():
            return
        if self._run.is_dir():  # a run that the user deleted is not made again
            make_folder(folder)
            # Whoever made it may have died, or met an error, before its name was on the disk.
            sync_folder(folder.parent)
            sync_folder(self._run)
            self._durable_folders.add(table)

    def _drop(self, table: str, rows: int) -> None:
        if rows:
            self.dropped[table] = self.dropped.get(table, 0) + rows

    def _encode_next(self, table: str) -> _Ready | None:
        waiting = self._waiting[table]
        if not waiting:
            return None
        chosen = [waiting.popleft()]
        nbytes = chosen[0][1]
        while waiting and nbytes + waiting[0][1] <= PART_BYTES:
            nbytes += waiting[0][1]
            chosen.append(waiting.popleft())
        try:
            rows = pa.concat_tables([rows for rows, _ in chosen])
            name, data = encode(table, rows, first=self._next[table], attempt=self._attempt)
        except MemoryError:  # that may pass
            waiting.extendleft(reversed(chosen))
            raise
        except Exception:  # rows that cannot be written must not keep all others from it
            self._drop(table, sum(rows.num_rows for rows, _ in chosen))
            self.nbytes -= nbytes
            raise
        # Numbers are used up only by what is on disk, so a part that failed is tried again as it is: where
        # only the fsync of its folder failed, it is there already.
        self._ready[table] = _Ready(name, data, rows.num_rows, nbytes)
        return self._ready[table]

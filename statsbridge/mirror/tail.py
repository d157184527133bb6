"""Following the record of a run: whole steps, in order, each row once, from wherever one left off."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .table_tail import TableTail

# Rows of `stats` and of `scalars` in a chunk, about: a step is never cut, and a part is read whole.
CHUNK_ROWS = 20_000

# Against the order in which the writer writes: the rows of `stats` of each step in `scalars` are on disk.
LIST_ORDER = ("events", "scalars", "stats", "modules")


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a reader has got: the `seq` of the next row of each table."""

    modules: int = 0
    stats: int = 0
    scalars: int = 0
    events: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of some whole steps, by `seq`, in the columns of `statsbridge.log.SCHEMAS`. `cursor`: after them."""

    modules: pa.Table
    stats: pa.Table
    scalars: pa.Table
    events: pa.Table
    cursor: Cursor

    @property
    def rows(self) -> int:
        """How many rows there are in all tables."""
        return int(self.modules.num_rows + self.stats.num_rows + self.scalars.num_rows + self.events.num_rows)


class Tail:
    """Reads the committed rows of one rank of a run, in chunks of whole steps.

    A step is whole once a later one is in `scalars`. What the user logs outside of steps belongs to the step
    in whose course it was written. Events do not wait for their step. A resumed run goes back to an earlier step:
    no chunk has rows of two attempts (of events it may), and once the next attempt has begun all of the last are whole.

    `until`: read only what is before it, all of which is taken to be whole.
    """

    def __init__(self, run: Path, *, rank: int = 0, cursor: Cursor = Cursor(), until: Cursor | None = None) -> None:
        self._tables = {
            table: TableTail(run, table, rank, getattr(cursor, table), None if until is None else getattr(until, table))
            for table in LIST_ORDER
        }
        self._saw_final = False
        self._more = False

    @property
    def cursor(self) -> Cursor:
        """After the last chunk that `read` gave."""
        return Cursor(**{table: tail.first for table, tail in self._tables.items()})

    def read(self, final: bool = False) -> Chunk | None:
        """The next rows, None where there is nothing whole yet. `final`: nothing more will be written.

        Raises LogError where the disk cannot be read just now: call again later. SchemaTooNew where a newer
        statsbridge wrote the run.
        """
        events, scalars, stats, modules = self._tables.values()
        if not self._more or (final and not self._saw_final):
            # Otherwise there is enough to read: listing a long run's parts for each chunk would take longer.
            self._saw_final = final
            self.look()
        events.fill(CHUNK_ROWS)
        counts = {"events": min(events.rows.num_rows, CHUNK_ROWS)}
        attempt = self._attempt(scalars, stats, modules)
        there_is, whole = self._whole(scalars, attempt, final)
        self._more = not scalars.at_end
        if there_is:
            own = _of(scalars.rows, attempt)
            of_steps = pc.is_valid(own["iteration"])
            step = self._shortened(stats, attempt, _bounded(own, whole, of_steps))
            self._more |= step != whole or own.num_rows < scalars.rows.num_rows
            counts["scalars"] = _before(own, step, of_steps)
            counts["stats"] = _before(_of(stats.rows, attempt), step)
            while not modules.at_end and _before(_of(modules.rows, attempt), step) == modules.rows.num_rows:
                modules.fill(modules.rows.num_rows + 1)
            counts["modules"] = _before(_of(modules.rows, attempt), step)
        taken = {table: tail.take(counts.get(table, 0)) for table, tail in self._tables.items()}
        if not any(rows.num_rows for rows in taken.values()):
            return None
        return Chunk(**taken, cursor=self.cursor)

    def look(self) -> None:
        """Look what is on disk now."""
        for tail in self._tables.values():
            tail.list()

    def remaining(self) -> int:
        """Rows on disk, as of the last `look` or `read`, that no chunk has given yet."""
        return sum(tail.end - tail.first for tail in self._tables.values())

    def lost(self) -> list[tuple[str, int]]:
        """What has been passed over since the last call because it is damaged or missing, as (text, rows)."""
        lost = [entry for tail in self._tables.values() for entry in tail.lost]
        for tail in self._tables.values():
            tail.lost.clear()
        return lost

    def _attempt(self, scalars: TableTail, *others: TableTail) -> int:
        """The attempt of the next rows: a crash may have left some in one table only."""
        scalars.fill(CHUNK_ROWS)
        for other in others:
            other.fill(1)
        return min((tail.rows["attempt"][0].as_py() for tail in (scalars, *others) if tail.rows.num_rows), default=0)

    def _whole(self, scalars: TableTail, attempt: int, final: bool) -> tuple[bool, int | None]:
        """Whether any step of the attempt is whole, and the step before which all are; None where every one is."""
        while True:
            rows = _of(scalars.rows, attempt)
            if rows.num_rows < scalars.rows.num_rows or (final and scalars.at_end):
                return True, None
            of_steps = pc.is_valid(rows["iteration"])
            steps = rows["step"].to_numpy()[of_steps.to_numpy()]
            latest = int(steps.max()) if len(steps) else 0
            if len(steps) and steps.min() < latest and _before(rows, latest, of_steps):
                return True, latest
            if scalars.at_end:
                return False, None
            scalars.fill(2 * rows.num_rows)

    def _shortened(self, stats: TableTail, attempt: int, step: int | None) -> int | None:
        """`step`, or an earlier one where all before it would be too many rows of `stats`."""
        stats.fill(CHUNK_ROWS)
        while not stats.at_end and _before(rows := _of(stats.rows, attempt), step) == stats.rows.num_rows:
            latest = int(rows["step"].to_numpy().max())
            if _before(rows, latest):
                return latest
            stats.fill(2 * rows.num_rows)
        return _bounded(_of(stats.rows, attempt), step)


def _of(rows: pa.Table, attempt: int) -> pa.Table:
    """The rows of `attempt`, before which there are none: in the order of `seq`, attempts ascend."""
    if rows.num_rows == 0 or rows["attempt"][-1].as_py() == attempt:
        return rows
    return rows.slice(0, int(np.searchsorted(rows["attempt"].to_numpy(), attempt, side="right")))


def _bounded(rows: pa.Table, step: int | None, among: pa.ChunkedArray | None = None) -> int | None:
    """`step`, or an earlier one where more than `CHUNK_ROWS` rows come before it (a part may hold many)."""
    if _before(rows, step, among) <= CHUNK_ROWS:
        return step
    beyond = rows["step"].slice(CHUNK_ROWS)
    if among is not None:
        beyond = beyond.filter(among.slice(CHUNK_ROWS))
    steps = np.unique(beyond.to_numpy())
    return next((int(one) for one in steps if (step is None or one < step) and _before(rows, one, among)), step)


def _before(rows: pa.Table, step: int | None, among: pa.ChunkedArray | None = None) -> int:
    """How many rows come before the first one of `step` or later (None: all), of those `among` counts."""
    if step is None or rows.num_rows == 0:
        return int(rows.num_rows)
    later = pc.fill_null(pc.greater_equal(rows["step"], step), False)
    if among is not None:
        later = pc.and_(later, among)
    found = np.flatnonzero(later.to_numpy())
    return int(found[0]) if len(found) else int(rows.num_rows)

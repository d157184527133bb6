"""The small parts of a large `stats` table in memory: what is asked again and again is not decoded again and again."""

import threading
from collections.abc import Callable, Sequence

import pyarrow as pa

from .parts import Part
from .pruning import Wanted, is_small
from .schema import SCHEMAS

MOST_BYTES = 128 << 20
"""Of one run's rows that are held."""
_MOST_ROWS = 1 << 20
"""Of small parts. Where more wait to be merged, reading them all for a part of them would cost too much memory."""
_ALWAYS = ("seq", "attempt", "module", "site", "step")


class Held:
    """Columns of the rows of small parts, each decoded when it is first asked for; the oldest make room for others.

    `parts`: of one rank, of which each row is in one. They never change, so what is held is never out of date.
    """

    def __init__(self, parts: Sequence[Part], most_bytes: int = MOST_BYTES) -> None:
        self.parts = tuple(part for part in parts if is_small(part))
        self.names = frozenset(part.name for part in self.parts)
        self._few = sum(part.rows for part in self.parts) <= _MOST_ROWS
        self._most_bytes = most_bytes
        self._columns: dict[str, pa.ChunkedArray] = {}
        self._lock = threading.Lock()

    def takes(self, wanted: Wanted) -> bool:
        """Whether the columns that are wanted may be held."""
        return bool(self.parts) and self._few and "histogram" not in wanted.names

    def rows(self, wanted: Wanted, drop: Callable[[pa.Table], pa.Table]) -> pa.Table:
        """The wanted rows of all the parts, in their order. `drop` leaves out what does not count of rows just read.

        Raises DamagedPart where one of the parts cannot be read, SchemaTooNew.
        """
        names = list(dict.fromkeys((*_ALWAYS, *wanted.names)))
        with self._lock:
            missing = [name for name in names if name not in self._columns]
            if missing:
                self._read(missing, drop)
            found = pa.table([self._columns[name] for name in names], names)
            self._columns |= {name: self._columns.pop(name) for name in names}  # what was used last goes last
            while self.nbytes > self._most_bytes:
                del self._columns[next(iter(self._columns))]
        return wanted.filter(found).select(wanted.names)

    @property
    def nbytes(self) -> int:
        """The bytes that are held."""
        return sum(column.nbytes for column in self._columns.values())

    def _read(self, names: Sequence[str], drop: Callable[[pa.Table], pa.Table]) -> None:
        wanted = Wanted(columns=tuple(dict.fromkeys(("attempt", "step", *names))))
        empty = SCHEMAS["stats"].empty_table().select(wanted.names).replace_schema_metadata(None)
        rows = pa.concat_tables([empty, *(drop(wanted.read(part)) for part in self.parts)])
        rows = rows.unify_dictionaries().combine_chunks()
        self._columns |= {name: rows[name] for name in names}

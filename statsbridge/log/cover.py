"""Which parts to read for all rows of a table, each once: the widest that are readable, and what none holds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..errors import DamagedPart
from .parts import Part, list_parts

_LOOKS = 10  # parts may be merged into wider ones while we read: that often we look again for what has vanished


@dataclass(slots=True)
class Cover:
    """The rows of one table that there were when it was made, by `parts`; later ones are left out.

    `damaged`: what could not be read, and rows that are in no part.
    """

    run: Path
    table: str
    parts: Sequence[Part]
    damaged: list[DamagedPart] = field(default_factory=list)

    def read(self, read: Callable[[Part], pa.Table]) -> Iterator[tuple[int, pa.Table]]:
        """(rank, rows) of each part that counts; `read` gives all or some of its rows, with the column `seq`."""
        for rank, end in self._ends().items():
            yield from ((rank, rows) for rows in self._read_rank(rank, end, read))

    def _ends(self) -> Mapping[int, int]:
        ends: dict[int, int] = {}
        for part in self.parts:
            ends[part.rank] = max(ends.get(part.rank, 0), part.last + 1)
        return dict(sorted(ends.items()))

    def _read_rank(self, rank: int, end: int, read: Callable[[Part], pa.Table]) -> Iterator[pa.Table]:
        parts = [part for part in self.parts if part.rank == rank]
        bad: set[str] = set()
        position, looks = 0, 0
        while position < end:
            here = [part for part in parts if part.first <= position <= part.last and part.name not in bad]
            if not here:
                position = self._pass_over(rank, position, end, parts)
                continue
            part = max(here, key=lambda part: part.rows)
            try:
                rows = read(part)
            except DamagedPart as error:
                if isinstance(error.__cause__, FileNotFoundError) and looks < _LOOKS:
                    looks += 1
                    now = [found for found in list_parts(self.run, self.table) if found.rank == rank]
                    # Where no wider part has taken its place, it is missing and not merged.
                    if any(found.first <= part.first and part.last <= found.last for found in now):
                        parts = now
                        continue
                bad.add(part.name)
                self.damaged.append(error)
                continue
            stop = min(part.last + 1, end)
            if part.first < position or part.last >= stop:
                seq = rows["seq"].to_numpy()
                rows = rows.filter(pa.array((seq >= position) & (seq < stop)))
            position = stop
            yield rows

    def _pass_over(self, rank: int, position: int, end: int, parts: Sequence[Part]) -> int:
        """Where to go on after rows that no readable part holds."""
        here = [part.last + 1 for part in parts if part.first <= position <= part.last]
        after = min([end, *here, *(part.first for part in parts if part.first > position)])
        if not here:
            text = f"{self.table}/rank={rank}: no part holds rows {position} to {after - 1}"
            self.damaged.append(DamagedPart(text))
        return after


def in_order(rows: pa.Table) -> pa.Table:
    """`rows` sorted by (rank, seq): merged parts are sorted by what readers look for."""
    rank, seq = rows["rank"].to_numpy(), rows["seq"].to_numpy()
    if len(seq) < 2 or bool(np.all((np.diff(rank) > 0) | (np.diff(seq) > 0))):
        return rows
    first, end = int(seq.min()), int(seq.max()) + 1
    if end - first <= 2 * len(seq) and bool((rank == rank[0]).all()):  # each number once: no need to compare them
        places = np.full(end - first, -1)
        places[seq - first] = np.arange(len(seq))
        order = places[places >= 0]
        if len(order) == len(seq):
            return rows.take(pa.array(order))
    return rows.take(pa.array(np.lexsort([seq, rank])))

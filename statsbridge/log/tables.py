"""The tables of a run as it was when it was loaded, and its parts."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import DamagedPart, StatsBridgeWarning
from .attempts import EVERYTHING, Attempt, Superseded, read_attempts
from .cover import Cover, in_order
from .parts import Part, live_parts, read_part
from .schema import SCHEMAS


class Tables:
    """The tables of one run as pyarrow Tables, read when first used; what is damaged is left out, and said."""

    def __init__(
        self,
        path: Path,
        info: Mapping[str, Any],
        parts: Mapping[str, Sequence[Part]],
        superseded: Superseded = EVERYTHING,
    ) -> None:
        self.path = path
        self.id = str(info["id"])
        self.info = info
        self._parts = parts
        self._superseded = superseded
        self._damaged: dict[str, list[DamagedPart]] = {}
        self._said: set[str] = set()

    @cached_property
    def modules(self) -> pa.Table:
        """One row a (trace, module call): type, parent, order, depth. Sorted by (rank, seq), as all are."""
        return self._read("modules")

    @cached_property
    def stats(self) -> pa.Table:
        """One row a (sampled step, module call, site, tensor)."""
        return self._read("stats")

    @cached_property
    def scalars(self) -> pa.Table:
        """One row a value: the user's and the training's (learning rates, norms)."""
        return self._read("scalars")

    @cached_property
    def events(self) -> pa.Table:
        """One row for each thing worth knowing."""
        return self._read("events")

    @property
    def damaged(self) -> tuple[DamagedPart, ...]:
        """What is wrong with each part that was left out, by name. Reads the whole run."""
        for table in SCHEMAS:
            getattr(self, table)
        return tuple(error for table in SCHEMAS for error in self._damaged[table])

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The attempts after the first, in order. Raises LogError where one's file cannot be read."""
        return read_attempts(self.path)

    def _live(self, table: str) -> tuple[list[Part], dict[int, int]]:
        """The parts that hold the rows of a table now, and the last row of each rank when it was loaded."""
        ends = {part.rank: part.last for part in sorted(self._parts[table], key=lambda part: part.last)}
        return [part for part in live_parts(self.path, table) if part.first <= ends.get(part.rank, -1)], ends

    def _read(self, table: str) -> pa.Table:
        return self._gather(table, read_part)

    def _gather(
        self,
        table: str,
        read: Callable[[Part], pa.Table],
        names: Sequence[str] | None = None,
        ordered: bool = True,
    ) -> pa.Table:
        cover = Cover(self.path, table, self._parts[table])
        empty = SCHEMAS[table].empty_table()
        chunks = [(empty if names is None else empty.select(names)).append_column("rank", pa.array([], pa.int64()))]
        for rank, all_rows in cover.read(read):
            rows = self._superseded.drop(all_rows)
            chunks.append(rows.append_column("rank", pa.array(np.full(rows.num_rows, rank))))
        for error in cover.damaged:
            if str(error) not in self._said:
                self._said.add(str(error))
                warnings.warn(f"statsbridge: left out a damaged part: {error}", StatsBridgeWarning, stacklevel=5)
        self._damaged[table] = cover.damaged
        rows = pa.concat_tables(chunks).unify_dictionaries()
        return in_order(rows.combine_chunks()) if ordered else rows

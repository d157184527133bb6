"""What a tracker would not take: kept in `mirrors/<mirror>/dead-letters/`, with the reason."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import LogError
from ..log.files import make_folder, write_durably
from ..log.parts import open_parquet
from ..log.schema import as_text
from .contract import Histogram, Point
from .state import FOLDER
from .tail import Cursor

_TIME = pa.timestamp("us", "UTC")

SCHEMA = pa.schema(
    {
        "refused": _TIME,
        "reason": pa.string(),
        "series": pa.string(),
        "kind": pa.string(),
        "statistic": pa.string(),
        "site": pa.string(),
        "module": pa.string(),
        "type": pa.string(),
        "tensor": pa.string(),
        "call": pa.int64(),
        "step": pa.int64(),
        "time": _TIME,
        "value": pa.float64(),
        "counts": pa.list_(pa.int64()),
        "edges": pa.list_(pa.float64()),
    }
)
"""A row for each point or histogram; `value` or `counts` and `edges`. `time`: of the recording."""


class DeadLetters:
    """Those since the cursor was last saved. Not for several threads."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, items: Sequence[Point | Histogram], reason: str) -> None:
        """Keep `items`, in memory until `write`."""
        now = time.time_ns() // 1000
        for item in items:
            series = item.series
            row = {
                "refused": now,
                "reason": as_text(reason),
                "series": series.name,
                "kind": series.kind,
                "statistic": series.statistic,
                "site": series.site,
                "module": series.module,
                "type": series.type,
                "tensor": series.tensor,
                "call": series.call,
                "step": item.step,
                "time": item.time,
            }
            if isinstance(item, Histogram):
                row.update(counts=item.counts.tolist(), edges=item.edges.tolist())
            else:
                row["value"] = item.value
            self._rows.append(row)

    def write(self, run: Path, mirror: str, since: Cursor) -> None:
        """Write those that came up since the cursor `since`, durably. Raises OSError.

        The file is named by that cursor: what comes again after a crash replaces it, so no row is there twice.
        """
        if not self._rows:
            return
        folder = _folder(run, mirror)
        make_folder(folder)
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA), sink, compression="zstd")
        numbers = (since.modules, since.stats, since.scalars, since.events)
        write_durably(folder / f"{'-'.join(f'{number:012d}' for number in numbers)}.parquet", sink.getvalue())

    def clear(self) -> None:
        """Forget them: the cursor has moved on."""
        self._rows.clear()


def read_dead_letters(run: Path, mirror: str, unreadable: list[str] | None = None) -> pa.Table:
    """The dead letters of a mirror, in order.

    Of a file that cannot be read the reason is added to `unreadable`; without that list LogError is raised.
    """
    tables = [SCHEMA.empty_table()]
    for file in sorted(_folder(run, mirror).glob("*.parquet")):
        try:
            tables.append(open_parquet(file).read().cast(SCHEMA))
        except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: of other columns
            if unreadable is None:
                raise LogError(f"{file} cannot be read: {error}") from error
            unreadable.append(f"{file} cannot be read: {error}")
    return pa.concat_tables(tables)


def _folder(run: Path, mirror: str) -> Path:
    return run / FOLDER / mirror / "dead-letters"

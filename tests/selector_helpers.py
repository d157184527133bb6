"""Chunks of a record made by hand, one training step after another, for tests of what a mirror selects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from statsbridge.log.schema import SCHEMAS, conform, to_table
from statsbridge.mirror import Batch, Selection
from statsbridge.mirror.selector import Selector
from statsbridge.mirror.tail import Chunk, Cursor

NUMBERS = ("mean", "std", "skewness", "kurtosis", "min", "max", "abs_mean", "l2", "zero_fraction", "kl_unit_gaussian")

START = 1_700_000_000_000_000


@dataclass
class Step:
    """What one training step wrote: its scalars, what `run.log` wrote after it, and its statistics."""

    step: int
    scalars: Mapping[str, float] = field(default_factory=dict)
    logged: Sequence[tuple[int, str, float]] = ()
    stats: Sequence[Mapping[str, Any]] = ()
    attempt: int = 0

    @property
    def time(self) -> int:
        return START + 1000 * self.step + 7 * self.attempt


def stats_row(module: str = "layer", site: str = "activation", **columns: Any) -> dict[str, Any]:
    """One row of `stats`, every statistic null unless given."""
    row = {"module": module, "site": site, "type": "Linear", "call": 0, "tensor": "", "count": 100}
    return {**row, "nan_count": 0, "inf_count": 0, "order": 0, "depth": 1, **columns}


def measured(values: np.ndarray, module: str = "layer", site: str = "activation", **columns: Any) -> dict[str, Any]:
    """The row that the recording of `values` writes (without skewness, kurtosis and kl), computed in float64."""
    finite = values[np.isfinite(values)]
    numbers = {
        "count": values.size,
        "nan_count": int(np.isnan(values).sum()),
        "inf_count": int(np.isinf(values).sum()),
        "mean": finite.mean(),
        "std": finite.std(),
        "min": finite.min(),
        "max": finite.max(),
        "abs_mean": np.abs(finite).mean(),
        "l2": np.sqrt((finite**2).sum()),
        "zero_fraction": (finite == 0).mean(),
    }
    return stats_row(module, site, **numbers, **columns)


def chunk(steps: Iterable[Step]) -> Chunk:
    """The rows of some steps, as `Tail` gives them."""
    scalars: list[dict[str, Any]] = []
    stats: list[dict[str, Any]] = []
    for one in steps:
        about = {"attempt": one.attempt, "time": one.time}
        for name, value in one.scalars.items():
            scalars.append({**about, "step": one.step, "iteration": one.step, "name": name, "value": value})
        for label, name, value in one.logged:
            scalars.append({**about, "step": label, "iteration": None, "name": name, "value": value})
        stats.extend({**about, "step": one.step, "iteration": one.step, **row} for row in one.stats)
    empty = {name: schema.empty_table() for name, schema in SCHEMAS.items()}
    return Chunk(empty["modules"], _table("stats", stats), _table("scalars", scalars), empty["events"], Cursor())


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    if not rows:
        return SCHEMAS[name].empty_table()
    columns = {column: [row.get(column) for row in rows] for column in dict.fromkeys(c for row in rows for c in row)}
    attempt = pa.array(columns.pop("attempt"), pa.int64())
    table = (
        to_table(name, columns).append_column("seq", pa.array(np.arange(len(rows)))).append_column("attempt", attempt)
    )
    return conform(name, table)


def flat(batches: Iterable[Batch]) -> list[tuple[str, int, int, str]]:
    """All points in order; values by `repr`, so that NaN equals NaN and -0.0 is not 0.0."""
    return [(p.series.name, p.step, p.time, repr(p.value)) for batch in batches for p in batch.points]


def selected(steps: Iterable[Step], **arguments: Any) -> list[Batch]:
    """What a new selector makes of these steps."""
    return Selector(Selection(**arguments)).add(chunk(steps))


def curves(batches: Iterable[Batch]) -> dict[str, dict[int, float]]:
    """Name → step → value."""
    found: dict[str, dict[int, float]] = {}
    for batch in batches:
        for point in batch.points:
            found.setdefault(point.series.name, {})[point.step] = point.value
    return found

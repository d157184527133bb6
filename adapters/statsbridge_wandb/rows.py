"""From batches to W&B's rows: one a step, steps growing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from statsbridge.mirror import Batch, Histogram, Point

from .keys import histogram_key, histogram_value, series_key

_PART = 50_000


class Step(NamedTuple):
    """One row: W&B's step, seconds since the epoch, and key → value, key → (counts, edges)."""

    step: int
    time: float
    values: dict[str, float]
    histograms: dict[str, tuple[list[int], list[float]]]


class Rows:
    """What may still be written: W&B's step only grows, and each step is one row, written once.

    `last`: the step of the last row. `held`: step → values of rows that an earlier process wrote and that were not
    acknowledged: what is in them already is not written again.
    """

    def __init__(self, last: int = -1, held: Mapping[int, Mapping[str, float]] | None = None) -> None:
        self.last = last
        self._held = held or {}
        self._keys: dict[str, str] = {}

    def sort(self, batch: Batch) -> tuple[list[Step], list[object]]:
        """The rows to write, and the points and histograms that come too late."""
        found: dict[int, Step] = {}
        late: list[object] = []
        keys, step, values, last = self._keys, None, dict[str, float](), self.last
        for point in batch.points:
            if point.step != step:
                step = point.step
                values = _row(found, point).values if step > last else {}
            key = keys.get(point.series.name)
            if key is None:
                key = keys[point.series.name] = series_key(point.series.name, attached=False)
            if step > last:
                values[key] = point.value
            elif not self._has(step, key, point.value):
                late.append(point)
        for histogram in batch.histograms:
            if histogram.step > last:
                key = histogram_key(histogram.series.name, attached=False)
                _row(found, histogram).histograms[key] = histogram_value(histogram.counts, histogram.edges)
            elif histogram.step not in self._held:
                late.append(histogram)
        return [found[step] for step in sorted(found)], late

    def _has(self, step: int, key: str, value: float) -> bool:
        held: Any = self._held.get(step, {}).get(key)
        return held is not None and (held == value or (math.isnan(held) and math.isnan(value)))


def parts(rows: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """`rows` in parts of about `_PART` values, so that each is written within the time that one may take."""
    begin = held = 0
    for end, row in enumerate(rows, 1):
        held += len(row.values) + 512 * len(row.histograms)
        if held >= _PART or end == len(rows):
            yield rows[begin:end]
            begin, held = end, 0


def _row(found: dict[int, Step], of: Point | Histogram) -> Step:
    row = found.get(of.step)
    if row is None:
        row = found[of.step] = Step(of.step, of.time / 1e6, {}, {})
    return row

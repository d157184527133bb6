"""Gradients that fall below what float16 can hold, as the histograms show it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from ...moments import LOWEST_EXPONENT, ZERO_BIN
from ..thresholds import Thresholds
from .known import Floats
from .memory import Streak
from .step import Hits, Step, shown

# float16: the smallest number above 0 is 2^-24; a few of them are what lies below 2^-22.
_LEAST_EXPONENT, _FEW = -24, 2
#: Of the elements other than 0 so many lie next to the smallest number where a distribution is cut off there.
_CUT = 0.02


def around_the_least(histogram: pa.ChunkedArray) -> dict[str, Floats]:
    """Of each row the number of elements other than 0: `below` float16's least, `least` next to it, and in all.

    NaN where a row has no histogram.
    """
    columns = {name: np.full(len(histogram), np.nan) for name in ("below", "least", "nonzero")}
    there = histogram.is_valid().to_numpy()
    counts = np.array(histogram.drop_null().combine_chunks().flatten()).reshape(int(there.sum()), -1)
    outwards = counts[:, ZERO_BIN + 1 :] + counts[:, ZERO_BIN - 1 :: -1]
    first = 1 + _LEAST_EXPONENT - LOWEST_EXPONENT
    columns["below"][there] = outwards[:, :first].sum(axis=1)
    columns["least"][there] = outwards[:, first : first + _FEW].sum(axis=1)
    columns["nonzero"][there] = outwards.sum(axis=1)
    return columns


class Underflow:
    """Gradients with many zeros whose smallest numbers are just float16's smallest: what is below has become 0."""

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._cut = Streak()

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None or "below" not in step.rows:
            return
        rows, limit = step.leaves("activation_grad"), self._limits.underflow
        cut = (rows["below"] == 0) & (rows["least"] > _CUT * rows["nonzero"]) & (rows["nonzero"] > 0)
        found = self._cut.update(rows.ids, cut & (rows["zero_fraction"] > limit), step.step, 2)
        if found.any():
            yield Hits(
                "underflow",
                "warning",
                rows.ids[found],
                rows["zero_fraction"][found],
                self._cut.since(rows.ids[found]),
                limit,
                lambda name, identity, value: (
                    f"{value:.0%} of the gradient at the output of {shown(name)} are exactly 0, and its smallest "
                    f"numbers are the smallest that float16 has (2^-24): what is smaller has become 0 "
                    f"(limit {limit:.0%})"
                ),
                backward=True,
            )

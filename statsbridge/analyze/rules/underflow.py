"""Numbers of the backward pass and of optimizers that fall below what float16 can hold, as the histograms show it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from ...moments import LOWEST_EXPONENT, ZERO_BIN
from ..thresholds import Thresholds
from .known import Floats, Known
from .memory import Streak
from .step import Hits, Say, Step, shown

# float16: the smallest number above 0 is 2^-24; a few of them are what lies below 2^-22.
_LEAST_EXPONENT, _FEW = -24, 2
#: Of the elements other than 0 so many lie next to the smallest number where a distribution is cut off there.
_CUT = 0.02
#: And so many in all: of a distribution that goes on to 0 a third as many would lie below.
_ENOUGH = 30


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
    """Gradients and optimizer state with many zeros whose smallest numbers are just float16's: what is below is 0 now.

    bfloat16 and float32 go down to 2^-126, which no training comes near: there a distribution is not cut off. Nor is
    it under a GradScaler, whose factor has been divided out.
    """

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._cut = Streak()

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None or "below" not in step.rows:
            return
        limit, sites = self._limits.underflow, ("parameter_grad", "optimizer_state")
        ids = np.concatenate((step.leaves("activation_grad").ids, *(step.site(name).ids for name in sites)))
        rows = step.rows.where(np.isin(step.rows.ids, ids))
        cut = (rows["below"] == 0) & (rows["least"] >= np.maximum(_ENOUGH, _CUT * rows["nonzero"]))
        # Few values that stand in many places (behind a mean over them) may miss the end of a distribution once.
        patience = self._limits.persistence
        found = self._cut.update(rows.ids, cut & (rows["zero_fraction"] > limit), step.step, patience)
        if found.any():
            yield Hits(
                "underflow",
                "warning",
                rows.ids[found],
                rows["zero_fraction"][found],
                self._cut.since(rows.ids[found]),
                limit,
                _gone(step.known, limit),
                backward=True,
            )


def _gone(known: Known, limit: float) -> Say:
    def say(name: str, identity: int, value: float) -> str:
        tensor = known.tensor_name(identity)
        what = {
            "parameter_grad": f"the gradient of parameter {tensor} of {shown(name)}",
            "optimizer_state": f"the optimizer's {tensor} of {shown(name)}",
        }.get(known.site_name(identity), f"the gradient at the output of {shown(name)}")
        return (
            f"{value:.0%} of {what} are exactly 0, and its smallest numbers are the smallest that float16 has (2^-24): "
            f"what is smaller has become 0 (limit {limit:.0%})"
        )

    return say

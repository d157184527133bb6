"""Counts in bins of any width, as the bins of one width that Aim's distributions have."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BINS = 128


def even_bins(
    counts: npt.NDArray[np.int64], edges: npt.NDArray[np.float64], bins: int = BINS
) -> tuple[npt.NDArray[np.float64], tuple[float, float]] | None:
    """Spread each count evenly over its bin, and add up what falls into each of `bins` bins of equal width.

    Args:
        counts: shape `[n]`.
        edges: shape `[n + 1]`, ascending. What lies beyond the outermost finite edges is put at them; a bin
            without width is one value (our exact zeros).
        bins: how many there will be.

    Returns:
        The new counts, float64 of shape `[bins]`, with the same sum, and the range that they cover: from the
        first bin that holds something to the end of the last. None where nothing is counted.
    """
    held = np.flatnonzero(counts)
    if not len(held):
        return None
    finite = np.clip(edges, *edges[np.isfinite(edges)][[0, -1]])
    lower, upper, amounts = finite[held], finite[held + 1], counts[held]
    low, high = float(lower[0]), float(upper[-1])
    if low == high:  # all of one value, as numpy.histogram has it
        low, high = low - 0.5, high + 0.5
    even = np.linspace(low, high, bins + 1)
    wide = upper > lower
    shares = np.clip((even - lower[wide, None]) / (upper - lower)[wide, None], 0.0, 1.0)
    spread = np.diff(amounts[wide] @ shares)
    places = np.clip(np.searchsorted(even, lower[~wide], side="right") - 1, 0, bins - 1)
    np.add.at(spread, places, amounts[~wide])
    return spread, (low, high)

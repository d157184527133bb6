"""Statistics of many small tensors at once, exactly, in float64: in the background thread."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ..moments import HISTOGRAM_BINS
from .histogram import bins_of

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def measure_segments(values: Floats, lengths: Integers) -> dict[str, npt.NDArray[Any]]:
    """Statistics columns of consecutive runs of `values`.

    Args:
        values: every element of all tensors, one after the other; NaN and infinities are counted and left out.
        lengths: how many belong to each tensor, shape `[tensors]`, each at least 1.

    Returns:
        The columns `count` … `zero_fraction`, shape `[tensors]`; NaN where there is no finite element, and for
        skewness and kurtosis of a constant.
    """
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    nan_count = inf_count = np.zeros(len(lengths), dtype=np.int64)
    used = lengths
    finite = np.isfinite(values)
    whole = bool(finite.all())
    if not whole:
        used = np.add.reduceat(finite, starts, dtype=np.int64)
        nan_count = np.add.reduceat(np.isnan(values), starts, dtype=np.int64)
        inf_count = lengths - used - nan_count

    def total(terms: npt.NDArray[Any]) -> Floats:
        return np.add.reduceat(terms if whole else np.where(finite, terms, 0.0), starts, dtype=np.float64)

    with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
        low = np.minimum.reduceat(values if whole else np.where(finite, values, np.inf), starts)
        high = np.maximum.reduceat(values if whole else np.where(finite, values, -np.inf), starts)
        # Centred on the middle and scaled to ±1: any numbers a float can hold then have sums of fourth powers.
        middle, reach = low / 2 + high / 2, high / 2 - low / 2
        unit = np.where(reach > 0, reach, 1.0)
        z = (values - np.repeat(middle, lengths)) / np.repeat(unit, lengths)
        mean = total(z) / used
        z -= np.repeat(mean, lengths)
        square = z * z
        m2, m3, m4 = total(square) / used, total(square * z) / used, total(square * square) / used
        constant = low == high
        columns: dict[str, npt.NDArray[Any]] = {
            "count": lengths.astype(np.int64),
            "nan_count": nan_count,
            "inf_count": inf_count,
            "mean": np.where(constant, low, middle + mean * unit),
            "std": np.where(constant, 0.0, np.sqrt(m2) * unit),
            "skewness": np.where(constant, np.nan, m3 / m2**1.5),
            "kurtosis": np.where(constant, np.nan, m4 / m2**2 - 3.0),
            "min": low,
            "max": high,
            "abs_mean": total(np.abs(values)) / used,
            "zero_fraction": total(values == 0) / used,
        }
        columns["l2"] = np.sqrt(used) * np.hypot(columns["mean"], columns["std"])
    for column in columns.values():
        if column.dtype == np.float64:
            column[used == 0] = np.nan
    return columns


def histogram_segments(values: Floats, lengths: Integers) -> Integers:
    """Histograms of consecutive runs of `values`, shape `[tensors, HISTOGRAM_BINS]`."""
    stride = HISTOGRAM_BINS + 1
    flat = bins_of(values) + np.repeat(np.arange(len(lengths)) * stride, lengths)
    counts = np.bincount(flat, minlength=len(lengths) * stride)
    return counts.reshape(len(lengths), stride)[:, :HISTOGRAM_BINS]

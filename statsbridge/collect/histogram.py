"""Counting values into the bins of the `histogram` column by the bits of their exponents."""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..moments import HIGHEST_EXPONENT, HISTOGRAM_BINS, LOWEST_EXPONENT, ZERO_BIN

Integers = npt.NDArray[np.int64]


def exponent_layout(bits: int) -> tuple[int, int, int]:
    """Of the IEEE float of 32 or 64 bits: mantissa bits, exponent bias, and number of (sign, exponent) keys."""
    return (23, 127, 512) if bits == 32 else (52, 1023, 4096)


@cache
def key_bins(bits: int) -> Integers:
    """The bin of each key: sign and exponent as they stand in the float; one more key for exact zeros.

    NaN and infinities go to bin `HISTOGRAM_BINS`, which is not kept.
    """
    _, bias, keys = exponent_layout(bits)
    half = keys // 2
    exponent = np.arange(half) - bias
    # 0 is underflow, then one bin an exponent, then overflow: counted outwards from zero.
    outwards = np.clip(exponent - LOWEST_EXPONENT + 1, 0, HIGHEST_EXPONENT - LOWEST_EXPONENT + 2)
    bins = np.concatenate((ZERO_BIN + 1 + outwards, ZERO_BIN - 1 - outwards, [ZERO_BIN]))
    bins[[half - 1, keys - 1]] = HISTOGRAM_BINS
    return bins


def bins_of(values: npt.NDArray[Any]) -> Integers:
    """The bin of each float32 or float64 value; `HISTOGRAM_BINS` for NaN and infinities."""
    return key_bins(values.dtype.itemsize * 8)[_keys(values)]


def histogram_of(values: npt.NDArray[Any]) -> Integers:
    """Counts of float32 or float64 values, shape `[HISTOGRAM_BINS]`."""
    bits = values.dtype.itemsize * 8
    return fold_keys(np.bincount(_keys(values), minlength=exponent_layout(bits)[2] + 1), bits)


def fold_keys(counts: npt.NDArray[np.integer[Any]], bits: int) -> Integers:
    """Counts by key, of floats of so many bits, as counts by bin."""
    folded = np.zeros(HISTOGRAM_BINS + 1, dtype=np.int64)
    np.add.at(folded, key_bins(bits), counts)
    return folded[:HISTOGRAM_BINS]


def _keys(values: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    bits = values.dtype.itemsize * 8
    mantissa, _, zero_key = exponent_layout(bits)
    keys = (values.view(f"u{values.dtype.itemsize}") >> mantissa).astype(np.intp)
    keys[values == 0] = zero_key
    return keys

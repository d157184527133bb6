"""Counting the values of many samples into their bins, in few operations: in the background thread.

Each operation of numpy takes the interpreter lock, for which the training thread then waits: long samples share theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_LONG = 2048  # elements of a sample that is not copied to its neighbours
_TOGETHER = 1 << 16  # elements of long samples: more leave the cache
_CHUNK = 1 << 12  # of short ones
_FAR, _STEEP, _FARTHEST = 1e6, 1e30, 1e290  # of an offset in float32, of a factor there, of either in float64


class Codes(NamedTuple):
    """Several samples, and what makes bins of their values.

    `values[i]`, float32, of `lengths[i]` elements. The bin of a value is the integral part of value · `factor` +
    `offset`, and at least 0 and at most `last`: bins 0 and `last` are all beyond. `beyond`: whether any value may be.
    `partial`: whether the sums are asked for of a short one.
    """

    values: Sequence[npt.NDArray[np.float32]]
    lengths: Integers
    factor: Floats
    offset: Floats
    last: Floats
    beyond: npt.NDArray[np.bool_]
    partial: npt.NDArray[np.bool_]

    def take(self, which: Integers) -> Codes:
        """Some of them."""
        values = [self.values[index] for index in which.tolist()]
        return Codes(
            values,
            self.lengths[which],
            self.factor[which],
            self.offset[which],
            self.last[which],
            self.beyond[which],
            self.partial[which],
        )


def count_codes(codes: Codes, bins: int) -> tuple[Floats, Floats]:
    """How many values of each sample fall into each bin, `[samples, bins]`; sums of values and squares, `[2, samples]`.

    Sums are 0 where they were not asked for.
    """
    counts, sums = np.zeros((len(codes.lengths), bins)), np.zeros((2, len(codes.lengths)))
    # Spreads of micro-batches can lie further apart than float32 reaches, where inf - inf would be no bin at all.
    far = (codes.factor > _STEEP) | (np.abs(codes.offset) > _FAR)
    long = (codes.lengths >= _LONG) & ~far
    most = max(_TOGETHER, int(codes.lengths.max(initial=0)))
    space = np.empty(most, dtype=np.float32), np.empty(most, dtype=np.intp)
    for kind in (long & codes.beyond, long & ~codes.beyond):
        for which in _groups(codes.lengths, np.flatnonzero(kind), _TOGETHER):
            counts[which], sums[:, which] = _count_long(codes.take(which), bins, *space)
    for which in _groups(codes.lengths, np.flatnonzero(~long), _CHUNK):
        counts[which], sums[:, which] = _count_short(codes.take(which), bins, bool(far[which].any()))
    return counts, sums


def _groups(lengths: Integers, which: Integers, most: int) -> Iterator[Integers]:
    """Groups of at most so many elements, were all as long as their longest; a longer one is a group of its own."""
    start, longest = 0, 0
    for end, length in enumerate(lengths[which].tolist()):
        longest = max(longest, length)
        if end > start and longest * (end - start + 1) > most:
            yield which[start:end]
            start, longest = end, length
    if len(which):
        yield which[start:]


def _keep_within(code: npt.NDArray[Any], last: npt.NDArray[Any], beyond: bool) -> None:
    """Bring what is beyond the bins into the outermost ones.

    A glance at the smallest and the largest costs a third of that. Not to look would be to trust in what others have
    computed: one value outside, and the rows of a whole step are lost. What is NaN is beyond as well.
    """
    if beyond or not (code.min(initial=0) >= 0 and code.max(initial=0) < last.min(initial=np.inf) + 1):
        np.minimum(np.fmax(code, 0, out=code), last, out=code)


def _count_long(
    codes: Codes, bins: int, numbers: npt.NDArray[np.float32], places: npt.NDArray[np.intp]
) -> tuple[Floats, Floats]:
    """One row each, of one length: zeros fill up, and are counted in a bin of their own that is not kept.

    In `numbers` and `places`: fresh memory would cost more than the counting.
    """
    samples, longest = len(codes.values), int(codes.lengths.max())
    table = numbers[: samples * longest].reshape(samples, longest)
    index = places[: samples * longest].reshape(samples, longest)
    for row, values in zip(table, codes.values, strict=True):
        row[: len(values)] = values
        row[len(values) :] = 0
    sums = np.stack((np.add.reduce(table, axis=1), np.vecdot(table, table)))
    table *= codes.factor.astype(np.float32)[:, None]
    table += codes.offset.astype(np.float32)[:, None]
    _keep_within(table, codes.last.astype(np.float32)[:, None], bool(codes.beyond.any()))
    np.copyto(index, table, casting="unsafe")
    for sample, length in enumerate(codes.lengths.tolist()):
        index[sample, length:] = bins
    index += (np.arange(samples) * (bins + 1))[:, None]
    counts = np.bincount(index.reshape(-1), minlength=samples * (bins + 1)).reshape(samples, bins + 1)
    return counts[:, :bins].astype(np.float64), sums.astype(np.float64)


def _count_short(codes: Codes, bins: int, far: bool) -> tuple[Floats, Floats]:
    """One after the other, in float64 where they are `far` from their bins."""
    samples, lengths = len(codes.values), codes.lengths
    factor, offset = np.minimum(codes.factor, _FARTHEST), np.clip(codes.offset, -_FARTHEST, _FARTHEST)
    kind = np.dtype(np.float64 if far else np.float32)
    code = np.concatenate(codes.values).astype(kind, copy=False)
    code *= np.repeat(factor.astype(kind), lengths)
    code += np.repeat(offset.astype(kind), lengths)
    _keep_within(code, np.repeat(codes.last.astype(kind), lengths), bool(codes.beyond.any()))
    index = code.astype(np.intp)
    index += np.repeat(np.arange(samples) * bins, lengths)
    counts = np.bincount(index, minlength=samples * bins).reshape(samples, bins)
    sums = np.zeros((2, samples))
    for sample in np.flatnonzero(codes.partial).tolist():
        values = codes.values[sample]
        sums[:, sample] = np.add.reduce(values), np.dot(values, values)
    return counts.astype(np.float64), sums

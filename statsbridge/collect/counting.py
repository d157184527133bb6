"""Counting the values of many samples into their bins, in few operations: in the background thread.

Each operation of numpy takes the interpreter lock, for which the training thread then waits: samples share theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Kind = type[np.float32] | type[np.float64]

_TOGETHER = 1 << 16  # elements of samples: more leave the cache
_ALIKE = 2  # times as long as its shortest sample may be the longest of a group: all are filled up to that
_FAR, _STEEP, _FARTHEST = 1e6, 1e30, 1e290  # of an offset in float32, of a factor there, of either in float64


class Codes(NamedTuple):
    """Several samples, and what makes bins of their values.

    `values[i]`, float32, of `lengths[i]` elements. The bin of a value is the integral part of value · `factor` +
    `offset`, and at least 0 and at most `last`: bins 0 and `last` are all beyond, and what is NaN is in bin 0.
    """

    values: Sequence[npt.NDArray[np.float32]]
    lengths: Integers
    factor: Floats
    offset: Floats
    last: Floats

    def take(self, which: Integers) -> Codes:
        """Some of them."""
        values = [self.values[index] for index in which.tolist()]
        return Codes(values, self.lengths[which], self.factor[which], self.offset[which], self.last[which])


def count_codes(codes: Codes, bins: int) -> tuple[Floats, Floats]:
    """How many values of each sample fall into each bin, `[samples, bins]`; sums of values and squares, `[2, samples]`.

    The sums are of float32.
    """
    samples = len(codes.lengths)
    counts, sums = np.zeros((samples, bins)), np.zeros((2, samples))
    # Spreads of micro-batches can lie further apart than float32 reaches, where inf - inf would be no bin at all.
    near = (codes.factor <= _STEEP) & (np.abs(codes.offset) <= _FAR)
    kinds: tuple[tuple[Kind, npt.NDArray[np.bool_]], ...] = ((np.float32, near), (np.float64, ~near))
    for kind, chosen in kinds:
        which = np.flatnonzero(chosen & (codes.lengths > 0))
        which = which[np.argsort(codes.lengths[which], kind="stable")]
        if len(which):
            counts[which], sums[:, which] = _count_sorted(codes.take(which), bins, kind)
    return counts, sums


def _count_sorted(codes: Codes, bins: int, kind: Kind) -> tuple[Floats, Floats]:
    """The same of samples in the order of their lengths, in numbers of one `kind`.

    Those of a group are the rows of one table. Zeros fill it up, and are taken out of the bin that they fall into.
    """
    samples = len(codes.values)
    counts, sums = np.zeros((samples, bins)), np.zeros((2, samples))
    factor = np.minimum(codes.factor, _FARTHEST).astype(kind)[:, None]
    offset = np.clip(codes.offset, -_FARTHEST, _FARTHEST).astype(kind)[:, None]
    last = codes.last.astype(kind)[:, None]
    starts = (np.arange(samples, dtype=np.int32) * bins)[:, None]
    bin_of_zero = np.zeros(samples, dtype=np.intp)
    lacking = np.zeros(samples, dtype=np.int64)
    # Fresh memory for each group would cost more than the counting.
    most = max(_TOGETHER, int(codes.lengths[-1]))
    numbers: npt.NDArray[Any] = np.empty(most, dtype=kind)
    places, indices = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.intp)
    for here in _groups(codes.lengths.tolist()):
        shape = here.stop - here.start, int(codes.lengths[here.stop - 1])
        size = math.prod(shape)
        code, place, index = numbers[:size].reshape(shape), places[:size].reshape(shape), indices[:size]
        for row, values in zip(code, codes.values[here], strict=True):
            row[: len(values)] = values
            row[len(values) :] = 0
        sums[0, here], sums[1, here] = np.add.reduce(code, axis=1), np.vecdot(code, code)
        code *= factor[here]
        code += offset[here]
        # NaN has no place, and would cost the rows of the whole step. It comes of a value that is not finite, which the
        # sum shows, or of numbers that are far.
        if kind is np.float64 or not np.isfinite(sums[0, here]).all():
            np.fmax(code, 0, out=code)
        np.clip(code, 0, last[here], out=code)
        np.copyto(place, code, casting="unsafe")
        bin_of_zero[here], lacking[here] = place[:, -1], shape[1] - codes.lengths[here]
        np.add(place, starts[: shape[0]], out=index.reshape(shape), dtype=np.int32)
        np.add.at(counts[here].reshape(-1), index, 1.0)  # in numpy 2 faster than `bincount`
    counts[np.arange(samples), bin_of_zero] -= lacking
    return counts, sums


def _groups(lengths: Sequence[int]) -> Iterator[slice]:
    """Groups of samples about as long as each other, of at most so many elements when all are as long as the last."""
    start = 0
    for end, length in enumerate(lengths):
        too_many = end > start and length * (end - start + 1) > _TOGETHER
        if too_many or length > _ALIKE * lengths[start]:
            yield slice(start, end)
            start = end
    if lengths:
        yield slice(start, len(lengths))

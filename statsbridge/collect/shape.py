"""The shape term of the KL divergence: how far a distribution is from a Gaussian of its own mean and spread.

shape = KL(p ‖ N(mean, std²)) = ½ ln(2πe) + ln std − H(p), with the differential entropy H(p) from a histogram:
H = −Σ pᵢ ln(pᵢ / widthᵢ) + (occupied bins − 1) / 2n, the last term being Miller's bias correction (1955).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from .counting import Codes, count_codes

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

FEWEST_ELEMENTS = 64
MOST_BINS = 96
_REACH = 5.0
_LARGEST_CORRECTION = 0.1


@dataclass(frozen=True, slots=True)
class Samples:
    """Values of several tensors, and what is known of the whole tensors they stand for.

    `values[i]`, float32, are numbers v with x = shift + v / gain; all other fields have shape `[samples]`.
    `elements`: the finite elements that the sample stands for; `drawn`: those of them that it has seen.
    `mean` … `maximum`: of all those elements.
    """

    row: Integers
    values: Sequence[npt.NDArray[np.float32]]
    shift: Floats
    gain: Floats
    elements: Floats
    drawn: Floats
    mean: Floats
    std: Floats
    minimum: Floats
    maximum: Floats


@dataclass(slots=True)
class _Rows:
    """What is kept of each row, shape `[rows]`: bins in units z = (x − origin) / unit, and moments of z.

    Origin and unit are mean and spread of the first sample with any spread. `bins` is 0 where there was none yet.
    `weight`, `sum1`, `sum2`: of all elements, estimated from what was drawn.
    """

    origin: Floats
    unit: Floats
    low: Floats
    width: Floats
    bins: Floats
    drawn: Floats
    weight: Floats
    sum1: Floats
    sum2: Floats

    @classmethod
    def empty(cls, rows: int) -> _Rows:
        return cls(*(np.zeros(rows) for _ in fields(cls)))


class Shapes:
    """Histograms of the rows of one step. Micro-batches share the bins that the first one with any spread has set."""

    def __init__(self) -> None:
        self._rows = _Rows.empty(0)
        self._counts: Floats = np.zeros((0, MOST_BINS + 2))
        self._constants: list[tuple[Integers, Floats, Floats]] = []

    def add_constants(self, row: Integers, value: Floats, elements: Floats) -> None:
        """Tensors whose elements are all one number: they are counted when their rows are finished."""
        self._constants.append((row, value, elements))

    def add(self, samples: Samples) -> None:
        """Count samples of tensors that are not constant."""
        if not len(samples.row):
            return
        self._grow(int(samples.row.max()) + 1)
        self._set_bins(samples)
        rows, owner = self._rows, samples.row
        factor = 1 / (samples.gain * rows.unit[owner])
        offset = (samples.shift - rows.origin[owner]) / rows.unit[owner]
        np.add.at(rows.drawn, owner, samples.drawn)
        lengths = np.array([len(values) for values in samples.values])
        worth = samples.elements / np.maximum(lengths, 1)
        codes = Codes(
            samples.values,
            lengths,
            factor / rows.width[owner],
            (offset - rows.low[owner]) / rows.width[owner] + 1,
            rows.bins[owner] + 1,
        )
        counts, sums = count_codes(codes, MOST_BINS + 2)
        counts *= worth[:, None]
        if len(np.unique(owner)) == len(owner):
            self._counts[owner] += counts
        else:  # a row has several samples here; `add.at` takes ten times as long
            np.add.at(self._counts, owner, counts)
        self._add_moments(samples, factor, offset, sums / np.maximum(lengths, 1))

    def shape(self, mean: Floats, std: Floats, kurtosis: Floats, minimum: Floats, maximum: Floats) -> Floats:
        """The shape term in nats, shape `[rows]`, given exact figures of every row; garbage for one without samples."""
        self._grow(len(mean))
        self._count_constants()
        rows, counts = self._rows, self._counts.copy()
        with np.errstate(all="ignore"):
            widths = np.repeat(rows.width[:, None], MOST_BINS + 2, axis=1)
            every, last = np.arange(len(counts)), rows.bins.astype(np.int64)
            lowest, highest = ((edge - rows.origin) / rows.unit for edge in (minimum, maximum))
            _settle_tail(counts, widths, every, 0, 1, np.maximum(rows.low - lowest, 0))
            upper = rows.low + rows.bins * rows.width
            _settle_tail(counts, widths, every, last + 1, last, np.maximum(highest - upper, 0))
            share = counts / counts.sum(axis=1, keepdims=True)
            surprise = np.where(counts > 0, -np.log(share / widths), 0.0)
            entropy = np.vecdot(share, surprise) + (np.count_nonzero(counts, axis=1) - 1) / (2 * rows.drawn)
            exact_mean = (mean - rows.origin) / rows.unit
            exact_square = (std / rows.unit) ** 2 + exact_mean**2
            centres = rows.low[:, None] + rows.width[:, None] * (np.arange(MOST_BINS + 2) - 0.5)
            slope, curvature = _regress(share, surprise, centres, (kurtosis + 2) * (std / rows.unit) ** 4)
            missed = slope * (exact_mean - rows.sum1 / rows.weight)
            missed += curvature * (exact_square - rows.sum2 / rows.weight)
            # More than this is not noise: the sample has missed a tail, and says nothing about its entropy.
            entropy += np.nan_to_num(np.clip(missed, -_LARGEST_CORRECTION, _LARGEST_CORRECTION))
            result: Floats = 0.5 * math.log(2 * math.pi * math.e) + np.log(std / rows.unit) - entropy
            return np.maximum(result, 0.0)

    def _grow(self, size: int) -> None:
        missing = size - len(self._counts)
        if missing <= 0:
            return
        self._rows = _Rows(
            *(np.concatenate((getattr(self._rows, field.name), np.zeros(missing))) for field in fields(_Rows))
        )
        self._counts = np.concatenate((self._counts, np.zeros((missing, MOST_BINS + 2))))

    def _set_bins(self, samples: Samples) -> None:
        rows = self._rows
        owner, first = np.unique(samples.row, return_index=True)
        fresh = rows.bins[owner] == 0
        owner, first = owner[fresh], first[fresh]
        mean, std = samples.mean[first], samples.std[first]
        low = np.maximum((samples.minimum[first] - mean) / std, -_REACH)
        high = np.minimum((samples.maximum[first] - mean) / std, _REACH)
        bins = np.clip(np.rint(np.sqrt(samples.drawn[first])), 8, MOST_BINS)
        rows.origin[owner], rows.unit[owner], rows.low[owner], rows.bins[owner] = mean, std, low, bins
        rows.width[owner] = (high - low) / bins

    def _add_moments(self, samples: Samples, factor: Floats, offset: Floats, drawn: Floats) -> None:
        """Moments of z: exact where all elements were drawn, else of those drawn: mean and mean square, `drawn`."""
        rows, owner = self._rows, samples.row
        mean = (samples.mean - rows.origin[owner]) / rows.unit[owner]
        square = (samples.std / rows.unit[owner]) ** 2 + mean**2
        partial = samples.drawn < samples.elements
        mean = np.where(partial, factor * drawn[0] + offset, mean)
        of_drawn = factor**2 * drawn[1] + 2 * factor * drawn[0] * offset + offset**2
        square = np.where(partial, of_drawn, square)
        np.add.at(rows.weight, owner, samples.elements)
        np.add.at(rows.sum1, owner, samples.elements * mean)
        np.add.at(rows.sum2, owner, samples.elements * square)

    def _count_constants(self) -> None:
        rows = self._rows
        for row, number, amount in self._constants:
            known = rows.bins[row] > 0
            owner, value, elements = row[known], number[known], amount[known]
            z = (value - rows.origin[owner]) / rows.unit[owner]
            code = np.clip(np.floor((z - rows.low[owner]) / rows.width[owner]) + 1, 0, rows.bins[owner] + 1)
            np.add.at(self._counts, (owner, code.astype(np.int64)), elements)
            np.add.at(rows.drawn, owner, elements)
            np.add.at(rows.weight, owner, elements)
            np.add.at(rows.sum1, owner, elements * z)
            np.add.at(rows.sum2, owner, elements * z**2)
        self._constants.clear()


def _regress(share: Floats, surprise: Floats, centres: Floats, variance_of_square: Floats) -> tuple[Floats, Floats]:
    """Least squares of −ln p on z and z², weighted by p, over the bins of each row: the two coefficients.

    Mean and spread of the whole tensor are known exactly. Where its sample differs from them, the entropy of the
    sample is off in proportion (a control variate): all of the noise for a Gaussian, and most of it for many others.
    Outliers beyond the bins move the spread and not the entropy: they count in the exact variance of z².
    """
    square = centres**2
    from1 = centres - np.vecdot(share, centres)[:, None]
    from2 = square - np.vecdot(share, square)[:, None]
    weighted1, weighted2 = share * from1, share * from2
    v11, v12, v22 = np.vecdot(weighted1, from1), np.vecdot(weighted1, from2), np.vecdot(weighted2, from2)
    k1, k2 = np.vecdot(weighted1, surprise), np.vecdot(weighted2, surprise)
    v22 = np.fmax(v22, variance_of_square)
    determinant = v11 * v22 - v12**2
    return (k1 * v22 - k2 * v12) / determinant, (k2 * v11 - k1 * v12) / determinant


def _settle_tail(
    counts: Floats, widths: Floats, every: Integers, tail: Integers | int, neighbour: Integers | int, width: Floats
) -> None:
    """Give a tail bin its width; one narrower than its neighbour becomes part of it (rounding puts values there)."""
    narrow = width < widths[every, neighbour]
    widths[every, neighbour] += np.where(narrow, width, 0.0)
    counts[every, neighbour] += np.where(narrow, counts[every, tail], 0.0)
    counts[every, tail] = np.where(narrow, 0.0, counts[every, tail])
    widths[every, tail] = np.where(narrow, 1.0, width)

"""From pieces to rows: in the background thread, in float64, for all tensors of a step at once."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..moments import COUNTS, HISTOGRAM_BINS, STATISTICS, ZERO_BIN, merge_rows
from .histogram import fold_keys
from .packing import pack
from .piece import Parts, Piece, Raw, Wanted
from .shape import FEWEST_ELEMENTS, Samples, Shapes
from .small import histogram_segments, measure_segments
from .spread import sample_spreads

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[Any]]


def finish_sums(raw: Sequence[Raw]) -> Columns:
    """The statistics columns `count` … `zero_fraction` of large tensors, shape `[tensors]`, from their sums."""
    table = dict(zip(Raw._fields, np.array(raw, dtype=np.float64).reshape(-1, len(Raw._fields)).T, strict=True))
    used = table["elements"] - table["nan_count"] - table["inf_count"]
    low, high, gain = table["minimum"], table["maximum"], table["gain"]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
        m1, r2, r3, r4 = (table[name] / used for name in ("sum1", "sum2", "sum3", "sum4"))
        m2 = np.maximum(r2 - m1**2, 0.0)
        m3 = r3 - 3 * m1 * r2 + 2 * m1**3
        m4 = r4 - 4 * m1 * r3 + 6 * m1**2 * r2 - 3 * m1**4
        constant = low == high
        mean = np.where(constant, low, table["shift"] + m1 / gain)
        std = np.where(constant, 0.0, np.sqrt(m2) / gain)
        columns: Columns = {
            "count": table["elements"].astype(np.int64),
            "nan_count": table["nan_count"].astype(np.int64),
            "inf_count": table["inf_count"].astype(np.int64),
            "mean": mean,
            "std": std,
            "skewness": np.where(std > 0, m3 / m2**1.5, np.nan),
            "kurtosis": np.where(std > 0, m4 / m2**2 - 3.0, np.nan),
            "min": low,
            "max": high,
            "abs_mean": np.where(low * high > 0, np.abs(mean), table["abs_sum"] / used),
            "l2": np.sqrt(used) * np.hypot(mean, std),
            "zero_fraction": table["zeros"] / used,
        }
    for name in STATISTICS[:-1]:
        columns[name][used == 0] = np.nan
    return columns


class Reducer:
    """Turns the pieces of one sampled step into rows. BACKGROUND THREAD."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._shapes = Shapes()
        self._owners: list[Integers] = []
        self._columns: list[Columns] = []
        self._status: dict[int, str] = {}  # of pieces without elements
        self._withheld: dict[int, str] = {}  # of pieces whose elements have no numbers: their row has none either
        self._measured: set[int] = set()
        self._spreads: list[tuple[Integers, Floats]] = []

    @np.errstate(all="ignore")  # warnings may be errors, and numbers of float64 that overflow cost no rows of others
    def add(self, numbers: Sequence[int], pieces: Sequence[Piece]) -> None:
        """Add pieces to rows; several pieces of one row are merged as if they had been one tensor.

        Args:
            numbers: of the rows, from 0.
            pieces: one for each. Waits for the copy of those that were measured on a device.
        """
        rows = list(zip(numbers, pieces, strict=True))
        for _, piece in rows:
            if piece.parts is not None:
                _resolve(piece, piece.parts)
        without = [(row, piece) for row, piece in rows if piece.status is not None]
        small = [
            (row, piece)
            for row, piece in rows
            if piece.status is None and piece.raw is None and piece.values is not None
        ]
        large = [(row, piece) for row, piece in rows if piece.raw is not None]
        sparse = [(row, piece) for row, piece in rows if piece.implied_zeros]
        for row, piece in rows:
            if piece.status is None:
                self._measured.add(row)
            else:
                (self._withheld if piece.count else self._status).setdefault(row, piece.status)
        if without:
            self._append(_owners(without), _only_counts([piece.count for _, piece in without]))
        if small:
            self._add_small(small)
        if large:
            self._add_large(large)
        if sparse:
            self._add_implied_zeros(sparse)

    def finish(self, rows: int) -> dict[str, Any]:
        """The rows, `rows` of them: the columns `count` … `kl_unit_gaussian`, `histogram` and `status`.

        Returns:
            Arrays of shape `[rows]`, NaN for null; `histogram` int64 `[rows, HISTOGRAM_BINS]`, or None if not wanted;
            `status` a list of strings or None. A row that was never added has count 0 and nulls.
        """
        owner = np.concatenate(self._owners) if self._owners else np.zeros(0, dtype=np.int64)
        names = [*COUNTS, *STATISTICS[:-1], *(["histogram"] if self._wanted.histogram else [])]
        empty = _only_counts([])
        together = {
            name: np.concatenate([empty[name], *(columns[name] for columns in self._columns)]) for name in names
        }
        merged = merge_rows(together, owner, rows)
        if self._wanted.kl:
            merged["kl_unit_gaussian"] = self._divergence(merged)
        silent = {row: status for row, status in self._status.items() if row not in self._measured}
        silent |= self._withheld
        status = [silent.get(row) for row in range(rows)]
        return {**merged, "histogram": merged.get("histogram"), "status": status}

    def spreads(self, rows: int) -> Floats:
        """How much the samples in each of `rows` rows differ (see `sample_spreads`), shape `[rows]`.

        Of several pieces the largest; NaN where that was not asked, or cannot be told.
        """
        found = np.full(rows, np.nan)
        for owner, spread in self._spreads:
            np.fmax.at(found, owner, np.where(np.isnan(spread), np.inf, spread))
        return found

    def _append(self, owner: Integers, columns: Columns) -> None:
        if self._wanted.histogram:
            columns.setdefault("histogram", np.zeros((len(owner), HISTOGRAM_BINS), dtype=np.int64))
        self._owners.append(owner)
        self._columns.append(columns)

    def _add_small(self, rows: Sequence[tuple[int, Piece]]) -> None:
        pieces = [piece for _, piece in rows]
        tensors = [piece.values for piece in pieces if piece.values is not None]
        lengths = np.array([len(tensor) for tensor in tensors], dtype=np.int64)
        values = np.concatenate(tensors, dtype=np.float64)
        scale = np.array([piece.scale for piece in pieces])
        if (scale != 1).any():
            values = values / np.repeat(scale, lengths)
        repeat = np.array([piece.repeat for piece in pieces])
        owner = _owners(rows)
        samples = np.array([piece.samples for piece in pieces])
        asked = np.flatnonzero(samples)
        if len(asked):
            starts = (np.cumsum(lengths) - lengths)[asked]
            self._spreads.append((owner[asked], sample_spreads(values, starts, lengths[asked], samples[asked])))
        columns = measure_segments(values, lengths)
        if self._wanted.histogram:
            columns["histogram"] = histogram_segments(values, lengths)
        if self._wanted.kl:
            self._sample_segments(owner, values, lengths, columns, repeat)
        self._append(owner, _repeated(columns, repeat))

    def _sample_segments(
        self, owner: Integers, values: Floats, lengths: Integers, columns: Columns, repeat: Integers
    ) -> None:
        finite = np.isfinite(values)
        mean, std = columns["mean"], columns["std"]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            z = ((values - np.repeat(mean, lengths)) / np.repeat(std, lengths)).astype(np.float32)
        used = columns["count"] - columns["nan_count"] - columns["inf_count"]
        ends = np.cumsum(used).tolist()
        z = z[finite]
        runs = [z[start:end] for start, end in pairwise([0, *ends])]
        elements = (used * repeat).astype(np.float64)
        self._sample(owner, runs, mean, 1 / np.where(std > 0, std, 1.0), elements, elements, columns)

    def _add_large(self, rows: Sequence[tuple[int, Piece]]) -> None:
        owner, pieces = _owners(rows), [piece for _, piece in rows]
        raw = [piece.raw for piece in pieces if piece.raw is not None]
        columns = finish_sums(raw)
        scale = np.array([piece.scale for piece in pieces])
        for name in ("mean", "std", "min", "max", "abs_mean", "l2"):
            columns[name] = columns[name] / scale
        repeat = np.array([piece.repeat for piece in pieces])
        if self._wanted.histogram:
            columns["histogram"] = np.array([piece.histogram for piece in pieces])
        if self._wanted.kl:
            samples = [_sample_of(piece) for piece in pieces]
            shift = np.array([one.shift for one in raw]) / scale
            gain = np.array([one.gain for one in raw]) * scale
            elements = repeat * (columns["count"] - columns["nan_count"] - columns["inf_count"]).astype(np.float64)
            drawn = repeat * np.array([len(sample) for sample in samples], dtype=np.float64)
            self._sample(owner, samples, shift, gain, elements, drawn, columns)
        self._append(owner, _repeated(columns, repeat))

    def _sample(
        self,
        owner: Integers,
        values: Sequence[npt.NDArray[np.float32]],
        shift: Floats,
        gain: Floats,
        elements: Floats,
        drawn: Floats,
        columns: Columns,
    ) -> None:
        """Give the shape estimator what it needs of tensors that have a finite element."""
        constant = np.flatnonzero(columns["std"] == 0)
        self._shapes.add_constants(owner[constant], columns["mean"][constant], elements[constant])
        spread = np.flatnonzero((columns["std"] > 0) & np.isfinite(columns["std"]))
        self._shapes.add(
            Samples(
                owner[spread],
                [values[index] for index in spread.tolist()],
                *(array[spread] for array in (shift, gain, elements, drawn)),
                *(columns[name][spread] for name in ("mean", "std", "min", "max")),
            )
        )

    def _add_implied_zeros(self, rows: Sequence[tuple[int, Piece]]) -> None:
        owner = _owners(rows)
        zeros = np.array([piece.implied_zeros for _, piece in rows], dtype=np.int64)
        columns = _only_counts(zeros)
        for name in ("mean", "std", "min", "max", "abs_mean", "l2"):
            columns[name] = np.zeros(len(rows))
        columns["zero_fraction"] = np.ones(len(rows))
        if self._wanted.histogram:
            columns["histogram"] = np.zeros((len(rows), HISTOGRAM_BINS), dtype=np.int64)
            columns["histogram"][:, ZERO_BIN] = zeros
        self._shapes.add_constants(owner, columns["mean"], zeros.astype(np.float64))
        self._append(owner, columns)

    def _divergence(self, merged: Mapping[str, npt.NDArray[Any]]) -> Floats:
        """KL(p ‖ N(0, 1)) in nats: the Gaussian part from mean and std, the rest from the histogram."""
        mean, std = merged["mean"], merged["std"]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
            gaussian = 0.5 * (mean**2 + std**2 - 1) - np.log(std)
            shape = self._shapes.shape(mean, std, merged["kurtosis"], merged["min"], merged["max"])
            finite = merged["count"] - merged["nan_count"] - merged["inf_count"]
            known = (std > 0) & (finite >= FEWEST_ELEMENTS)
            divergence: Floats = np.where(known, gaussian + shape, np.nan)
            return np.where(np.isfinite(divergence), divergence, np.nan)


def on_host(piece: Piece) -> npt.NDArray[Any] | None:
    """The values that a piece holds, in host memory; None where it has none. Waits for its copy. BACKGROUND THREAD."""
    if piece.parts is not None:
        _resolve(piece, piece.parts)
    return piece.values


def _owners(rows: Sequence[tuple[int, Piece]]) -> Integers:
    return np.array([row for row, _ in rows], dtype=np.int64)


def _only_counts(counts: Sequence[int] | Integers) -> Columns:
    columns: Columns = {name: np.zeros(len(counts), dtype=np.int64) for name in COUNTS}
    columns["count"] = np.array(counts, dtype=np.int64)
    columns.update({name: np.full(len(counts), np.nan) for name in STATISTICS})
    columns["histogram"] = np.zeros((len(counts), HISTOGRAM_BINS), dtype=np.int64)
    return columns


def _repeated(columns: Columns, repeat: Integers) -> Columns:
    """The columns of tensors each of whose elements occurs so many times."""
    if (repeat != 1).any():
        for name in COUNTS:
            columns[name] = columns[name] * repeat
        columns["l2"] = columns["l2"] * np.sqrt(repeat)
        if "histogram" in columns:
            columns["histogram"] = columns["histogram"] * repeat[:, None]
    return columns


def _sample_of(piece: Piece) -> npt.NDArray[np.float32]:
    return np.zeros(0, dtype=np.float32) if piece.values is None else piece.values


def _resolve(piece: Piece, parts: Parts) -> None:
    """Turn what came from a device into what the host would have measured.

    No operation of torch may be large enough here to use threads: they would be a second team of OpenMP's, more
    threads than there are cores, whereupon those of the training thread stop waiting in a spin for their next task
    and every one of its operations takes up to twice as long.
    """
    if parts.packed is None:
        pack([piece])
    if parts.packed is not None:
        parts.packed.unpack()
    values = parts.values
    if parts.scale is not None:
        piece.scale = float(parts.scale)
    if parts.integers is not None and parts.floats is not None:
        count, nans, infinities, zeros = (float(number) for number in parts.integers.tolist())
        floats = parts.floats.tolist()
        piece.raw = Raw._make((count, nans, infinities, *floats[:-1], floats[-1] / floats[1], zeros))
        if parts.histogram is not None:
            piece.histogram = fold_keys(parts.histogram.numpy(), parts.floats.dtype.itemsize * 8)
        if values is not None:
            # A device cannot leave out what is not finite: it has marked it.
            values = values[~torch.isnan(values)].float()
    if values is not None:
        piece.values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    piece.parts = None

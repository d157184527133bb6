"""Sums over a tensor in host memory, block by block, in the training thread.

Every pass runs over a block that is still in the cache, into buffers that are kept: fresh temporaries of a large
tensor cost more in page faults than all the arithmetic. The passes are numpy's and use one core: torch's use all of
them, and gain nothing by it at this size, but wait ten times as long at the end of each pass when another thread
(our own writer, say) wants one of the cores.
"""

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..moments import HISTOGRAM_BINS
from .blocks import Source, coprime_stride
from .histogram import histogram_of
from .piece import SAMPLE_SIZE, Raw, Wanted

Block = npt.NDArray[Any]

_BLOCK = 65536
_ROW = 2048
_ATTEMPTS = 6
# Sums of d⁴ in float32 are good where the spread of d is in here, and its mean not far outside its spread.
_NARROWEST, _WIDEST, _FARTHEST = 1e-7, 1e7, 1.5
_LARGEST_EXPONENT = 120


class Workspace:
    """The buffers of one thread and dtype, of one block each."""

    def __init__(self, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            self.input = torch.empty(_BLOCK, dtype=dtype, device="cpu")
        number = self.input.numpy().dtype
        self.shifted = np.empty(_BLOCK, dtype=number)
        self.scratch = np.empty(_BLOCK, dtype=number)
        self.flags = np.empty(_BLOCK, dtype=np.bool_)
        self.ones = np.ones((_ROW, 1), dtype=number)
        self.number = number.type


_local = threading.local()


def workspace(dtype: torch.dtype) -> Workspace:
    """The buffers for computing in float32 or float64 in this thread."""
    name = str(dtype)
    space: Workspace | None = getattr(_local, name, None)
    if space is None:
        space = Workspace(dtype)
        setattr(_local, name, space)
    return space


def compute_dtype(tensor: torch.Tensor, minus: torch.Tensor | None) -> torch.dtype:
    """float64 where either tensor is, else float32."""
    wide = tensor.dtype == torch.float64 or (minus is not None and minus.dtype == torch.float64)
    return torch.float64 if wide else torch.float32


@dataclass(slots=True)
class Sample:
    """Every `step`-th finite element of what is read, as float32."""

    values: torch.Tensor
    array: npt.NDArray[np.float32]
    step: int
    seen: int = 0
    filled: int = 0

    @classmethod
    def of(cls, elements: int) -> "Sample":
        step = coprime_stride(elements, SAMPLE_SIZE)
        values = torch.empty(-(-elements // step), dtype=torch.float32, device="cpu")
        return cls(values, values.numpy(), step)

    def take(self, block: Block) -> None:
        part = block[-self.seen % self.step :: self.step]
        self.array[self.filled : self.filled + len(part)] = part
        self.filled += len(part)
        self.seen += len(block)


def measure_blocks(
    tensor: torch.Tensor, minus: torch.Tensor | None, wanted: Wanted, scale: float
) -> tuple[Raw, torch.Tensor | None, npt.NDArray[np.int64] | None]:
    """Sums, sample and histogram of `tensor − minus`, of at least one element, on the host, without autograd."""
    space = workspace(compute_dtype(tensor, minus))
    source = Source.of(tensor, minus)
    sample = Sample.of(tensor.numel()) if wanted.kl else None
    # Training may run with numpy's warnings turned into errors, and NaNs and overflows are our daily bread.
    with np.errstate(all="ignore"):
        raw = _sums(source, space, sample)
        histogram = _histogram(source, space, scale) if wanted.histogram else None
    return raw, None if sample is None else sample.values[: sample.filled], histogram


def _sums(source: Source, space: Workspace, sample: Sample | None) -> Raw:
    """Sums with a shift and a gain that make them accurate: taken from the first block, corrected where it misled."""
    shift, gain, finite_only = 0.0, 1.0, False
    for attempt in range(_ATTEMPTS):
        if sample is not None:
            sample.seen = sample.filled = 0
        raw = _one_pass(source, space, shift, gain, sample, finite_only, attempt == 0)
        if math.isnan(raw.minimum):
            finite_only, shift, gain = True, 0.0, 1.0
            continue
        better = _better(raw)
        if better is None or better == (shift, gain):
            break
        shift, gain = better
    return raw


def _shift_and_gain(mean: float, std: float) -> tuple[float, float]:
    """The cheapest shift and gain that keep sums of fourth powers accurate; (0, 1) saves a pass."""
    if not (math.isfinite(mean) and math.isfinite(std)):
        return 0.0, 1.0
    shift = mean if abs(mean) > std else 0.0
    return shift, 1.0 if std == 0 or 1e-6 < std < 1e6 else _power_of_two(std)


def _power_of_two(size: float) -> float:
    """About 1 / size, but exact to multiply by."""
    return math.ldexp(1.0, max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, -math.frexp(size)[1])))


def _better(raw: Raw) -> tuple[float, float] | None:
    """A better shift and gain, or None where the sums are good."""
    elements = raw.elements - raw.nan_count - raw.inf_count
    if elements == 0 or raw.minimum == raw.maximum:
        return None
    mean = raw.sum1 / elements
    variance = raw.sum2 / elements - mean * mean
    if not math.isfinite(raw.sum2) or variance <= 0:
        # The extremes are exact, whatever overflowed: with these no power of d can.
        reach = raw.maximum / 2 - raw.minimum / 2
        return raw.minimum + reach, _power_of_two(reach)
    std = math.sqrt(variance)
    if math.isfinite(raw.sum4) and _NARROWEST < std < _WIDEST and abs(mean) <= _FARTHEST * std:
        return None
    return _shift_and_gain(raw.shift + mean / raw.gain, std / raw.gain)


def _one_pass(
    source: Source,
    space: Workspace,
    shift: float,
    gain: float,
    sample: Sample | None,
    finite_only: bool,
    tentative: bool,
) -> Raw:
    """Sums over all blocks.

    At the first block with a NaN or an infinity it gives up, unless `finite_only`; after the very first block also
    where `tentative` and that block knows a better shift or gain.
    """
    # The shift must be a number of the block's dtype: the one that is reported has to be the one that was subtracted.
    shift = float(space.number(shift))
    count = nans = infinities = 0
    sums = [0.0] * 6
    low, high = math.inf, -math.inf
    for block in source.read(space.input):
        x = block
        count += len(x)
        if finite_only:
            x = block[np.isfinite(block)]
            nan = int(np.count_nonzero(np.isnan(block)))
            nans, infinities = nans + nan, infinities + len(block) - len(x) - nan
            if not len(x):
                continue
        block_low, block_high = float(x.min()), float(x.max())
        if not (math.isfinite(block_low) and math.isfinite(block_high)):
            low = high = math.nan
            break
        low, high = min(low, block_low), max(high, block_high)
        d = _shifted(x, shift, gain, space)
        powers = _powers(d, space)
        absolute = _absolute(x, block_low, block_high, len(x) * shift + powers[0] / gain, gain, space)
        sums = [total + part for total, part in zip(sums, (*powers, *absolute), strict=True)]
        if sample is not None:
            sample.take(d)
        if tentative:
            tentative = False
            if _better(Raw._make((count, nans, infinities, shift, gain, *sums[:4], low, high, *sums[4:]))):
                break
    return Raw._make((count, nans, infinities, shift, gain, *sums[:4], low, high, *sums[4:]))


def _shifted(x: Block, shift: float, gain: float, space: Workspace) -> Block:
    """D = (x − shift) · gain."""
    out = space.shifted[: len(x)]
    if shift != 0:
        x = np.subtract(x, space.number(shift), out=out)
    return x if gain == 1 else np.multiply(x, space.number(gain), out=out)


def _powers(d: Block, space: Workspace) -> tuple[float, float, float, float]:
    """Σd, Σd², Σd³, Σd⁴ of one block."""
    # np.square is twice as fast as np.multiply of an array with itself.
    squares = np.square(d, out=space.scratch[: len(d)])
    return _total(d, space), _total(squares, space), _product(squares, d), _product(squares, squares)


def _product(a: Block, b: Block) -> float:
    """Σab in short rows, whose sums are added in float64.

    One long dot product would lose digits, and BLAS would use threads for it: those of torch wait in a spin for
    their next task, so that ours would find no core for milliseconds.
    """
    even = len(a) - len(a) % _ROW
    rows = np.matmul(a[:even].reshape(-1, 1, _ROW), b[:even].reshape(-1, _ROW, 1))
    return float(np.add.reduce(rows, axis=None, dtype=np.float64)) + float(a[even:].dot(b[even:]))


def _total(values: Block, space: Workspace) -> float:
    """Σ values, likewise: a product with ones is three times as fast as numpy's own pairwise sum."""
    even = len(values) - len(values) % _ROW
    rows = np.matmul(values[:even].reshape(-1, 1, _ROW), space.ones)
    return float(np.add.reduce(rows, axis=None, dtype=np.float64)) + float(np.add.reduce(values[even:]))


def _absolute(x: Block, low: float, high: float, total: float, gain: float, space: Workspace) -> tuple[float, int]:
    """Σ|x| and the exact zeros of one block whose sum is `total`, with as few passes as its extremes allow."""
    if low > 0 or high < 0:
        return abs(total), 0
    if low < 0 < high:
        absolute = np.absolute(x, out=space.scratch[: len(x)])
        if gain != 1:
            absolute *= space.number(gain)
        total = _total(absolute, space) / gain
        if absolute.min() > 0:
            return total, 0
    return abs(total), int(np.count_nonzero(np.equal(x, 0, out=space.flags[: len(x)])))


def _histogram(source: Source, space: Workspace, scale: float) -> npt.NDArray[np.int64]:
    counts = np.zeros(HISTOGRAM_BINS, dtype=np.int64)
    for block in source.read(space.input):
        counts += histogram_of(block if scale == 1 else block / space.number(scale))
    return counts

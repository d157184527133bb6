"""One pass over a tensor in host memory on one core: numpy, where torch has one thread or numbers are not finite."""

import math
import threading

import numpy as np
import torch

from .blocks import Source
from .piece import Raw
from .sums import Block, Sample, better_guess, first_gain

_BLOCK = 65536
_ROW = 1024
_ROWS = _BLOCK // _ROW + 1  # the last one for what is left of a block


class Workspace:
    """The buffers of one thread and dtype, of one block each."""

    def __init__(self, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            self.input = torch.empty(_BLOCK, dtype=dtype, device="cpu")
        number = self.input.numpy().dtype
        self.shifted = np.empty(_BLOCK, dtype=number)
        self.scratch = np.empty(_BLOCK, dtype=number)
        self.flags = np.empty(_BLOCK, dtype=np.bool_)
        self.ones = np.ones(_ROW, dtype=number)
        self.sums = np.empty((5, _ROWS), dtype=number)
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


@np.errstate(all="ignore")  # training may run with numpy's warnings turned into errors
def serial_pass(
    source: Source,
    space: Workspace,
    shift: float,
    gain: float,
    sample: Sample | None,
    finite_only: bool,
    tentative: bool,
) -> Raw:
    """Sums over all blocks.

    At the first block with a NaN or an infinity it gives up, unless `finite_only`. Where `tentative`, the very first
    block may choose another gain, and gives up after that block where it knows a better shift or gain.
    """
    # The shift must be a number of the block's dtype: the one that is reported has to be the one that was subtracted.
    shift = float(space.number(shift))
    count = nans = infinities = zeros = 0
    sums = np.zeros(5)
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
        block_low, block_high = float(np.minimum.reduce(x)), float(np.maximum.reduce(x))
        if not (math.isfinite(block_low) and math.isfinite(block_high)):
            low = high = math.nan
            break
        low, high = min(low, block_low), max(high, block_high)
        if tentative:
            gain = first_gain(low, high)
        d = _shifted(x, shift, gain, space)
        parts = _powers(d, space)
        if block_low < 0 < block_high:
            zeros += _absolute(x, gain, space, parts[4])
        else:
            parts[4] = 0
            sums[4] += abs(len(x) * shift * gain + float(np.add.reduce(parts[0], dtype=np.float64)))
            zeros += _zeros(x, space) if block_low == 0 or block_high == 0 else 0
        sums += np.add.reduce(parts, axis=1, dtype=np.float64)
        if sample is not None:
            sample.take(d)
        if tentative:
            tentative = False
            if better_guess(Raw._make((count, nans, infinities, shift, gain, *sums[:4], low, high, 0.0, zeros))):
                break
    *powers, absolute = sums.tolist()
    return Raw._make((count, nans, infinities, shift, gain, *powers, low, high, absolute / gain, zeros))


def _shifted(x: Block, shift: float, gain: float, space: Workspace) -> Block:
    """D = (x − shift) · gain."""
    out = space.shifted[: len(x)]
    if shift != 0:
        x = np.subtract(x, space.number(shift), out=out)
    return x if gain == 1 else np.multiply(x, space.number(gain), out=out)


def _powers(d: Block, space: Workspace) -> Block:
    """Partial sums `[5, rows]` of d, d², d³ and d⁴ of one block; the fifth row is for those of |x|."""
    # np.square is twice as fast as np.multiply of an array with itself.
    squares = np.square(d, out=space.scratch[: len(d)])
    sums = space.sums[:, : -(-len(d) // _ROW)]
    _products(d, None, space, sums[0])
    _products(squares, None, space, sums[1])
    _products(squares, d, space, sums[2])
    _products(squares, squares, space, sums[3])
    return sums


def _products(a: Block, b: Block | None, space: Workspace, out: Block) -> None:
    """Σab of every row of a block, or Σa: a product with ones is four times as fast as numpy's own pairwise sum.

    Short rows keep the digits of float32, and are below what BLAS would start threads for: those of torch wait in a
    spin for their next task, so that threads of ours would find no core for milliseconds.
    """
    whole = len(a) // _ROW
    even = whole * _ROW
    rows = a[:even].reshape(whole, _ROW)
    np.vecdot(rows, space.ones if b is None else b[:even].reshape(whole, _ROW), out=out[:whole])
    if even < len(a):
        rest = a[even:]
        out[whole] = np.vecdot(rest, space.ones[: len(rest)] if b is None else b[even:])


def _absolute(x: Block, gain: float, space: Workspace, out: Block) -> int:
    """Partial sums of |x| · gain into `out`; the number of exact zeros."""
    absolute = np.absolute(x, out=space.scratch[: len(x)])
    smallest = np.minimum.reduce(absolute)
    if gain != 1:
        absolute *= space.number(gain)
    _products(absolute, None, space, out)
    return 0 if smallest > 0 else _zeros(x, space)


def _zeros(x: Block, space: Workspace) -> int:
    return int(np.count_nonzero(np.equal(x, 0, out=space.flags[: len(x)])))

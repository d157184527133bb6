"""One pass over a tensor in host memory on all cores that torch uses.

Torch's operations, each of which is spread over the team of threads that training has: so a measurement scales as
training does. Each thread's share of a block stays in its core's cache from one operation to the next.
"""

import math
import threading
from collections.abc import Iterable

import torch

from .blocks import Source
from .piece import Raw
from .sums import Sample, better_guess, first_gain

_SHARE = 262_144  # elements of a block for each thread, about: larger ones leave the caches, smaller ones pay for calls
_LARGEST = 2**23  # of a block, about: half as many again float32 still counts exactly
_SIZES = 256  # of blocks, whose scratch is kept ready


class _Buffers:
    """One block each, of one thread and dtype, for teams of one size."""

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        self.threads = threads
        self.usual = min(_SHARE * threads, _LARGEST)
        with torch.inference_mode(False):
            self.input, self.shifted, self._scratch = torch.empty((3, self.usual * 3 // 2), dtype=dtype, device="cpu")
        self.number = self.input.numpy().dtype.type
        self._scratch_of: dict[int, torch.Tensor] = {}

    def scratch(self, size: int) -> torch.Tensor:
        """So much of the last block: cutting it anew would take as long as a pass over many a tensor."""
        found = self._scratch_of.get(size)
        if found is None:
            if len(self._scratch_of) >= _SIZES:
                self._scratch_of.clear()
            with torch.inference_mode(False):
                found = self._scratch_of[size] = self._scratch[:size]
        return found


_local = threading.local()


def _buffers(dtype: torch.dtype) -> _Buffers:
    threads = torch.get_num_threads()
    name = "single" if dtype == torch.float32 else "double"
    found: _Buffers | None = getattr(_local, name, None)
    if found is None or found.threads != threads:
        found = _Buffers(dtype, threads)
        setattr(_local, name, found)
    return found


def parallel_pass(
    source: Source, dtype: torch.dtype, shift: float, gain: float, sample: Sample | None, tentative: bool
) -> Raw:
    """Sums over all blocks, of d = (x − shift) · gain.

    At the first block with a NaN or an infinity it gives up. Where `tentative`, the very first block may choose
    another gain, and of several blocks gives up within that one where it knows a better shift or gain.

    It is called where neither code nor data are in the cache: few different operations, and few lines of Python, are
    as important as fast ones.
    """
    buffers = _buffers(dtype)
    shift = float(buffers.number(shift)) if shift else 0.0  # what is reported has to be what was subtracted
    count = zeros = 0
    sum1 = sum2 = sum3 = sum4 = absolute = 0.0
    low, high = math.inf, -math.inf
    for x in _blocks(source, buffers):
        size = x.numel()
        count += size
        lowest, highest = torch.aminmax(x)
        block_low, block_high = lowest.item(), highest.item()
        if not (math.isfinite(block_low) and math.isfinite(block_high)):
            low = high = math.nan
            break
        low, high = min(low, block_low), max(high, block_high)
        if tentative:
            gain = first_gain(low, high)
        d = x if shift == 0 else torch.sub(x, shift, out=buffers.shifted[:size])
        d = d if gain == 1 else torch.mul(d, gain, out=buffers.shifted[:size])
        scratch = buffers.scratch(size)
        squares = torch.square(d, out=scratch)
        # torch.sum adds pairwise, torch.dot one by one in a few lanes: good enough for the third and fourth powers.
        total = d.sum().item()
        sum1 += total
        sum2 += squares.sum().item()
        if tentative and size < source.tensor.numel():
            tentative = False
            if better_guess(Raw(count, 0, 0, shift, gain, sum1, sum2, 0.0, 0.0, low, high, 0.0, 0)):
                break
        sum3 += torch.dot(squares, d).item()
        sum4 += torch.dot(squares, squares).item()
        if sample is not None:
            sample.take(d.numpy())
        if block_low < 0 < block_high:
            magnitudes = torch.abs(d, out=scratch) if shift == 0 else torch.abs(x, out=scratch).mul_(gain)
            smallest = magnitudes.amin().item()
            absolute += magnitudes.sum().item()
            zeros += _zeros(x, scratch) if smallest == 0 else 0
        else:
            absolute += abs(total + size * shift * gain)
            zeros += _zeros(x, scratch) if block_low == 0 or block_high == 0 else 0
    return Raw(count, 0, 0, shift, gain, sum1, sum2, sum3, sum4, low, high, absolute / gain, zeros)


def _blocks(source: Source, buffers: _Buffers) -> Iterable[torch.Tensor]:
    """Blocks of one size, up to half as large again as they should be: a small last one costs nearly as much."""
    tensor, minus = source
    elements, dtype = tensor.numel(), buffers.input.dtype
    number = max(1, round(elements / buffers.usual))
    size = -(-elements // number)
    if tensor.dim() != 1 or tensor.dtype != dtype or (minus is not None and minus.dtype != dtype):
        return map(torch.from_numpy, source.read(buffers.input[:size]))
    parts = (tensor,) if number == 1 else torch.split(tensor, size)
    if minus is None:
        return parts
    less = (minus,) if number == 1 else torch.split(minus, size)
    return (torch.sub(a, b, out=buffers.input[: a.numel()]) for a, b in zip(parts, less, strict=True))


def _zeros(x: torch.Tensor, scratch: torch.Tensor) -> int:
    return int(torch.eq(x, 0, out=scratch).sum().item())

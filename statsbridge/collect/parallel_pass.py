"""One pass over a large tensor in host memory on all cores that torch uses.

Torch's operations, each of which is spread over the team of threads that training has: so a measurement scales as
training does. Each thread's share of a block stays in its core's cache from one operation to the next.
"""

import math
import threading
from collections.abc import Iterator

import torch

from .blocks import Source
from .piece import Raw
from .sums import Sample, better_guess, first_gain

_SHARE = 262_144  # elements of a block for each thread, about: larger ones leave the caches, smaller ones pay for calls
_LARGEST = 2**23  # of a block, about: half as many again float32 still counts exactly
_WORTH = 131_072  # elements of a tensor from which the wait for the team pays


def worth_a_team(source: Source) -> bool:
    """Whether a tensor is so large, and torch has so many threads, that more than one should work on it."""
    return source.tensor.numel() >= _WORTH and torch.get_num_threads() > 1


class _Buffers:
    """One block each, of one thread and dtype."""

    def __init__(self, dtype: torch.dtype, size: int) -> None:
        with torch.inference_mode(False):
            self.input, self.shifted, self.scratch = torch.empty((3, size), dtype=dtype, device="cpu")
        self.number = self.input.numpy().dtype.type


def _block_size(elements: int) -> int:
    """Blocks of one size, up to half as large again as they should be: a small last one costs nearly as much."""
    return -(-elements // max(1, round(elements / _usual_size())))


def _usual_size() -> int:
    return min(_SHARE * torch.get_num_threads(), _LARGEST)


_local = threading.local()


def _buffers(dtype: torch.dtype) -> _Buffers:
    name = f"{dtype} {torch.get_num_threads()}"
    found: _Buffers | None = getattr(_local, name, None)
    if found is None:
        found = _Buffers(dtype, _usual_size() * 3 // 2)
        setattr(_local, name, found)
    return found


def parallel_pass(
    source: Source, dtype: torch.dtype, shift: float, gain: float, sample: Sample | None, tentative: bool
) -> Raw:
    """Sums over all blocks, of d = (x − shift) · gain.

    At the first block with a NaN or an infinity it gives up. Where `tentative`, the very first block may choose
    another gain, and gives up within that block where it knows a better shift or gain.
    """
    buffers = _buffers(dtype)
    shift = float(buffers.number(shift))  # what is reported has to be what was subtracted
    count = zeros = 0
    sum1 = sum2 = sum3 = sum4 = absolute = 0.0
    low, high = math.inf, -math.inf
    for x in _blocks(source, buffers.input):
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
        scratch = buffers.scratch[:size]
        squares = torch.square(d, out=scratch)
        # torch.sum adds pairwise, torch.dot one by one in a few lanes: good enough for the third and fourth powers.
        total = d.sum().item()
        sum1 += total
        sum2 += squares.sum().item()
        if tentative:
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


def _blocks(source: Source, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    tensor, minus = source.tensor, source.minus
    size = _block_size(tensor.numel())
    if tensor.dim() != 1 or tensor.dtype != buffer.dtype or (minus is not None and minus.dtype != buffer.dtype):
        yield from map(torch.from_numpy, source.read(buffer[:size]))
    elif minus is None:
        yield from torch.split(tensor, size) if tensor.numel() > size else (tensor,)
    else:
        parts = torch.split(tensor, size), torch.split(minus, size)
        for part, less in zip(*parts, strict=True):
            yield torch.sub(part, less, out=buffer[: part.numel()])


def _zeros(x: torch.Tensor, scratch: torch.Tensor) -> int:
    return int(torch.eq(x, 0, out=scratch).sum().item())

"""Reading a tensor of any layout as a sequence of contiguous blocks, without a full-size temporary."""

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch


def fold_expanded(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor without its expanded (stride 0) dimensions, and how often each element was repeated."""
    repeat = 1
    if 0 not in tensor.stride():
        return tensor, repeat
    for dimension in reversed(range(tensor.dim())):
        if tensor.stride(dimension) == 0 and tensor.size(dimension) > 1:
            repeat *= tensor.size(dimension)
            tensor = tensor.select(dimension, 0)
    return tensor, repeat


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions from the largest stride to the smallest."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


@lru_cache(maxsize=4096)
def coprime_stride(elements: int, wanted: int) -> int:
    """The step nearest to one that takes `wanted` of `elements`, but which never locks onto one column or channel.

    A step that shares a factor with the size would visit the same few columns of every row.
    """
    usual = max(elements // wanted, 1)
    shorter = next(step for step in range(usual, 0, -1) if math.gcd(step, elements) == 1)
    longer = next(step for step in itertools.count(usual) if math.gcd(step, elements) == 1)
    return shorter if usual / shorter <= longer / usual else longer


class Source(NamedTuple):
    """A tensor in host memory, or the difference of two of one shape, to be read block by block.

    A dense tensor of any memory format is one-dimensional here, in the order of its storage.
    """

    tensor: torch.Tensor
    minus: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor, minus: torch.Tensor | None) -> "Source":
        """Choose the cheapest order: as the elements lie in memory."""
        if tensor.is_contiguous() and (minus is None or minus.is_contiguous()):
            return cls(tensor.view(-1), None if minus is None else minus.view(-1))
        order = memory_order(tensor)
        tensor = tensor.permute(order)
        minus = None if minus is None else minus.permute(order)
        if tensor.is_contiguous() and (minus is None or minus.is_contiguous()):
            return cls(tensor.view(-1), None if minus is None else minus.view(-1))
        return cls(tensor, minus)

    def read(self, buffer: torch.Tensor) -> Iterator[npt.NDArray[Any]]:
        """Contiguous blocks of numbers of the buffer's dtype and at most of its size; each is good until the next.

        Blocks are views of the tensor where it has that dtype already, else they are computed into the buffer.
        """
        tensor, minus, size = self.tensor, self.minus, buffer.numel()
        scratch: npt.NDArray[Any] = buffer.numpy()
        if tensor.dim() != 1 or {tensor.dtype, tensor.dtype if minus is None else minus.dtype} != {buffer.dtype}:
            yield from self._converted(buffer, scratch)
            return
        elements, array = tensor.numel(), tensor.numpy()
        less = None if minus is None else minus.numpy()
        for start in range(0, elements, size):
            block = array[start : start + size]
            if less is not None:
                block = np.subtract(block, less[start : start + size], out=scratch[: len(block)])
            yield block

    def _converted(self, buffer: torch.Tensor, scratch: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
        pairs: Iterator[tuple[torch.Tensor, torch.Tensor | None]]
        if self.minus is None:
            pairs = ((block, None) for block in _split(self.tensor, buffer.numel()))
        else:
            pairs = zip(_split(self.tensor, buffer.numel()), _split(self.minus, buffer.numel()), strict=True)
        for block, less in pairs:
            target = buffer[: block.numel()].view(block.shape).copy_(block)
            if less is not None:
                target.sub_(less.to(target.dtype) if less.dtype.itemsize == 1 else less)  # float8 knows no arithmetic
            yield scratch[: block.numel()]


def _split(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    elements = tensor.numel()
    if elements <= size:
        yield tensor
        return
    inner = elements // tensor.size(0)
    if inner > size:
        for part in tensor.unbind(0):
            yield from _split(part, size)
    else:
        yield from torch.split(tensor, size // inner)

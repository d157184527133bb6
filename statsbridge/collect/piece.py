"""What one measurement leaves behind until the background thread turns it into a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from .packing import Packed

SAMPLE_SIZE = 8192
"""Elements of a large tensor from which the shape term of the KL divergence is estimated, about (`coprime_stride`)."""

SMALL = 4096
"""Tensors of at most so many elements are copied whole and measured in the background."""

PLAIN_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Dtypes that concatenate with each other; float8 has to become float32 first."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of the statistics that cost something of their own are asked for."""

    kl: bool = True
    histogram: bool = False


class Raw(NamedTuple):
    """Counts of a tensor's elements, and sums over the finite ones x, with d = (x − shift) · gain."""

    elements: float
    nan_count: float
    inf_count: float
    shift: float
    gain: float
    sum1: float
    sum2: float
    sum3: float
    sum4: float
    minimum: float
    maximum: float
    abs_sum: float
    zeros: float


@dataclass(slots=True)
class Parts:
    """One-dimensional results that lie on an accelerator, and after `pack` and its copy in host memory.

    `integers`, int64: count, NaNs, infinities, zeros. `floats`: shift, gain, sum1 … sum4, minimum, maximum and
    abs_sum · gain. Both are None for a small tensor, which travels as its `values`; otherwise `values` is the sample,
    as d of `Raw`, NaN for an element that is not finite. `histogram`, int64: counts by exponent key. `scale`: of
    `Piece`.
    """

    integers: torch.Tensor | None = None
    floats: torch.Tensor | None = None
    values: torch.Tensor | None = None
    histogram: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    packed: Packed | None = None


@dataclass(slots=True)
class Piece:
    """The statistics of one tensor, unfinished.

    Attributes:
        status: why numbers are missing, or None.
        count: elements of the tensor; all that is known where there is a status.
        raw: sums over all elements, or None for a small tensor.
        values: a small tensor's elements (`raw` is None), or the sample of a large one, as d of `Raw`; of numpy, for
            thousands of tensors that wait make Python's garbage collector stop training to look at them.
        histogram: counts by bin of a large tensor, if wanted.
        repeat: how often each element behind `raw` and `values` occurs (an expanded tensor is read once).
        implied_zeros: zeros of a sparse tensor that it does not store.
        scale: what was measured is the tensor divided by this.
        parts: the results of a tensor on an accelerator, in place of `raw`, `values`, `histogram` and `scale`.
        samples: of how many samples the elements of a small tensor are, one after the other; 0: that is not asked.
    """

    status: str | None
    count: int
    raw: Raw | None = None
    values: npt.NDArray[Any] | None = None
    histogram: npt.NDArray[np.int64] | None = None
    repeat: int = 1
    implied_zeros: int = 0
    scale: float = 1.0
    parts: Parts | None = None
    samples: int = 0

    @property
    def nbytes(self) -> int:
        """Memory held until the piece is reduced, on whatever device."""
        parts = self.parts
        held = sum(array.nbytes for array in (self.values, self.histogram) if array is not None)
        if parts is None:
            return held
        tensors = (parts.integers, parts.floats, parts.values, parts.histogram, parts.scale)
        return held + sum(tensor.nbytes for tensor in tensors if tensor is not None)

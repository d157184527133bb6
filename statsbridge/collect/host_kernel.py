"""Sums over a tensor in host memory, block by block, in the training thread.

Every pass runs over a block that is still in the cache, into buffers that are kept: fresh temporaries of a large
tensor cost more in page faults than all the arithmetic.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from ..moments import HISTOGRAM_BINS
from .blocks import Source
from .histogram import histogram_of
from .parallel_pass import parallel_pass
from .piece import Raw, Wanted
from .serial_pass import Workspace, serial_pass, workspace
from .sums import Sample, better_guess

_ATTEMPTS = 6


def compute_dtype(tensor: torch.Tensor, minus: torch.Tensor | None) -> torch.dtype:
    """float64 where either tensor is, else float32."""
    wide = tensor.dtype == torch.float64 or (minus is not None and minus.dtype == torch.float64)
    return torch.float64 if wide else torch.float32


def measure_blocks(
    tensor: torch.Tensor, minus: torch.Tensor | None, wanted: Wanted, scale: float
) -> tuple[Raw, npt.NDArray[np.float32] | None, npt.NDArray[np.int64] | None]:
    """Sums, sample and histogram of `tensor − minus`, of at least one element, on the host, without autograd."""
    dtype = compute_dtype(tensor, minus)
    source = Source.of(tensor, minus)
    sample = Sample(source.tensor.numel()) if wanted.kl else None
    raw = _sums(source, dtype, sample)
    histogram = _histogram(source, workspace(dtype), scale) if wanted.histogram else None
    return raw, None if sample is None else sample.values, histogram


def _sums(source: Source, dtype: torch.dtype, sample: Sample | None) -> Raw:
    """Sums with a shift and a gain that make them accurate: taken from the first block, corrected where it misled."""
    shift, gain, finite_only, team = 0.0, 1.0, False, torch.get_num_threads() > 1
    for attempt in range(_ATTEMPTS):
        if sample is not None and attempt:
            sample.start()
        if team and not finite_only:
            raw = parallel_pass(source, dtype, shift, gain, sample, attempt == 0)
        else:
            raw = serial_pass(source, workspace(dtype), shift, gain, sample, finite_only, attempt == 0)
        if math.isnan(raw.minimum):
            finite_only, shift, gain = True, 0.0, 1.0
            continue
        better = better_guess(raw)
        # The first attempt may have been given up in the middle: what it says of itself is not of the whole tensor.
        if better is None or (attempt > 0 and better == (shift, gain)):
            break
        shift, gain = better
    return raw


# Training may run with numpy's warnings turned into errors, and NaNs and overflows are our daily bread.
@np.errstate(all="ignore")
def _histogram(source: Source, space: Workspace, scale: float) -> npt.NDArray[np.int64]:
    counts = np.zeros(HISTOGRAM_BINS, dtype=np.int64)
    for block in source.read(space.input):
        counts += histogram_of(block if scale == 1 else block / space.number(scale))
    return counts

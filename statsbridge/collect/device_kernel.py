"""Sums over a tensor on an accelerator, without ever asking for a value.

Nothing in here depends on what the numbers are: no element is fetched, no branch taken on one, no shape depends on
one; so the training thread never waits for the device. It runs on any device that computes in float32, `meta` included.
"""

import torch

from .blocks import coprime_stride, memory_order
from .histogram import exponent_layout
from .piece import PLAIN_DTYPES, SAMPLE_SIZE, SMALL, Parts, Wanted

_NO_GAIN_BEYOND = {torch.float32: 1e37, torch.float64: 1e300}


def measure_on_device(
    tensor: torch.Tensor, minus: torch.Tensor | None, wanted: Wanted, scale: torch.Tensor | None
) -> Parts:
    """Statistics of `tensor − minus`, of at least one element, without autograd.

    Computed in float32, in float64 for float64 tensors only (some devices have none). Differences of elements that
    are beyond the range of that dtype make their statistics null.
    """
    x = _flat_difference(tensor, minus)
    parts = Parts(scale=None if scale is None else scale.detach().reshape(1).to(torch.float32, copy=True))
    if x.numel() <= SMALL:
        parts.values = x.clone() if x.dtype in PLAIN_DTYPES else x.float()
        return parts
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    finite = torch.isfinite(x)
    used = finite.sum()
    nans = torch.isnan(x).sum()
    parts.integers = torch.stack((nans.new_full((), x.numel()), nans, x.numel() - used - nans, (x == 0).sum()))
    low = torch.where(finite, x, torch.inf).amin()
    high = torch.where(finite, x, -torch.inf).amax()
    # From the middle of the extremes to the mean in one step: a sum of numbers that all share a large offset
    # would miss their mean by more than their spread.
    middle, reach = low / 2 + high / 2, high / 2 - low / 2
    gain = torch.where(reach > 0, 1 / reach, 1.0).clamp(max=_NO_GAIN_BEYOND[x.dtype])
    shift = middle + torch.where(finite, x - middle, 0.0).mul_(gain).sum() / used / gain
    d = torch.where(finite, x - shift, 0.0).mul_(gain)
    squares = d * d
    parts.floats = torch.stack(
        (
            shift,
            gain,
            d.sum(),
            squares.sum(),
            (squares * d).sum(),
            (squares * squares).sum(),
            low,
            high,
            torch.where(finite, x, 0.0).abs_().mul_(gain).sum(),
        )
    )
    if wanted.kl:
        step = coprime_stride(x.numel(), SAMPLE_SIZE)
        parts.values = torch.where(finite[::step], d[::step], torch.nan)
    if wanted.histogram:
        parts.histogram = _exponent_counts(x if scale is None else x / scale.detach().to(x.dtype))
    return parts


def _flat_difference(tensor: torch.Tensor, minus: torch.Tensor | None) -> torch.Tensor:
    order = memory_order(tensor)
    flat = tensor.permute(order).reshape(-1)
    if minus is None:
        return flat
    wide = torch.float64 if torch.float64 in (tensor.dtype, minus.dtype) else torch.float32
    return flat.to(wide) - minus.permute(order).reshape(-1).to(wide)


def _exponent_counts(x: torch.Tensor) -> torch.Tensor:
    mantissa, _, zero_key = exponent_layout(x.dtype.itemsize * 8)
    bits = x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    # The shift is arithmetic: the mask takes off the copies of the sign.
    keys = torch.where(x == 0, zero_key, (bits >> mantissa) & (zero_key - 1)).to(torch.int64)
    counts = torch.zeros(zero_key + 1, dtype=torch.int64, device=x.device)
    return counts.scatter_add_(0, keys, torch.ones_like(keys))

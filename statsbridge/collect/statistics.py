"""Statistics of tensors: `measure` in the training thread, `pack` once a step, `Reducer` in the background.

The training thread does only what cannot wait: sums over large tensors, a copy of small ones. What is finished,
merged and estimated from those is done for all tensors of a step at once, in float64, by the background thread.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy

from ..moments import STATISTICS
from .blocks import fold_expanded
from .device_kernel import measure_on_device
from .host_kernel import compute_dtype, measure_blocks
from .packing import pack
from .piece import SMALL, Piece, Wanted
from .reduce import Reducer

__all__ = ["STATISTICS", "Piece", "Reducer", "Wanted", "measure", "pack", "runs_on_host", "sum_of_squares"]

_USUAL_TYPES = (torch.Tensor, torch.nn.Parameter)
_NUMPY_DTYPES = (torch.float32, torch.float64, torch.float16)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def runs_on_host(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values can be looked at without waiting for a device."""
    return tensor.device.type == "cpu"


def measure(
    tensor: torch.Tensor,
    wanted: Wanted,
    *,
    minus: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> Piece:
    """Measure `(tensor − minus) / scale`. TRAINING THREAD.

    Args:
        tensor: of any shape, layout and dtype. It is not changed, and may be overwritten right after the call.
        wanted: what to compute besides the statistics that come for free.
        minus: of the same shape and device; what a parameter was before the step.
        scale: one element, positive, on any device: the scale of a GradScaler.

    Returns:
        A piece for `Reducer.add`. Its `status` is `integer` (booleans too), `complex`, `empty`, `meta` or
        `unsupported` where there are no numbers, only a count.

    Nothing waits for a device, except for the coalescing of a sparse gradient, and for a scale that lies on another
    device than its tensor.
    """
    if type(tensor) in _USUAL_TYPES:
        tensor = tensor.detach()
    elif is_lazy(tensor) or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return Piece("unsupported", _element_count(tensor))
    else:
        tensor = tensor.detach().as_subclass(torch.Tensor)
    status = _without_numbers(tensor)
    if status is not None:
        return Piece(status, _element_count(tensor))
    if tensor.layout != torch.strided:
        return _measure_sparse(tensor, wanted, scale)
    minus = None if minus is None else minus.detach()
    return _measure_strided(tensor, wanted, minus, scale)


def sum_of_squares(piece: Piece) -> float | None:
    """Σx² of a tensor as it was given, before `scale`; None unless finite, as all elements are, and summed already."""
    raw = piece.raw
    if raw is None or raw.nan_count or raw.inf_count:
        return None
    # Products, for Python's powers raise where these overflow. Squares of a constant may also have done so in float32.
    about_shift = raw.sum2 / raw.gain / raw.gain + 2 * raw.shift * raw.sum1 / raw.gain
    square = piece.repeat * max(about_shift + raw.elements * raw.shift * raw.shift, 0.0)
    return square if math.isfinite(square) else None


def _without_numbers(tensor: torch.Tensor) -> str | None:
    if tensor.layout not in (torch.strided, torch.sparse_coo, *_COMPRESSED) or tensor.is_nested or tensor.is_quantized:
        return "unsupported"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "unsupported"
    if not tensor.dtype.is_floating_point:
        return "complex" if tensor.dtype.is_complex else "integer"
    if tensor.numel() == 0:
        return "empty"
    return "meta" if tensor.is_meta else None


def _element_count(tensor: torch.Tensor) -> int:
    try:
        return tensor.numel()
    except (RuntimeError, ValueError):  # ragged dimensions, or none yet
        return 0


def _measure_strided(
    tensor: torch.Tensor, wanted: Wanted, minus: torch.Tensor | None, scale: torch.Tensor | None
) -> Piece:
    piece = Piece(None, tensor.numel())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if minus is None:
        tensor, piece.repeat = fold_expanded(tensor)
    if not runs_on_host(tensor):
        piece.parts = measure_on_device(tensor, minus, wanted, scale)
        return piece
    if scale is not None:
        piece.scale = float(scale)
    if tensor.numel() <= SMALL:
        piece.values = _copy(tensor, minus)
    else:
        piece.raw, piece.values, piece.histogram = measure_blocks(tensor, minus, wanted, piece.scale)
    return piece


def _copy(tensor: torch.Tensor, minus: torch.Tensor | None) -> npt.NDArray[Any]:
    """The elements of `tensor − minus`, in one dimension, in memory of their own."""
    if minus is not None:
        dtype = compute_dtype(tensor, minus)
        with np.errstate(all="ignore"):  # as in `measure_blocks`
            elements: npt.NDArray[Any] = np.subtract(tensor.to(dtype).numpy(), minus.to(dtype).numpy())
        return elements.reshape(-1)
    elements = (tensor if tensor.dtype in _NUMPY_DTYPES else tensor.float()).numpy()
    return elements.flatten()


def _measure_sparse(tensor: torch.Tensor, wanted: Wanted, scale: torch.Tensor | None) -> Piece:
    values = tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.values()
    implied = tensor.numel() - values.numel()
    piece = _measure_strided(values, wanted, None, scale) if values.numel() else Piece(None, 0)
    piece.count, piece.implied_zeros = tensor.numel(), implied
    return piece

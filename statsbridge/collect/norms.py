"""Global L2 norms over many tensors, of all their elements: NaN where there is one, Inf where there is one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import statistics

#: Squares of float32 values outside this range of norms lose digits to under- or overflow.
_SAFE = (1e-15, 1e18)
_ROW = 2048


def global_norm(tensors: Sequence[torch.Tensor]) -> float | torch.Tensor:
    """sqrt(Σ x²) over all elements of all tensors: a float, or a 0-d tensor where any lies on an accelerator.

    Nothing waits for an accelerator. On the host norms of short rows are as fast as memory, and closer to float64 than
    torch's multi-tensor norm.
    """
    dense = [_strided(tensor.detach()) for tensor in tensors]
    dense = [tensor for tensor in dense if tensor.numel() and not tensor.is_meta]
    if not dense:
        return 0.0
    elsewhere = [tensor.device for tensor in dense if not statistics.runs_on_host(tensor)]
    if not elsewhere:
        return _host_norm(dense)
    device = elsewhere[0]
    norms = [norm.to(device, torch.float32, non_blocking=True) for norm in torch._foreach_norm(dense, 2, torch.float32)]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def combine_norms(norms: Sequence[float | torch.Tensor]) -> float | torch.Tensor:
    """The norm of the whole from the norms of disjoint parts."""
    if len(norms) == 1:
        return norms[0]
    if all(isinstance(norm, float) for norm in norms):
        return _hypot(norms)  # type: ignore[arg-type]
    device = next(norm.device for norm in norms if isinstance(norm, torch.Tensor))
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([torch.as_tensor(n, device=device) for n in norms]))
    return norm


def _host_norm(tensors: Sequence[torch.Tensor]) -> float:
    single = [tensor for tensor in tensors if tensor.dtype == torch.float32]
    other = [tensor for tensor in tensors if tensor.dtype != torch.float32]
    small = [tensor for tensor in single if tensor.numel() < _ROW]
    norms = [math.sqrt(_square(tensor)) for tensor in single if tensor.numel() >= _ROW]
    if small:  # one by one each would cost as much as a thousand elements
        norms.append(math.sqrt(_sum_of_squares(torch.stack(torch._foreach_norm(small, 2)))))
    norms += [torch.linalg.vector_norm(tensor, dtype=torch.float64).item() for tensor in other]
    norm = _hypot(norms)
    if _SAFE[0] < norm < _SAFE[1]:
        return norm
    return _hypot([torch.linalg.vector_norm(tensor, dtype=torch.float64).item() for tensor in tensors])


def _hypot(norms: Sequence[float]) -> float:
    # math.hypot takes an infinity for the answer even beside a NaN.
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)


def _square(tensor: torch.Tensor) -> float:
    # A long product sums one by one in a few lanes, and loses digits where all elements are alike: short rows do not.
    flat = tensor.contiguous().view(-1)
    whole = flat.numel() // _ROW * _ROW
    square = _sum_of_squares(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1))
    rest = flat[whole:]
    return square + (torch.dot(rest, rest).item() if rest.numel() else 0.0)


def _sum_of_squares(norms: torch.Tensor) -> float:
    wide = norms.double()
    square: float = torch.dot(wide, wide).item()
    return square


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """What has the same norm as `tensor`, in a layout and type that are computed with."""
    if tensor.layout == torch.sparse_coo and not tensor.is_coalesced():
        tensor = tensor.coalesce().values() if statistics.runs_on_host(tensor) else _added_up(tensor)
    elif tensor.layout != torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor  # float8 knows no arithmetic


def _added_up(tensor: torch.Tensor) -> torch.Tensor:
    """The values of an uncoalesced tensor in COO layout, those of one index added up, and zeros to fill.

    Coalescing waits for the device to say how many indices there are. Here the shape is that of the values, whatever
    the device finds.
    """
    indices, values = tensor._indices(), tensor._values()
    if not values.numel():
        return values
    place = torch.zeros_like(indices[0])
    for along, size in zip(indices, tensor.shape, strict=False):
        place = place * size + along
    place, order = place.sort()
    first = torch.nn.functional.pad(place[1:] != place[:-1], (1, 0))
    groups = torch.empty_like(order).scatter_(0, order, first.cumsum(0))
    wide = values if values.is_complex() or values.dtype == torch.float64 else values.float()
    # Back to the type of the gradient: a sum that overflows there is infinite for the optimizer too.
    return torch.zeros_like(wide).index_add_(0, groups, wide).to(values.dtype)

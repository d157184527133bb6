"""Processes that train one model together decide together: one that stopped alone would leave the others waiting."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def shared(value: float, model: nn.Module) -> float:
    """The mean of a number over the processes that train this model together; the number itself where it is one.

    Each of these processes has to call it, as each has to call the backward pass. NaN or an infinity of one process is
    in the mean of all.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()) or not _is_shared(model):
        return value
    group = next((one.process_group for one in model.modules() if isinstance(one, DistributedDataParallel)), None)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    total = torch.tensor(value, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total, group=group)
    return float(total) / torch.distributed.get_world_size(group)


def _is_shared(model: nn.Module) -> bool:
    """Whether a backward pass of the model waits for other processes: DDP, FSDP, or parameters that are DTensors."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    return any(isinstance(one, (DistributedDataParallel, FullyShardedDataParallel)) for one in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )

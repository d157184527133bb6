"""Several processes, one run: rank 0 makes it, the others hear where it is. The only collective there is."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import errors


def position() -> tuple[int, int]:
    """The rank of this process, and how many processes there are."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def shared_run(make: Callable[[], str]) -> tuple[str, int]:
    """The path of the run that rank 0 makes, and this process's rank. An error of rank 0 is raised on all."""
    rank, world = position()
    if world == 1:
        return make(), 0
    told: list[str | None] = [None, None, None]
    failure: Exception | None = None
    if rank == 0:
        try:
            told = [make(), None, None]
        except Exception as error:  # whatever it is: the others are waiting
            failure, told = error, [None, type(error).__name__, str(error)]
    torch.distributed.broadcast_object_list(told, src=0)
    path, kind, problem = told
    if failure is not None:
        raise failure
    if path is None:
        raise getattr(errors, str(kind), errors.StatsBridgeError)(problem)
    return path, rank

"""Several processes, one run: rank 0 makes it, the others hear where it is. The only collective there is."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import ConfigError


def shared_run(make: Callable[[], str]) -> tuple[str, int]:
    """The path of the run that rank 0 makes, and this process's rank. An error of rank 0 is raised on all."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return make(), 0
    rank = distributed.get_rank()
    told: list[str | None] = [None, None]
    if rank == 0:
        try:
            told = [make(), None]
        except ConfigError as error:
            told = [None, str(error)]
    distributed.broadcast_object_list(told, src=0)
    path, problem = told
    if path is None:
        raise ConfigError(str(problem))
    return path, rank

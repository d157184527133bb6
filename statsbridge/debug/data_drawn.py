"""Which samples a loader draws for its batches."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


def recorded(loader: DataLoader[Any]) -> tuple[DataLoader[Any], collections.deque[list[Any]]]:
    """A loader that gives the same batches, and the indices that it drew for them, in the same order."""
    drawn: collections.deque[list[Any]] = collections.deque()
    shared: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
    }
    if loader.num_workers:
        shared["prefetch_factor"] = loader.prefetch_factor
    return DataLoader(loader.dataset, batch_sampler=_Recorder(loader.batch_sampler, drawn), **shared), drawn


class _Recorder:
    """A batch sampler that writes down what it gave."""

    def __init__(self, sampler: Any, drawn: collections.deque[list[Any]]) -> None:
        self.sampler = sampler
        self.drawn = drawn

    def __iter__(self) -> Iterator[list[Any]]:
        for indices in self.sampler:
            indices = list(indices)
            self.drawn.append(indices)
            yield indices


def which(drawn: collections.deque[list[Any]] | None) -> str:
    """The samples of the batch that comes next, in brackets; nothing where they are not known."""
    return f" (samples {', '.join(map(str, drawn[0][:8]))}{', …' if len(drawn[0]) > 8 else ''})" if drawn else ""

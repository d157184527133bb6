"""A fixture for tests that record a real training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import statsbridge


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Callable[..., statsbridge.Run]]:
    """`statsbridge.init` into a temporary folder; whatever is still open is finished at the end."""
    runs: list[statsbridge.Run] = []

    def start(model: Any, **options: Any) -> statsbridge.Run:
        runs.append(statsbridge.init(model, **{"dir": tmp_path, "every": 1, **options}))
        return runs[-1]

    yield start
    for run in runs:
        run.finish()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors are computed faster by one thread than by several that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

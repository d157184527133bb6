"""While the debugging toolkit tries things with a model, no open run takes them for training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Blocks(threading.local):
    """How many blocks this thread is in: a training in another thread goes on being recorded."""

    count = 0


_BLOCKS = _Blocks()


@contextmanager
def suspended() -> Iterator[None]:
    """Whatever this thread does inside, no run records it: no forward pass, no optimizer step, no tensor."""
    _BLOCKS.count += 1
    try:
        yield
    finally:
        _BLOCKS.count -= 1


def is_suspended() -> bool:
    """Whether this thread is inside `suspended()`."""
    return _BLOCKS.count > 0

"""What is no training: what the debugging toolkit tries with a model, and what is traced to become a program."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TRACERS = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)


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
    """Whether this thread is inside `suspended()`, or traces what it runs."""
    return _BLOCKS.count > 0 or _is_traced()


def _is_traced() -> bool:
    """Whether operations are written down (`torch.jit.trace`, `make_fx`), or only their shapes are computed.

    Ours would become part of the program, or make the tracer believe that it is another one each time.
    """
    if torch._C._get_tracing_state() is not None:
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _TRACERS))

"""What happens to open writers when their process ends or forks: exit, SIGTERM, a forked child."""

import atexit
import os
import signal
import threading
import time
from types import FrameType
from typing import Protocol

# torchrun and schedulers kill soon after SIGTERM.
SIGTERM_SECONDS = 2.0


class Closable(Protocol):
    """What a writer offers to this module."""

    def close(self, timeout: float = ..., state: str = ...) -> bool:
        """Write everything and stop."""
        ...

    def begin_close(self, state: str) -> threading.Event:
        """Ask the writer's thread to write everything and stop; the event that says it has. Never waits."""
        ...


_open: list[Closable] = []


def watch(writer: Closable) -> None:
    """Close `writer` at exit and at SIGTERM, the latter only where nobody else handles it.

    Only the main thread may set a handler: a writer made elsewhere does without.
    """
    _open.append(writer)
    if _in_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def unwatch(writer: Closable) -> None:
    """Forget `writer`, and with the last one give SIGTERM back."""
    if writer in _open:
        _open.remove(writer)
    if not _open:
        _restore()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _restore() -> None:
    if _in_main_thread() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    deadline = time.monotonic() + SIGTERM_SECONDS
    for done in [writer.begin_close("stopped") for writer in _open]:
        done.wait(max(0.0, deadline - time.monotonic()))
    # Die of the signal, as without us: the parent sees the exit status it expects.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


# Runs while daemon threads still do, before the interpreter freezes them.
@atexit.register
def _at_exit() -> None:
    for writer in list(_open):
        writer.close(state="stopped")


def _in_forked_child() -> None:
    # The writers are the parent's; their threads do not exist here.
    _open.clear()
    _restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)

"""`torch.compile` on sampled steps: compiled code runs no hooks, so what is recorded has to run eagerly.

The stance `force_eager` does that without a recompilation before or after. It covers one forward pass that is
recorded, or a block that the user marks by `run.sampling()`. What torch.compile makes of the user's code is the same
with us and without: while it traces, our hooks on modules are away.
"""

from __future__ import annotations

import re
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

_ORIGINAL = "_torchdynamo_orig_callable"  # torch.compile leaves the function it was given under this name
_CALL = "_compiled_call_impl"  # nn.Module calls what it finds here in place of its own hooks and forward

#: OptimizedModule says at every call that global hooks fire for it too, which is what we want.
_ABOUT_HOOKS = (
    "ignore",
    re.compile(r"Using `torch\.compile\(module\)` when there are global hooks", re.IGNORECASE),
    UserWarning,
    None,
    0,
)


class Watcher(Protocol):
    """Sees calls of modules before anything compiled can start. Never raises."""

    def begin(self, module: nn.Module) -> Any: ...
    def end(self, begun: Any) -> None: ...
    def hide(self) -> None: ...
    def show(self) -> None: ...


# ------------------------------------------------------------------ the stance


class _EagerStance:
    """The process-wide stance, held by any number of forward passes and runs at once.

    Two runs that set and restored it by themselves would leave it on for ever where they interleave.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._guard: Any = None

    def take(self) -> None:
        """Run everything eagerly from now on. Raises RuntimeError inside compiled code."""
        with self._lock:
            if self._holders == 0:
                self._guard = torch.compiler.set_stance("force_eager")
            self._holders += 1

    def release(self) -> None:
        """Undo one `take`; the last one restores the stance that there was before the first."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                guard, self._guard = self._guard, None
                guard.__exit__(None, None, None)


EAGER = _EagerStance()


# ------------------------------------------------------------------ what is compiled


def compiler_is_loaded() -> bool:
    """Whether anything can have been compiled: importing torch.compile's part of torch takes a second or more."""
    return "torch._dynamo" in sys.modules


def compiled_code_exists() -> bool:
    """Whether torch.compile has compiled anything in this process since it was last reset."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return bool(counters is not None and counters["frames"].get("ok"))


def is_optimized(module: nn.Module) -> bool:
    """Whether this is the OptimizedModule that `torch.compile(module)` returns."""
    return "_orig_mod" in module._modules


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called on it."""
    return vars(module).get(_CALL) is not None


def has_compiled_parts(modules: Iterable[nn.Module]) -> bool:
    """Whether any of them is compiled: as a whole, or a function among its attributes or those of its class."""
    kinds: dict[type, bool] = {}
    for module in modules:
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = any(_any_compiled(vars(base)) for base in kind.__mro__ if base is not nn.Module)
        if kinds[kind] or is_optimized(module) or is_compiled(module) or _any_compiled(vars(module)):
            return True
    return False


def _any_compiled(attributes: Any) -> bool:
    # Only plain functions are asked: other objects may compute their attributes.
    return any(type(value) is types.FunctionType and _ORIGINAL in vars(value) for value in list(attributes.values()))


# ------------------------------------------------------------------ calls of compiled modules


class _WatchedCall:
    """Stands in a module's `_compiled_call_impl` while windows are open, and tells them of each call.

    A module that was compiled by `module.compile()` runs no hook, and no hook runs after a KeyboardInterrupt:
    here the end of a call is seen whatever happens.
    """

    __slots__ = ("inner", "module", "watchers")

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.inner: Callable[..., Any] | None = vars(module).get(_CALL)
        self.watchers: list[Watcher] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None  # it is being called
        inner: Callable[..., Any] = module._call_impl if self.inner is None else self.inner
        if torch.compiler.is_compiling():
            return inner(*args, **kwargs)  # torch.export calls modules as they are
        begun = [(watcher, watcher.begin(module)) for watcher in tuple(self.watchers)]
        try:
            return inner(*args, **kwargs)
        finally:
            for watcher, forward in reversed(begun):
                watcher.end(forward)

    def __reduce__(self) -> Any:
        return type(None), ()  # a module pickled inside a sampled step takes nothing of ours along


def watch_calls(module: nn.Module, watcher: Watcher) -> None:
    """Tell the watcher of every call of this module until `unwatch_calls`."""
    call = vars(module).get(_CALL)
    if not isinstance(call, _WatchedCall):
        # Where one compiled module calls another, this frame of ours is none to be compiled.
        torch.compiler.disable(_WatchedCall.__call__, recursive=False)  # type: ignore[no-untyped-call]
        call = _WatchedCall(module)
        vars(module)[_CALL] = call
    if watcher not in call.watchers:
        call.watchers.append(watcher)


def unwatch_calls(module: nn.Module, watcher: Watcher) -> None:
    """The last watcher that leaves puts back what was there; nothing, where the user has compiled it meanwhile."""
    call = vars(module).get(_CALL)
    if not isinstance(call, _WatchedCall):
        return
    if watcher in call.watchers:
        call.watchers.remove(watcher)
    if call.watchers:
        return
    if call.inner is None:
        del vars(module)[_CALL]
    else:
        vars(module)[_CALL] = call.inner


# ------------------------------------------------------------------ while torch.compile traces


class _Windows:
    """The windows that are open. Their hooks are away while code is compiled: they would be traced into it.

    Code compiled with hooks is compiled once more when they are gone.
    """

    def __init__(self) -> None:
        self._watchers: list[Watcher] = []
        self._running = 0  # torch 2.6 announces a compilation inside another one as well

    def add(self, watcher: Watcher) -> None:
        """Register, also again: `torch._dynamo.reset()` forgets callbacks. Does nothing before its first import."""
        handler = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
        if watcher not in self._watchers:
            self._watchers.append(watcher)
        silence_optimized_module()
        if handler is not None and self._start not in handler.start_callbacks:
            handler.register_start_callback(self._start)
            handler.register_end_callback(self._end)

    def remove(self, watcher: Watcher) -> None:
        handler = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        if self._watchers:
            return
        _unsilence_optimized_module()
        if handler is not None and self._start in handler.start_callbacks:
            handler.remove_start_callback(self._start)
            handler.remove_end_callback(self._end)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Forward passes inside are seen by no window that is open now."""
        self._start()
        try:
            yield
        finally:
            self._end()

    def _start(self, *_: Any) -> None:
        self._running += 1
        if self._running == 1:
            for watcher in self._watchers:
                watcher.hide()

    def _end(self, *_: Any) -> None:
        self._running -= 1
        if self._running == 0:
            for watcher in self._watchers:
                watcher.show()


WINDOWS = _Windows()


def silence_optimized_module() -> None:
    """Put the filter for its warning first, where it comes before one that the user has just set.

    Not by `warnings.filterwarnings`: that would make every warning that is said once be said once more.
    """
    if _ABOUT_HOOKS not in warnings.filters[:1]:
        _unsilence_optimized_module()
        warnings.filters.insert(0, _ABOUT_HOOKS)  # type: ignore[attr-defined]


def _unsilence_optimized_module() -> None:
    while _ABOUT_HOOKS in warnings.filters:
        warnings.filters.remove(_ABOUT_HOOKS)  # type: ignore[attr-defined]

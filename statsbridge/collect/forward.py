"""Forward passes on sampled steps: torch's global module hooks, filtered by the index of tracked modules.

Global hooks leave nothing on the modules: pickle, deepcopy and `torch.save` of a model see no trace of us,
ScriptModules are seen too, and a deep copy of the model is not counted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .modules import ModuleEntry, ModuleIndex
from .order import DepthTracer


@dataclass(slots=True)
class _Frame:
    """A tracked module that is running; a leaf where it has called no other one."""

    entry: ModuleEntry
    leaf: bool = True


@dataclass(slots=True)
class ForwardPass:
    """One call of the outermost tracked module, from its pre-hook to its post-hook.

    `counted` passes are recorded. `recompute` marks the second forward of an activation checkpoint: its
    outputs are those of the first one, only their gradients may still be missing.
    """

    root: ModuleEntry
    counted: bool
    recompute: bool
    tracer: DepthTracer | None = None
    stack: list[_Frame] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=dict)
    executed: list[tuple[int, int, int | None]] = field(default_factory=list)  # module, call, depth
    seen: dict[int, Any] = field(default_factory=dict)  # by id: outputs that were measured already
    records: list[tuple[Any, Any]] = field(default_factory=list)  # row and piece, until the pass has ended well
    outcome: bool | None = None  # True: counts, False: raised or interrupted, None: still running


class Flow(NamedTuple):
    """What went into a call and came out of it, and whether no other tracked module was called inside."""

    inputs: Any
    output: Any
    leaf: bool


class ForwardListener(Protocol):
    """What a window does with the calls it is shown. Exceptions are caught here, never in the model."""

    def wants(self, root: ModuleEntry, module: nn.Module) -> bool: ...
    def tracer(self, root: ModuleEntry) -> DepthTracer | None: ...
    def output(self, forward: ForwardPass, entry: ModuleEntry, call: int, flow: Flow) -> None: ...
    def completed(self, forward: ForwardPass) -> None: ...
    def abandoned(self, forward: ForwardPass) -> None: ...


class ForwardHooks:
    """Attaches to every module call of the process, and shows the tracked ones to a listener."""

    def __init__(
        self,
        index: ModuleIndex,
        listener: ForwardListener,
        trouble: Callable[[str, str, BaseException], None],
    ) -> None:
        self._index = index
        self._listener = listener
        self._trouble = trouble
        self._open: dict[int, ForwardPass] = {}  # by thread, so that detach() finds what an interrupt left
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Hook every module call, until `detach`."""
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def detach(self) -> None:
        """Remove both hooks, and whatever an interrupted forward left behind."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for forward in list(self._open.values()):
            self._drop(forward)

    def _before(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            entry = self._index.entry(module)
            if entry is not None:
                self._enter(entry, module)
        except Exception as error:
            self._trouble("the hook before a forward", type(module).__name__, error)

    def _after(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            entry = self._index.entry(module)
            if entry is not None:
                # Where the forward raised, torch calls an always_call hook without the keyword arguments.
                kwargs: Mapping[str, Any] = rest[0] if len(rest) == 2 else {}
                raised = len(rest) == 1 or (rest[-1] is None and sys.exc_info()[0] is not None)
                self._leave(entry, args, kwargs, rest[-1], raised)
        except Exception as error:
            self._trouble("the hook after a forward", type(module).__name__, error)

    def _enter(self, entry: ModuleEntry, module: nn.Module) -> None:
        forward: ForwardPass | None = self._open.get(threading.get_ident())
        if forward is not None and entry.index == forward.root.index:
            # The root cannot be inside itself: an interrupt skipped the hooks that would have closed this pass.
            self._drop(forward)
            forward = None
        if forward is None:
            recompute = torch._C._current_graph_task_id() != -1
            counted = not recompute and self._listener.wants(entry, module)
            forward = ForwardPass(entry, counted, recompute)
            if counted:
                forward.tracer = self._listener.tracer(entry)
                if forward.tracer is not None:
                    forward.tracer.start()
            self._open[threading.get_ident()] = forward
        if forward.stack and not entry.in_parametrization:
            forward.stack[-1].leaf = False
        forward.stack.append(_Frame(entry))
        if forward.tracer is not None:
            forward.tracer.enter(entry)

    def _leave(self, entry: ModuleEntry, args: Any, kwargs: Mapping[str, Any], output: Any, raised: bool) -> None:
        forward: ForwardPass | None = self._open.get(threading.get_ident())
        if forward is None or all(frame.entry is not entry for frame in forward.stack):
            return
        while (frame := forward.stack.pop()).entry is not entry:
            pass  # calls whose hook after the forward was skipped by an interrupt that the model caught
        call = forward.calls.get(entry.index, 0)
        forward.calls[entry.index] = call + 1
        depth = None
        if forward.tracer is not None:
            depth = forward.tracer.exit(entry, args, kwargs, output)
        if not raised and (forward.counted or forward.recompute):
            forward.executed.append((entry.index, call, depth))
            self._listener.output(forward, entry, call, Flow((args, kwargs), output, frame.leaf))
        if not forward.stack:
            self._close(forward, raised)

    def _close(self, forward: ForwardPass, raised: bool) -> None:
        del self._open[threading.get_ident()]
        if forward.tracer is not None:
            forward.tracer.stop()
        forward.seen.clear()
        if forward.counted:
            (self._listener.abandoned if raised else self._listener.completed)(forward)

    def _drop(self, forward: ForwardPass) -> None:
        for thread, other in list(self._open.items()):
            if other is forward:
                del self._open[thread]
        if forward.tracer is not None:
            forward.tracer.stop()
        forward.seen.clear()
        if forward.counted:
            self._listener.abandoned(forward)

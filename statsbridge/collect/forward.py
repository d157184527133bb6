"""Forward passes on sampled steps: torch's global module hooks, filtered by the index of tracked modules.

Global hooks leave nothing on the modules: pickle, deepcopy and `torch.save` of a model see no trace of us,
ScriptModules are seen too, and a deep copy of the model is not counted.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .compiled import (
    EAGER,
    WINDOWS,
    compiler_is_loaded,
    has_compiled_parts,
    is_compiled,
    is_optimized,
    silence_optimized_module,
    unwatch_calls,
    watch_calls,
)
from .modules import ModuleEntry, ModuleIndex, unwrapped
from .order import DepthTracer
from .suspended import is_suspended


@dataclass(slots=True)
class _Frame:
    """A tracked module that is running; a leaf where it has called no other one."""

    entry: ModuleEntry
    error: BaseException | None  # what was being handled when the call began
    leaf: bool = True


@dataclass(slots=True, eq=False)
class ForwardPass:
    """One call of the outermost tracked module, from its pre-hook to its post-hook.

    `counted` passes are recorded. `recompute` marks the second forward of an activation checkpoint: its
    outputs are those of the first one, only their gradients may still be missing. `begun_by` is the wrapper or
    compiled module that announced the pass, `eager` whether the pass holds the eager stance.
    """

    root: ModuleEntry
    counted: bool
    recompute: bool
    begun_by: nn.Module | None = None
    eager: bool = False
    small: list[Any] = field(default_factory=list)  # calls whose outputs are small, and where their inputs are from
    given: Any = None  # what is known of the model's own inputs
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
        look_again: Callable[[], None],
        trouble: Callable[[str, str, BaseException], None],
    ) -> None:
        self._index = index
        self._listener = listener
        self._look_again = look_again  # before the first call of a window that may count
        self._trouble = trouble
        self._open: dict[int, ForwardPass] = {}  # by thread, so that detach() finds what an interrupt left
        self._handles: list[Any] = []
        self._fresh = True
        self.met_strangers = False  # whether modules that are none of the models' ran with gradients in this window
        self._compiled = False  # whether any part of the models is
        self._watched: list[weakref.ref[nn.Module]] = []
        self._held: list[ForwardPass] = []  # those over whose wrapper is still running, and holds the eager stance
        self._met: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # compiled wrappers that the index does not know
        self._recorded: set[int] = set()  # modules that a counted pass of this window has run

    def attach(self) -> None:
        """Hook every module call, until `detach`."""
        self._recorded.clear()
        self._fresh = self.met_strangers = False
        modules = self._index.modules()
        wrappers = [*self._index.wrappers(), *self._met]
        self._compiled = has_compiled_parts([*modules, *wrappers])
        self.show()
        WINDOWS.add(self)
        if self._compiled:
            # A replica of DataParallel takes the attributes of its model over, and would call the model itself.
            replicated = any(isinstance(wrapper, nn.DataParallel) for wrapper in wrappers)
            around = {id(unwrapped(wrapper)) for wrapper in wrappers}
            bare = [root for root in self._index.roots() if id(root) not in around]
            whole = [*([] if replicated else [*wrappers, *bare]), *filter(is_compiled, (*wrappers, *modules))]
            self._watched = [weakref.ref(module) for module in whole]
            for module in whole:
                watch_calls(module, self)

    def detach(self) -> None:
        """Remove both hooks, and whatever an interrupted forward left behind."""
        WINDOWS.remove(self)
        self.hide()
        for reference in self._watched:
            if (module := reference()) is not None:
                unwatch_calls(module, self)
        self._watched = []
        for forward in list(self._open.values()):
            self._drop(forward)
        for forward in self._held:
            self._release(forward)
        self._held = []

    def show(self) -> None:
        """Put the hooks where torch looks for them, once."""
        if self._handles:
            return
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def hide(self) -> None:
        """Take them away."""
        for handle in self._handles:
            handle.remove()
            # torch leaves this behind, and OptimizedModule takes it for a hook.
            getattr(torch_module, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)
        self._handles = []

    def begin(self, module: nn.Module) -> ForwardPass | None:
        """A wrapper or a compiled module is called: judge now, before any compiled code, what the pass will be."""
        if is_suspended():
            return None
        try:
            forward = self._open.get(threading.get_ident())
            if forward is not None and forward.begun_by is module:
                self._drop(forward)  # it cannot be inside itself: an interrupt left it
                forward = None
            self._freshen()
            inner = unwrapped(module)
            entry = self._index.entry(inner)
            return self._begin(entry, inner, module) if forward is None and entry is not None else None
        except Exception as error:
            self._trouble("the start of a forward", type(module).__name__, error)
            return None

    def end(self, begun: ForwardPass | None) -> None:
        """The call that `begin` has seen is over, however it ended."""
        try:
            if begun is not None and begun.outcome is None:
                self._drop(begun)
            elif begun is not None and begun in self._held:
                self._held.remove(begun)
                self._release(begun)
        except Exception as error:
            self._trouble("the end of a forward", "", error)

    def _before(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or is_suspended():
            return
        try:
            self._freshen()
            entry = self._index.entry(module)
            if entry is not None:
                self._enter(entry, module)
            elif is_optimized(module):
                self._enter_wrapper(module)
            else:
                self.met_strangers = self.met_strangers or torch.is_grad_enabled()
        except Exception as error:
            self._trouble("the hook before a forward", type(module).__name__, error)

    def _after(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling() or is_suspended():
            return
        try:
            entry = self._index.entry(module)
            if entry is not None:
                # Where the forward raised, torch calls an always_call hook without the keyword arguments.
                kwargs: Mapping[str, Any] = rest[0] if len(rest) == 2 else {}
                self._leave(entry, args, kwargs, rest[-1], len(rest) == 1)
            elif is_optimized(module):
                for forward in (*self._open.values(), *self._held):
                    if forward.begun_by is module:
                        self.end(forward)
        except Exception as error:
            self._trouble("the hook after a forward", type(module).__name__, error)

    def _freshen(self) -> None:
        if not self._fresh and torch.is_grad_enabled():
            self._fresh = True
            self._look_again()

    def _enter_wrapper(self, module: nn.Module) -> None:
        """`torch.compile(model)` is called where `init` was given the model itself."""
        watched = any(reference() is module for reference in self._watched)
        if not watched and self._index.entry(unwrapped(module)) is not None:
            self._met.add(module)
            self._compiled = True
            WINDOWS.add(self)
            self.begin(module)

    def _begin(self, entry: ModuleEntry, module: nn.Module, begun_by: nn.Module | None) -> ForwardPass:
        recompute = torch._C._current_graph_task_id() != -1
        counted = not recompute and self._listener.wants(entry, module)
        forward = ForwardPass(entry, counted, recompute, begun_by)
        self._open[threading.get_ident()] = forward
        tracer = self._listener.tracer(entry) if counted else None
        # A recompute must run as its first forward did, or autograd finds other tensors than it has saved. And
        # whatever is compiled under the tracer's mode would be compiled for that mode.
        again = recompute and entry.index in self._recorded
        if (tracer is not None and compiler_is_loaded()) or (self._compiled and (counted or again)):
            silence_optimized_module()
            EAGER.take()
            forward.eager = True
        if tracer is not None:
            forward.tracer = tracer
            tracer.start()
        return forward

    def _enter(self, entry: ModuleEntry, module: nn.Module) -> None:
        forward: ForwardPass | None = self._open.get(threading.get_ident())
        if forward is not None and (entry.index == forward.root.index) == bool(forward.stack):
            # The root cannot be inside itself, and nothing comes before it: an interrupt skipped the hooks that
            # would have closed this pass.
            self._drop(forward)
            forward = None
        if forward is None:
            forward = self._begin(entry, module, None)
        if forward.stack and not entry.in_parametrization:
            forward.stack[-1].leaf = False
        forward.stack.append(_Frame(entry, sys.exc_info()[1]))
        if forward.counted:
            self._recorded.add(entry.index)
        if forward.tracer is not None:
            forward.tracer.enter(entry)

    def _leave(self, entry: ModuleEntry, args: Any, kwargs: Mapping[str, Any], output: Any, raised: bool) -> None:
        forward: ForwardPass | None = self._open.get(threading.get_ident())
        if forward is None or all(frame.entry is not entry for frame in forward.stack):
            return
        while (frame := forward.stack.pop()).entry is not entry:
            pass  # calls whose hook after the forward was skipped by an interrupt that the model caught
        raised = raised or (output is None and sys.exc_info()[1] is not frame.error)
        call = forward.calls.get(entry.index, 0)
        forward.calls[entry.index] = call + 1
        depth = None
        if forward.tracer is not None:
            depth = forward.tracer.exit(entry, args, kwargs, output)
        if not raised and (forward.counted or forward.recompute):
            forward.executed.append((entry.index, call, depth))
            # What is done with an output is no operation of the model: the tracer is not to see it.
            with torch._C.DisableTorchFunction():
                self._listener.output(forward, entry, call, Flow((args, kwargs), output, frame.leaf))
        if not forward.stack:
            self._leave_behind(forward)
            if forward.begun_by is None:
                self._release(forward)
            else:
                # A model compiled with fullgraph=True raises where it has run eagerly for no reason that it can see.
                self._held.append(forward)
            forward.outcome = not raised
            if forward.counted:
                (self._listener.abandoned if raised else self._listener.completed)(forward)

    def _drop(self, forward: ForwardPass) -> None:
        self._leave_behind(forward)
        self._release(forward)
        forward.outcome = False
        if forward.counted:
            self._listener.abandoned(forward)

    def _leave_behind(self, forward: ForwardPass) -> None:
        """Take the pass and its tracer off whatever they stand on."""
        for thread, other in list(self._open.items()):
            if other is forward:
                del self._open[thread]
        if forward.tracer is not None:
            forward.tracer.stop()
        forward.seen.clear()

    def _release(self, forward: ForwardPass) -> None:
        if forward.eager:
            forward.eager = False
            EAGER.release()

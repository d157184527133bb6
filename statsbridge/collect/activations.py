"""Activations and their gradients on a sampled step: what every tracked module put out, and what came back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .alike import AlikeOutputs, ModelInputs, SmallOutput, count_samples, sources_of
from .calls import CallTable
from .filters import Filters
from .forward import Flow, ForwardPass
from .gradients import GradientHook
from .messages import Reporter
from .module_facts import ModuleFacts
from .modules import ModuleEntry, ModuleIndex
from .order import DepthTracer
from .outputs import ViewWatch, gradient_target, tensors_in
from .parameters import Measure
from .rows import BY_HAND, Key, Rows, key_of
from .statistics import Piece


@dataclass(slots=True)
class _Seen:
    """An output that was measured already: a container's output is often its last child's very tensor."""

    reference: weakref.ref[torch.Tensor]
    version: int
    piece: Piece | None
    key: Key
    hook: GradientHook | None = None
    watch: ViewWatch | None = None


class ActivationWatch:
    """Fills the rows of activations from the forward passes it is shown (a `ForwardListener`)."""

    def __init__(
        self,
        index: ModuleIndex,
        filters: Filters,
        calls: CallTable,
        measure: Measure,
        scale: Callable[[], torch.Tensor | None],
        relieve: Callable[[], None],
        reporter: Reporter,
        *,
        count_eval: bool,
        tracing: bool,
    ) -> None:
        self._index = index
        self._filters = filters
        self._calls = calls
        self._measure = measure
        self._scale = scale
        self._relieve = relieve  # called when rows may have become too many to hold
        self._reporter = reporter
        self._count_eval = count_eval
        self._tracing = tracing
        self.modules = ModuleFacts(index)
        self.outputs = AlikeOutputs(index)
        self._traced: set[int] = set()
        self._chosen: list[bool] = []
        self._rows: Rows | None = None
        self._hooks: list[GradientHook] = []
        self._leaves: dict[int, tuple[torch.Tensor, GradientHook, Any]] = {}  # by id: the tensor, its hook, the handle

    def open(self, rows: Rows) -> None:
        """Fill these rows from now on."""
        self._rows = rows
        self.modules.open()
        self.outputs.open()
        self.choose()
        self._hooks = []
        self._leaves = {}
        self._unhooked: dict[Key, set[int]] = {}  # outputs that had no graph: key of call 0 -> which calls
        self._views: list[tuple[Key, ViewWatch]] = []
        self.counted = 0
        self.eval_only = 0

    def use(self, filters: Filters) -> None:
        """Collect by these filters from the next window on."""
        self._filters = filters

    def choose(self) -> None:
        """Apply the filters to the modules that there are now."""
        self._chosen = [self._filters.module(entry.name) for entry in self._index.entries]

    @property
    def untouched(self) -> bool:
        """Whether no forward pass with gradients was seen in this window, counted or not."""
        return not self.counted and not self.eval_only

    def close(self) -> None:
        """Let go of the rows, and of hooks in graphs that the user keeps."""
        for hook in self._hooks:
            hook.silence()
        for _, _, handle in self._leaves.values():
            handle.remove()
        self._hooks, self._leaves, self._rows = [], {}, None

    def settle(self, rows: Rows, doubtful_scale: bool) -> None:
        """Give every row without numbers its reason, and every module that was not called its row."""
        for key, watch in self._views:
            if watch.modified():
                rows.row(key).status = "view_modified"
        for row in rows:
            if row.key.site in ("activation_grad", "tensor_grad") and row.status is None:
                if not row.measured:
                    row.status = "no_grad"
                elif doubtful_scale:
                    row.status = "scale_unknown"
        if "activation" in self._filters.sites:
            called = {row.key.module for row in rows if row.key.site == "activation"}
            for entry in self._index.entries:
                if self._chosen[entry.index] and entry.index not in called and self._callable(entry):
                    rows.row(Key(entry.index, 0, "activation", "")).status = "not_called"

    def log_tensor(self, name: str, tensor: torch.Tensor, grad: bool) -> None:
        """A tensor given by hand; with `grad`, its gradient too where one arrives."""
        rows = self._rows
        if rows is None:
            return
        key, gradient_key = Key(BY_HAND, 0, "tensor", name), Key(BY_HAND, 0, "tensor_grad", name)
        # Inside a backward pass a checkpoint runs its forward again: the tensor has been logged before.
        again = torch._C._current_graph_task_id() != -1
        piece = None if again else self._measure(key, tensor)
        if piece is not None:
            rows.add(key, piece)
            self._relieve()
        if not grad or (again and gradient_key not in self._unhooked):
            return
        rows.row(gradient_key)
        if tensor.requires_grad:
            self._hook(tensor, [gradient_key], None)
        else:
            self._unhooked[gradient_key] = {0}

    # ------------------------------------------------------------------ what ForwardHooks calls

    def wants(self, root: ModuleEntry, module: nn.Module) -> bool:
        """Whether a forward that starts now counts as training."""
        with_gradients = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if self._count_eval or (with_gradients and any(child.training for child in module.modules())):
            return True
        self.eval_only += with_gradients
        return False

    def tracer(self, root: ModuleEntry) -> DepthTracer | None:
        """A tracer where this forward's calls are not known yet."""
        return DepthTracer() if self._tracing and root.index not in self._traced else None

    def output(self, forward: ForwardPass, entry: ModuleEntry, call: int, flow: Flow) -> None:
        """Measure what a module put out, and ask for the gradients that will come back."""
        if self._chosen[entry.index]:
            self._output(forward, entry, call, flow)
        if forward.small and entry.index == forward.root.index:
            forward.given = ModelInputs.of(flow.inputs)

    def completed(self, forward: ForwardPass) -> None:
        """The outermost forward has ended well: its rows count."""
        forward.outcome = True
        rows = self._rows
        if rows is None:
            return
        self.counted += 1
        given: ModelInputs | None = forward.given
        for key, piece in forward.records:
            if piece is not None:
                if piece.samples and (given is None or piece.samples != given.batch):
                    piece.samples = 0  # its first dimension is no batch
                rows.add(key, piece)
            elif key.site == "activation":
                rows.row(key).status = "internal_error"  # measuring it has failed, in this row or in its twin
            else:
                rows.row(key)
        self._place_calls(forward)
        self.modules.passed(forward)
        if given is not None:
            self.outputs.passed(forward.small, given, rows)
        forward.records.clear()  # hooks in the graph hold the pass: it must not hold its pieces
        forward.small.clear()
        forward.given = None
        self._relieve()

    def abandoned(self, forward: ForwardPass) -> None:
        """It raised or was interrupted: nothing of it counts, not even gradients that arrive later."""
        forward.outcome = False
        forward.records.clear()
        forward.small.clear()

    # ------------------------------------------------------------------ inside

    def _output(self, forward: ForwardPass, entry: ModuleEntry, call: int, flow: Flow) -> None:
        outputs = list(tensors_in(flow.output))
        # Before they are measured: a module that works in place gives back its input.
        sources = None if forward.recompute else sources_of(flow, outputs, forward.seen)
        for path, tensor in outputs:
            if forward.recompute:
                key = key_of(entry.index, call, "activation_grad", path)
                self._recomputed(key, tensor, flow, [other for _, other in outputs])
                continue
            key = key_of(entry.index, call, "activation", path)
            seen = self._activation(forward, key, tensor)
            if sources is not None and seen.piece is not None and seen.piece.samples:
                forward.small.append(SmallOutput(key, *sources))
            if "activation_grad" in self._filters.sites and tensor.is_floating_point():
                key = key_of(entry.index, call, "activation_grad", path)
                forward.records.append((key, None))
                self._expect(forward, key, tensor, seen, flow, [other for _, other in outputs])

    def _activation(self, forward: ForwardPass, key: Key, tensor: torch.Tensor) -> _Seen:
        wanted = "activation" in self._filters.sites
        seen = forward.seen.get(id(tensor))
        version = _version(tensor)
        if seen is None or seen.reference() is not tensor or seen.version != version:
            piece = self._measure(key, tensor) if wanted else None
            if piece is not None:
                piece.samples = count_samples(tensor, piece)
            seen = forward.seen[id(tensor)] = _Seen(weakref.ref(tensor), version, piece, key)
        if wanted:
            forward.records.append((key, seen.piece))
        return seen

    def _expect(
        self,
        forward: ForwardPass,
        key: Key,
        tensor: torch.Tensor,
        seen: _Seen,
        flow: Flow,
        outputs: list[torch.Tensor],
    ) -> None:
        """Hook the gradient of an output, once for all rows that the same tensor stands in."""
        target = None if seen.hook else gradient_target(tensor, flow.leaf, flow.inputs, outputs)
        if seen.hook is not None:
            seen.hook.keys.append(key)
        elif target is None:
            self._unhooked.setdefault(key._replace(call=0), set()).add(key.call)
        else:
            seen.hook = self._hook(target.tensor, [key], forward)
            seen.watch = target.watch
        if seen.watch is not None:
            self._views.append((key, seen.watch))

    def _recomputed(self, key: Key, tensor: torch.Tensor, flow: Flow, outputs: list[torch.Tensor]) -> None:
        """A checkpoint runs its forward again: where the first had no graph, gradients reach these outputs.

        A recompute does not say which call it repeats: where one call had no graph there is no doubt, where several
        had none they get no number. A call that had a graph is no trouble: no gradient flows through its recompute.
        """
        calls = self._unhooked.get(key._replace(call=0))
        if self._rows is None or not calls or not tensor.requires_grad:
            return
        keys = [key._replace(call=call) for call in sorted(calls)]
        target = gradient_target(tensor, flow.leaf, flow.inputs, outputs)
        if target is None:
            return
        if len(keys) == 1:
            self._hook(target.tensor, keys, None)
            self._views += [(keys[0], target.watch)] if target.watch else []
        elif target.watch is None and not target.tensor.is_leaf:
            self._hooks.append(GradientHook(keys, self._order_unknown, self._reporter.trouble))
            target.tensor.register_hook(self._hooks[-1])  # type: ignore[no-untyped-call]
        else:
            self._order_unknown(keys)  # a gradient may pass unseen

    def _order_unknown(self, keys: list[Key], *_: object) -> None:
        if self._rows is not None:
            for key in keys:
                self._rows.row(key).status = "recompute_order_unknown"

    def _hook(self, target: torch.Tensor, keys: list[Key], forward: ForwardPass | None) -> GradientHook:
        if target.is_leaf and id(target) in self._leaves:
            hook = self._leaves[id(target)][1]
            hook.keys.extend(key for key in keys if key not in hook.keys)
            return hook
        # A leaf is in no single forward's graph: each backward of the window brings it one more gradient.
        hook = GradientHook(keys, partial(self._arrived, None if target.is_leaf else forward), self._reporter.trouble)
        hook.once = not target.is_leaf
        handle = target.register_hook(hook)  # type: ignore[no-untyped-call]
        self._hooks.append(hook)
        if target.is_leaf:
            self._leaves[id(target)] = (target, hook, handle)  # it would outlive the graph
        return hook

    def _arrived(self, forward: ForwardPass | None, keys: list[Key], gradient: torch.Tensor, again: bool) -> None:
        rows = self._rows
        if rows is None or (forward is not None and forward.outcome is False):
            return
        if again:
            for key in keys:
                rows.row(key).status = "several_backwards"
            return
        piece = self._measure(keys[0], gradient, scale=self._scale())
        for key in keys:
            if piece is None:
                rows.row(key).status = "internal_error"
                continue
            if forward is None or forward.outcome:
                rows.add(key, piece)
            else:
                forward.records.append((key, piece))  # a backward inside the forward
        self._relieve()

    def _place_calls(self, forward: ForwardPass) -> None:
        root = forward.root.index
        tracer = forward.tracer
        if tracer is not None and tracer.failed is None:
            self._calls.traced(root, forward.executed, "runtime")
            self._traced.add(root)
            return
        if tracer is not None:
            self._traced.add(root)
            self._reporter.event("order_not_traced", f"depth could not be traced: {tracer.failed!r}; order only")
        unknown = [(module, call) for module, call, _ in forward.executed if not self._calls.known(module, call)]
        if unknown:
            self._calls.met(root, unknown)
            if tracer is None:
                self._traced.discard(root)

    def _callable(self, entry: ModuleEntry) -> bool:
        """A ModuleList and its like have no forward: they are never called."""
        module = self._index.module(entry)
        # Not by looking `forward` up: what ScriptModule has in its place only answers where there is an instance.
        kinds = () if module is None else type(module).__mro__
        return any("forward" in vars(kind) for kind in kinds if kind is not nn.Module)


def _version(tensor: torch.Tensor) -> int:
    # Inference tensors count no versions; they cannot be changed in place outside inference mode either.
    return -1 if tensor.is_inference() else tensor._version

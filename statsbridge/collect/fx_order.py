"""Order and depth of module calls without running the model, by `torch.fx` symbolic tracing."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from ..errors import ConfigError
from .modules import ModuleEntry, ModuleIndex
from .operations import data_arguments, is_in_place, operation_name

# What these yield is a shape or a type: no value of the tensor flows on through it.
_SHAPE_METHODS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride", "get_device"})
_SHAPE_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda"})


def fx_order(model: nn.Module, index: ModuleIndex) -> dict[tuple[int, int], tuple[int, int]]:
    """The static answer to what `DepthTracer` finds while the model runs.

    Parameters of `forward` that have a default keep it. Leaves are the modules that call no other module. Calls
    inside parametrizations and scripted modules are not seen. A leaf that hands back its input (`nn.Identity`) is
    told apart from it here, which a running model cannot.

    Args:
        model: a root of `index`, or a wrapper of one. Its forward does not run; no parameter changes.
        index: the tracked modules.

    Returns:
        (order, depth) for (index of the entry, n-th call of the module). A container comes right after the
        last call inside it, and has the depth of its output.

    Raises:
        ConfigError: torch.fx cannot trace the model (branches on values, loops over tensors, `*args`, …).
    """
    root = _tracked(model, index)
    tracer = _DepthTracer(index)
    # A forward may store what it computes on its module: nothing of the symbolic one is to stay there.
    attributes = [(module, dict(vars(module))) for module in root.modules()]
    try:
        tracer.trace(root, _defaults(root))
    except Exception as error:
        place = tracer.running[-1] if tracer.running else index.entry(root)
        where = f"{place.name or 'the root'} ({place.type})" if place is not None else type(root).__name__
        raise ConfigError(
            f'torch.fx cannot trace {where}: {error}. Use order="auto", which traces the first sampled forward instead.'
        ) from error
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
    return tracer.found


def _tracked(model: nn.Module, index: ModuleIndex) -> nn.Module:
    """The model itself, or what its wrappers wrap: the first tracked module in it."""
    for module in model.modules():
        if index.entry(module) is not None:
            return module
    raise ConfigError(f"{type(model).__name__} is not among the tracked modules: give the model that was given.")


def _defaults(root: nn.Module) -> dict[str, Any]:
    """Without these fx would trace an optional argument as if it were given."""
    parameters = inspect.signature(root.forward).parameters
    return {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}


class _DepthTracer(fx.Tracer):
    """Gives every node of the graph its depth at the moment it is made."""

    def __init__(self, index: ModuleIndex) -> None:
        super().__init__()
        self.found: dict[tuple[int, int], tuple[int, int]] = {}
        self.running: list[ModuleEntry] = []
        self._index = index
        self._calls: dict[int, int] = {}
        self._depths: dict[fx.Node, int] = {}

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """The graph as torch.fx makes it; the root comes last in `found`."""
        graph = super().trace(root, concrete_args)
        results = [argument for node in graph.nodes if node.op == "output" for argument in node.args]
        entry = self._index.entry(root)
        if entry is not None:
            self._record(entry, self._deepest(results))
        return graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call is not looked into."""
        entry = self._index.entry(m)
        return (
            isinstance(m, (nn.MultiheadAttention, torch.jit.ScriptModule))
            or entry is None
            or entry.leaf
            or entry.in_parametrization
        )

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module call: records it when its output is ready."""
        entry = self._index.entry(m)
        if entry is None:
            return super().call_module(m, forward, args, kwargs)
        self.running.append(entry)
        before = len(self.found)
        result = super().call_module(m, forward, args, kwargs)
        self.running.pop()
        depth = self._deepest(result)
        if self.is_leaf_module(m, ""):
            if getattr(m, "inplace", False) is True:
                self._raise_to(depth, args)
        elif len(self.found) == before:
            # It has modules and called none of them (a quantized Linear): it is as good as a leaf.
            depth = max(depth, self._deepest((args, kwargs))) + 1
            self._raise_to(depth, result)
        self._record(entry, depth)
        return result

    def create_node(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any | None = None,
    ) -> fx.Node:
        """A node of the graph, with the depth of its result."""
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        operation = target if isinstance(target, str) else operation_name(target)
        if kind in ("call_function", "call_method") and not _is_shape(kind, operation, args):
            depth = self._deepest(data_arguments(operation, args, kwargs))
            if is_in_place(operation):
                self._raise_to(depth, args[:1])
        elif kind == "call_module":
            depth = self._deepest((args, kwargs)) + 1
        else:
            depth = 0
        self._depths[node] = depth
        return node

    def _record(self, entry: ModuleEntry, depth: int) -> None:
        call = self._calls.get(entry.index, 0)
        self._calls[entry.index] = call + 1
        self.found[entry.index, call] = len(self.found), depth

    def _deepest(self, values: Any) -> int:
        return max((self._depths.get(node, 0) for node in _nodes_in(values)), default=0)

    def _raise_to(self, depth: int, values: Any) -> None:
        """What was changed in place has the depth of the change, for those who read it afterwards."""
        for node in _nodes_in(values):
            self._depths[node] = max(depth, self._depths.get(node, 0))


def _nodes_in(values: Any) -> Iterator[fx.Node]:
    if isinstance(values, fx.Proxy):
        yield values.node
    elif isinstance(values, fx.Node):
        yield values
    elif isinstance(values, slice):
        yield from _nodes_in((values.start, values.stop, values.step))
    elif isinstance(values, Mapping):
        yield from _nodes_in(tuple(values.values()))
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _nodes_in(value)
    elif dataclasses.is_dataclass(values) and not isinstance(values, type):
        yield from _nodes_in(tuple(vars(values).values()))


def _is_shape(kind: str, operation: str, args: tuple[Any, ...]) -> bool:
    if kind == "call_method":
        return operation in _SHAPE_METHODS
    return operation == "getattr" and args[1] in _SHAPE_ATTRIBUTES

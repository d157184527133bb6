"""Sees every ReLU-like call of a forward pass, module or function, and which layer its input comes from."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..analyze.marks import RELU_LIKE
from ..collect.compiled import EAGER, compiler_is_loaded
from ..collect.modules import ModuleIndex
from ..collect.operations import operation_name

_FUNCTIONS = frozenset({"relu", "relu_", "relu6", "threshold", "threshold_"}) | {
    "hardswish",
    "hardsigmoid",
    "hardshrink",
    "softshrink",
}
# What is the same as relu where its lower limit is 0.
_CLAMPS = frozenset({"clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_"})
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Each unit stays where it was.
_BETWEEN = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.dropout._DropoutNd,
    nn.Identity,
)

#: Path of the module in which the call is, its kind, and which of its calls in a forward pass.
Place = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Origin:
    """What made a tensor: a layer with weights, and what normalised its output since. `axis` tells units apart."""

    source: str
    between: tuple[str, ...]
    axis: int


@dataclass(slots=True)
class Fired:
    """Of each unit of one call, over all samples so far: how many values it gave, and how many were not zero.

    `origin`: what feeds it, None where that is not known. `consistent`: whether it had as many units each time.
    """

    values: int
    nonzero: torch.Tensor
    origin: Origin | None
    consistent: bool = True


class DeadWatch(TorchFunctionMode):
    """Counts, while it is entered, in how many values each unit behind a ReLU-like call is not zero.

    `fired` holds them in the order in which they first ran: each after all that its input comes from.
    `scripted`: the modules that cannot be looked into.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.fired: dict[Place, Fired] = {}
        self.source_calls: dict[str, int] = {}
        self.scripted: list[str] = []
        self._index = ModuleIndex(model)
        self._running: list[tuple[str, bool]] = []
        self._calls: dict[tuple[str, str], int] = {}
        # By id, with a reference that tells whether it is still that tensor: nothing is kept alive.
        self._origins: dict[int, tuple[weakref.ref[torch.Tensor], Origin]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward passes inside the block."""
        with ExitStack() as stack:
            if compiler_is_loaded():  # compiled code runs no hook
                EAGER.take()
                stack.callback(EAGER.release)
            for module in self._index.modules():
                entry = self._index.entry(module)
                if isinstance(module, torch.jit.ScriptModule):
                    # It takes no hook, and calls no function that could be seen.
                    self.scripted.append("(model)" if entry is None or not entry.name else entry.name)
                elif entry is not None:
                    before = module.register_forward_pre_hook(self._before(entry.name))
                    after = module.register_forward_hook(self._after(entry.name, entry.type), always_call=True)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            stack.enter_context(self)
            yield

    def next_batch(self) -> None:
        """Say that another forward pass begins."""
        self._calls.clear()
        self._origins.clear()
        self._running.clear()
        self.source_calls.clear()

    def _before(self, name: str) -> Any:
        def before(module: nn.Module, inputs: Any) -> None:
            self._running.append((name, _is_relu(module)))

        return before

    def _after(self, name: str, kind: str) -> Any:
        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._running:
                self._running.pop()
            if not isinstance(output, torch.Tensor):
                return
            given = inputs[0] if inputs and isinstance(inputs[0], torch.Tensor) else None
            with torch._C.DisableTorchFunction():
                if _is_relu(module):
                    self._count(name, kind, given, output)
                elif isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
                    self.source_calls[name] = self.source_calls.get(name, 0) + 1
                    self._remember(output, Origin(name, (), _unit_axis(module, output)))
                elif isinstance(module, _BETWEEN):
                    self._pass_on(module, name, given, output)

        return after

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.get("input")
        output = function(*args, **kwargs)
        name = operation_name(function)
        inside_relu = bool(self._running) and self._running[-1][1]
        if not inside_relu and isinstance(output, torch.Tensor) and _is_relu_call(name, args, kwargs):
            where = self._running[-1][0] if self._running else ""
            self._count(where, name.rstrip("_"), given, output)
        return output

    def _count(self, where: str, kind: str, given: torch.Tensor | None, output: torch.Tensor) -> None:
        if not output.is_floating_point() or output.dim() == 0:
            return
        call = self._calls[where, kind] = self._calls.get((where, kind), -1) + 1
        origin = None if given is None else self._origin(given)
        axis = _usual_axis(output) if origin is None else origin.axis
        others = [dimension for dimension in range(output.dim()) if dimension != axis % output.dim()]
        found = output != 0
        nonzero = found.sum(dim=others) if others else found.long()
        values = output.numel() // max(1, len(nonzero))
        known = self.fired.get((where, kind, call))
        if known is None:
            self.fired[where, kind, call] = Fired(values, nonzero, origin)
        elif known.nonzero.shape != nonzero.shape:
            known.consistent = False
        else:
            known.values += values
            known.nonzero += nonzero
            known.origin = origin if origin == known.origin else None

    def _remember(self, tensor: torch.Tensor, origin: Origin) -> None:
        self._origins[id(tensor)] = (weakref.ref(tensor), origin)

    def _origin(self, tensor: torch.Tensor) -> Origin | None:
        known = self._origins.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _pass_on(self, module: nn.Module, name: str, given: torch.Tensor | None, output: torch.Tensor) -> None:
        origin = None if given is None else self._origin(given)
        if origin is None:
            return
        passed = isinstance(module, (nn.modules.dropout._DropoutNd, nn.Identity))
        between = origin.between if passed else (*origin.between, name)
        self._remember(output, Origin(origin.source, between, origin.axis))


def _is_relu(module: nn.Module) -> bool:
    return any(kind.__name__ in RELU_LIKE for kind in type(module).__mro__)


def _is_relu_call(name: str, args: Any, kwargs: Any) -> bool:
    if name in _FUNCTIONS:
        return True
    if name not in _CLAMPS:
        return False
    least = args[1] if len(args) > 1 else kwargs.get("min")
    return isinstance(least, (int, float)) and least == 0


def _unit_axis(module: nn.Module, output: torch.Tensor) -> int:
    """The axis of a layer's output that tells its units apart, counted from the end."""
    if isinstance(module, nn.Linear):
        return -1
    assert isinstance(module, _CONVOLUTIONS)
    return -1 - len(module.kernel_size)


def _usual_axis(output: torch.Tensor) -> int:
    """The same where it is not known what made the output: the last of vectors and sequences, else that of channels."""
    return -1 if output.dim() <= 3 else 1

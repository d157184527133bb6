"""Random training loops for random models, and an oracle: the same loop on a model that is not checkpointed.

The oracle keeps a copy of every output when it is returned, and asks `torch.autograd.grad` for the gradient at the
place in the graph where it was made: what happens to the tensor afterwards has no part in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz_models import TIME, WIDTH, Checkpointed, Frozen, Trip, make_model
from model_cases import leaves
from tap_oracle import _replace
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import statsbridge

Key = tuple[str, int, str]  # module, call, path of the output


@dataclass
class Output:
    """What came out of one call at one place: values and gradients of all passes of a step."""

    values: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    view: bool = False
    owned: bool = False  # a view of all of a base that a childless module made for it alone: its gradient is known
    unknown: bool = (
        False  # its gradient: a view that was changed later: the graph does not keep the place of what it was
    )


@dataclass
class Step:
    """What is known of one step when the optimizers are about to run, and after."""

    loss: Tensor
    outputs: dict[Key, Output]
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    updates: dict[str, Tensor]
    moving: set[str]
    start: dict[str, Tensor]  # parameters and buffers before the first pass


@dataclass(frozen=True)
class Loop:
    """How one model is trained; all from the seed."""

    seed: int
    steps: int
    every: int
    micro: int
    clip: float | None
    validate: str  # never, between, inside
    optimizers: int
    kind: str
    interrupt: type[BaseException] | None
    thaw: bool
    wrapped: bool
    to_none: bool

    @classmethod
    def of(cls, seed: int) -> Loop:
        chance = random.Random(f"loop {seed}")
        return cls(
            seed=seed,
            steps=chance.randint(2, 4),
            every=chance.choice([1, 1, 2]),
            micro=chance.choice([1, 1, 2, 3]),
            clip=chance.choice([None, None, 0.1, 10.0]),
            validate=chance.choice(["never", "between", "inside"]),
            optimizers=chance.choice([1, 1, 2]),
            kind=chance.choice(["SGD", "momentum", "Adam"]),
            interrupt=chance.choice([None, None, RuntimeError, KeyboardInterrupt]),
            thaw=chance.random() < 0.3,
            wrapped=chance.random() < 0.15,
            to_none=chance.random() < 0.8,
        )


class Oracle:
    """Records the outputs of a model by hooks of its own."""

    def __init__(self, model: nn.Module, clone_views: bool) -> None:
        self.outputs: dict[Key, Output] = {}
        self._clone_views = clone_views
        self._calls: dict[str, int] = {}
        self._pending: list[tuple[Key, Tensor, Any, Tensor | None, bool]] = []
        self._wanted: list[tuple[Key, Any]] = []
        self._versions: list[tuple[Key, Tensor, int]] = []  # of views in the pass that is running
        self._views: list[tuple[Key, Tensor, int]] = []
        model.register_forward_pre_hook(self._start)
        for name, module in model.named_modules():
            module.register_forward_hook(self._after(name), with_kwargs=True)
        model.register_forward_hook(self._end)
        self._model = model

    def backward(self, loss: Tensor) -> None:
        for key, view, version in self._views:
            self.outputs[key].unknown = self.outputs[key].unknown or view._version != version
        self._views = []
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        wanted, self._wanted = self._wanted, []
        edges = [edge for _, edge in wanted]
        found = torch.autograd.grad(loss, [*edges, *parameters], allow_unused=True)
        for (key, _), gradient in zip(wanted, found, strict=False):
            if gradient is not None:
                self.outputs[key].gradients.append(gradient.detach().clone())
        for parameter, gradient in zip(parameters, found[len(edges) :], strict=True):
            if gradient is not None:
                parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient

    def take(self) -> dict[Key, Output]:
        outputs, self.outputs = self.outputs, {}
        return outputs

    def _start(self, _module: nn.Module, _args: Any) -> None:
        self._calls, self._pending, self._versions = {}, [], []

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, keywords: Any, output: Any) -> Any:
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            cloned: list[bool] = []
            given = [x for x in (*args, *keywords.values()) if isinstance(x, Tensor)]
            bases = [id(tensor._base) for tensor in leaves(output)]

            def note(path: str, tensor: Tensor) -> Tensor:
                view = tensor if tensor._base is not None else None
                base = tensor._base
                owned = (
                    base is not None
                    and next(module.children(), None) is None
                    and base.numel() == tensor.numel()
                    and bases.count(id(base)) == 1
                    and not any(base is x or base is x._base for x in given)
                )
                if view is not None and self._clone_views and not any(tensor is x for x in given):
                    tensor = tensor.clone()  # nobody else holds it: its gradient is that of the view
                    cloned.append(True)
                # A view made under no_grad says that it requires a gradient, has no node and gets none.
                has_node = tensor.requires_grad and (torch.is_grad_enabled() or tensor.grad_fn is not None)
                edge = get_gradient_edge(tensor) if has_node and tensor.is_floating_point() else None
                self._pending.append(((name, call, path), tensor.detach().clone(), edge, view, owned))
                if view is tensor:
                    self._versions.append(((name, call, path), tensor, tensor._version))
                return tensor

            replaced = _replace(output, "", note)
            return replaced if cloned else None

        return hook

    def _end(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        for key, value, edge, view, owned in self._pending:
            output = self.outputs.setdefault(key, Output())
            output.values.append(value)
            output.owned = owned and (output.owned or not output.view)
            output.view = output.view or view is not None
            if edge is not None:
                self._wanted.append((key, edge))
        self._views += self._versions


Backward = Callable[[Tensor], None]


def make_optimizers(loop: Loop, model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    half = len(parameters) // 2
    groups = [parameters] if loop.optimizers == 1 else [parameters[:half], parameters[half:]]
    if loop.kind == "Adam":
        return [torch.optim.Adam(group, lr=1e-3) for group in groups]
    momentum = 0.9 if loop.kind == "momentum" else 0.0
    return [torch.optim.SGD(group, lr=1e-2, momentum=momentum) for group in groups]


def train(
    loop: Loop,
    start: Callable[[nn.Module], statsbridge.Run] | None = None,
    oracle: Callable[[nn.Module], Oracle] | None = None,
    follow: list[Step] | None = None,
) -> tuple[list[Step], dict[str, Any]]:
    """The steps of a loop, and what the model is at its end.

    `follow`: begin each step where this other training began it, so that what is rounded differently stays small.
    """
    model, time = make_model(loop.seed)
    watching = None if oracle is None else oracle(model)
    if watching is not None:
        _never_checkpoint(model)
    called = nn.DataParallel(model) if loop.wrapped else model
    optimizers = make_optimizers(loop, model)
    run = None if start is None else start(called)
    steps = []
    torch.manual_seed(loop.seed)
    for number in range(loop.steps):
        if loop.thaw and number == 1:
            _thaw(model)
        if follow is not None:
            model.load_state_dict(follow[number].start)
        begin = {name: value.clone() for name, value in model.state_dict().items()}
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=loop.to_none)
        if loop.interrupt is not None and number == 1:
            _interrupt(called, loop.interrupt, time)
        total = torch.zeros(())
        for micro in range(loop.micro):
            loss = called(_input(time)).square().mean() / loop.micro
            (Tensor.backward if watching is None else watching.backward)(loss)
            total = total + loss.detach()
            if micro == 0:
                _validate(called, time, loop.validate == "inside")
        if loop.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        steps.append(_before(model, total, watching, begin))
        for optimizer in optimizers:
            optimizer.step()
        steps[-1].updates.update(_moved(model, steps[-1].parameters))
        if run is not None:
            run.step(loss=total)
        _validate(called, time, loop.validate == "between")
    if run is not None:
        run.finish()
    return steps, {name: value.clone() for name, value in model.state_dict().items()}


def _never_checkpoint(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Checkpointed):
            module.enabled = False


def _thaw(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Frozen):
            module.requires_grad_(True)


def _interrupt(model: nn.Module, error: type[BaseException], time: bool) -> None:
    trip = next(module for module in model.modules() if isinstance(module, Trip))
    trip.armed = error
    try:
        model(_input(time))
    except (RuntimeError, KeyboardInterrupt):
        trip.armed = None


def _moved(model: nn.Module, before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def _input(time: bool) -> Tensor:
    return torch.randn(4, TIME, WIDTH) if time else torch.randn(4, WIDTH)


def _validate(model: nn.Module, time: bool, wanted: bool) -> None:
    if not wanted:
        return
    model.eval()
    with torch.no_grad():
        model(_input(time))
    model.train()


def _before(model: nn.Module, loss: Tensor, watching: Oracle | None, start: dict[str, Tensor]) -> Step:
    named = dict(model.named_parameters())
    return Step(
        loss=loss,
        outputs={} if watching is None else watching.take(),
        parameters={name: p.detach().clone() for name, p in named.items()},
        gradients={name: None if p.grad is None else p.grad.clone() for name, p in named.items()},
        updates={},
        moving={name for name, p in named.items() if p.requires_grad or p.grad is not None},
        start=start,
    )

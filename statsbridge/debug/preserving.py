"""A block after which model, optimizers, random generators and loaders are exactly as they were before it."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..collect.suspended import suspended
from ..collect.untouched import untouched
from ..errors import ConfigError


@contextmanager
def preserved(model: nn.Module, *optimizers: Optimizer, also: Iterable[Any] = ()) -> Iterator[None]:
    """Whatever runs inside, afterwards all is as it was before, to the bit: also where it raises or is interrupted.

    Put back are, of the model and of every module in `also`: its parameters (the same objects), buffers, other
    tensors and attributes, the training mode of each of its modules, `requires_grad`, and the gradients (the same
    tensors, or None), which are away inside the block. Of the optimizers: their state, parameter groups and
    attributes. Of the process: the random generators of Python, NumPy and torch, on all devices in use. `also` may
    hold further modules, generators (torch's or NumPy's), DataLoaders (whose generators and workers are kept) and
    batches, whose tensors are put back.

    No open run records what happens inside, in this thread. One copy of all those tensors is held meanwhile. Use it
    between training steps: a backward pass through a graph made before the block may find its tensors changed.

    Raises ConfigError where the model is no module, or has parameters whose shape is not known yet.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    others = list(also)
    modules = [model, *(other for other in others if isinstance(other, nn.Module))]
    for module in modules:
        lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
        if lazy:
            raise ConfigError(f"{lazy[0]} has no shape yet: call the model once with a batch before this test")
    # One container of all of them, so that what they share is copied once.
    together = nn.ModuleList(modules)
    _reshard(together)
    held = [parameter for optimizer in optimizers for parameter in _parameters(optimizer)]
    states = [[list(optimizer.state.values()), optimizer.param_groups] for optimizer in optimizers]
    rest = [other for other in others if not isinstance(other, (nn.Module, DataLoader))]
    with ExitStack() as stack:
        stack.enter_context(suspended())
        _keep_generators(stack, others)
        inner = _containers([*map(_attributes, together.modules()), states])
        # `untouched` itself looks at what modules hold directly.
        stack.enter_context(untouched(together, [states, rest, [list(_contents(one)) for one in inner]]))
        for container in inner:
            stack.callback(_refill, container, copy.copy(container))
        stack.callback(_reshard, together)
        stack.enter_context(_requirements([*together.parameters(), *held]))
        for part in together.modules():
            # Those of a ScriptModule are no attributes of its own.
            stack.callback(setattr, part, "training", part.training)
        for optimizer in optimizers:
            stack.enter_context(_optimizer(optimizer))
        for loader in (other for other in others if isinstance(other, DataLoader)):
            stack.enter_context(_workers(loader))
        yield


@contextmanager
def same_chance(*others: Any) -> Iterator[None]:
    """The random generators of the process, and those of loaders and generators given, are as before afterwards."""
    drawn_from = (DataLoader, torch.Generator, np.random.Generator)
    with preserved(nn.Module(), also=[other for other in others if isinstance(other, drawn_from)]):
        yield


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that a loader, its sampler and its batch sampler draw from."""
    batches = getattr(loader, "batch_sampler", None)
    places = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = (getattr(place, "generator", None) for place in places)
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _reshard(module: nn.Module) -> None:
    """What `fully_shard` has gathered for a forward pass is given back: its shards are the parameters to keep.

    Shards put into the modules while it takes them for gathered would end the next forward pass with an error.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


_KEPT = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque)
_DEEPEST = 16


def _attributes(module: nn.Module) -> Any:
    return () if isinstance(module, torch.jit.ScriptModule) else tuple(vars(module).values())


def _containers(values: Iterable[Any]) -> list[Any]:
    """The lists, dicts, sets and deques among these values and inside one another, each once."""
    found: dict[int, Any] = {}
    level = list(values)
    for _ in range(_DEEPEST):
        once = {id(value): value for value in level if isinstance(value, tuple) or type(value) in _KEPT}
        level = [value for value in once.values() if id(value) not in found]
        found |= {id(value): value for value in level if not isinstance(value, tuple)}
        level = [child for value in level for child in _contents(value)]
    return list(found.values())


def _contents(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if isinstance(container, (list, collections.deque)) else container.update(content)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _keep_generators(stack: ExitStack, others: list[Any]) -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
    for other in others:
        for generator in generators_of(other) if isinstance(other, DataLoader) else [other]:
            if isinstance(generator, torch.Generator):
                stack.callback(generator.set_state, generator.get_state())
            elif isinstance(generator, np.random.Generator):
                stack.callback(setattr, generator.bit_generator, "state", generator.bit_generator.state)


@contextmanager
def _requirements(parameters: list[torch.Tensor]) -> Iterator[None]:
    """`requires_grad`, and the gradients of parameters that are no module's."""
    before = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, needed, gradient in before:
            parameter.requires_grad_(needed)
            parameter.grad = gradient


@contextmanager
def _optimizer(optimizer: Optimizer) -> Iterator[None]:
    """What an optimizer holds; the values of the tensors in its state are kept elsewhere."""
    attributes = dict(vars(optimizer))
    state = [(parameter, values, _shallow(values)) for parameter, values in optimizer.state.items()]
    groups = [(group, dict(group), list(group["params"])) for group in optimizer.param_groups]
    states, listed = optimizer.state, optimizer.param_groups
    try:
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        states.clear()
        for parameter, values, content in state:
            if isinstance(values, dict):
                values.clear()
                values.update(content)
            states[parameter] = values
        listed[:] = [group for group, _, _ in groups]
        for group, content, parameters in groups:
            group.clear()
            group.update(content)
            group["params"][:] = parameters


def _shallow(values: Any) -> Any:
    return dict(values) if isinstance(values, dict) else values


@contextmanager
def _workers(loader: DataLoader[Any]) -> Iterator[None]:
    """Persistent workers in the middle of an epoch go on where they were: the block gets workers of its own."""
    before = loader._iterator
    loader._iterator = None
    try:
        yield
    finally:
        loader._iterator = before

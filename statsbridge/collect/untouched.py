"""A forward pass that leaves no trace: what it changes in a model, its inputs and the generators is put back."""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from .outputs import tensors_in

_CONTAINERS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque)


@contextmanager
def untouched(model: nn.Module, inputs: object) -> Iterator[None]:
    """Whatever runs inside, afterwards all is as it was before.

    Restored are the values of parameters, buffers, other tensors that modules hold, and tensors in `inputs`; the
    gradients of parameters, which are away meanwhile; the attributes of modules, and lists, dicts and sets among
    them; the random generators of Python, NumPy and torch, on all devices in use. One copy of all those tensors is
    held meanwhile. What an object of another kind changes inside itself is not undone.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    attributes = [(module, dict(vars(module))) for module in modules]
    held = [value for _, values in attributes for value in values.values()]
    containers = [(value, copy.copy(value)) for value in held if type(value) in _CONTAINERS]
    tensors = _distinct([*model.parameters(), *model.buffers(), *held, *(tensor for _, tensor in tensors_in(inputs))])
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    with ExitStack() as generators:
        _keep_generators(generators, tensors)
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for module, before in attributes:
                vars(module).clear()
                vars(module).update(before)
            for container, content in containers:
                _refill(container, content)
            for tensor, value in values:
                _write(tensor, value)
            for parameter in model.parameters():
                parameter.grad = None
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _distinct(values: list[Any]) -> list[torch.Tensor]:
    return list({id(value): value for value in values if isinstance(value, torch.Tensor)}.values())


def _keep_generators(generators: ExitStack, tensors: list[torch.Tensor]) -> None:
    generators.callback(random.setstate, random.getstate())
    generators.callback(np.random.set_state, np.random.get_state())
    places: dict[str, set[int]] = {}
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            places.setdefault(tensor.device.type, set()).add(tensor.device.index or 0)
    generators.enter_context(torch.random.fork_rng(devices=[]))
    for kind, indices in places.items():
        generators.enter_context(torch.random.fork_rng(devices=sorted(indices), device_type=kind))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if isinstance(container, (list, collections.deque)) else container.update(content)


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.is_meta:
        return
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape == value.shape and tensor.dtype == value.dtype:
            # Not `tensor.copy_`: an unchanged value must not look changed to a graph that the user holds.
            tensor.data.copy_(value)
        else:
            tensor.data = value

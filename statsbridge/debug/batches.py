"""Batches of any structure: copied, moved, counted, cut; and how a model and a loss are called with one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from ..collect.outputs import tensors_in
from ..errors import ConfigError
from .preserving import same_chance

#: `loss(model, batch)` gives one number; or a criterion, called `loss(model(inputs), targets)`.
Loss = Callable[..., torch.Tensor] | nn.Module

_DEEPEST = 16
_CALLED = (
    "statsbridge called this as loss(model, batch). A function of outputs and targets has to be an nn.Module or one of "
    "torch.nn.functional; wrap any other: lambda model, batch: criterion(model(batch[0]), batch[1])"
)
_CRITERIA = ("torch.nn.functional", "torch._C._nn")


def is_criterion(loss: Loss) -> bool:
    """Whether the loss compares outputs with targets: an `nn.Module`, or a function of `torch.nn.functional`.

    Of a `functools.partial` its function counts. Anything else is called as `loss(model, batch)`.
    """
    function = loss.func if isinstance(loss, partial) else loss
    return isinstance(function, nn.Module) or getattr(function, "__module__", None) in _CRITERIA


def loss_value(model: nn.Module, loss: Loss, batch: Any) -> torch.Tensor:
    """The loss of the model for a batch, as a tensor with one element.

    `loss` is a callable `loss(model, batch)`. A criterion (an `nn.Module` such as `nn.CrossEntropyLoss()`, or a
    function of `torch.nn.functional`) is called as `loss(model(inputs), targets)` with a batch of just these two;
    inputs in a tuple or list are given to the model one by one, in a dict by name.

    Raises ConfigError where the loss is not callable, the batch of a criterion is no pair, or what comes out is not
    one floating-point number. What model and loss raise themselves passes through.
    """
    if not callable(loss):
        raise ConfigError(
            f"loss is a {type(loss).__name__}: give a callable loss(model, batch), or a criterion such as "
            "torch.nn.CrossEntropyLoss()"
        )
    if is_criterion(loss):
        inputs, targets = pair(batch)
        value = loss(call_model(model, inputs), targets)
    else:
        try:
            value = loss(model, batch)
        except (AttributeError, TypeError) as error:
            error.add_note(_CALLED)
            raise
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"loss gave a {type(value).__name__}: it has to return a torch tensor with one element")
    if value.numel() != 1 or not value.is_floating_point():
        raise ConfigError(
            f"loss gave a tensor of shape {list(value.shape)} and {value.dtype}: it has to return one floating-point "
            "number; take its mean() or sum()"
        )
    return value.reshape(())


def pair(batch: Any) -> tuple[Any, Any]:
    """Inputs and targets of a batch for a criterion. Raises ConfigError where it is no pair."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and not isinstance(batch, PackedSequence):
        return batch[0], batch[1]
    size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    raise ConfigError(
        f"the batch is a {type(batch).__name__}{size}: a criterion needs a pair (inputs, targets); for any other "
        "batch give loss as a callable loss(model, batch)"
    )


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with inputs: those in a plain tuple or list one by one, those in a mapping by name."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if type(inputs) in (tuple, list):
        return model(*inputs)
    return model(inputs)


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with every tensor replaced by `function(tensor)`, in new containers of the same kinds.

    Goes into tuples, named tuples, lists, mappings, dataclasses and PackedSequences (of which only the data are
    mapped), at most 16 levels deep; anything else is taken as it is.
    """
    return _mapped(batch, function, 0)


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    inner = partial(_mapped, function=function, depth=depth + 1)
    made = value
    if depth >= _DEEPEST:
        pass
    elif isinstance(value, PackedSequence):
        made = value._replace(data=function(value.data))
    elif isinstance(value, MutableMapping):
        made = copy.copy(value)
        for key, child in list(value.items()):
            made[key] = inner(child)
    elif isinstance(value, Mapping):
        made = {key: inner(child) for key, child in value.items()}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        made = type(value)(*map(inner, value))
    elif isinstance(value, (tuple, list)):
        made = type(value)(map(inner, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for part in dataclasses.fields(value):
            if hasattr(value, part.name):
                # Past the __setattr__ of a frozen dataclass: the copy is ours.
                object.__setattr__(made, part.name, inner(getattr(value, part.name)))
    return made


def fresh(batch: Any, device: torch.device | None = None) -> Any:
    """A copy of the batch with tensors of its own, on `device` where one is given.

    A loss that changes its batch in place, or takes keys out of it, finds it whole at the next evaluation.
    """

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.detach().to(device, copy=True) if device is not None else tensor.detach().clone()
        return own.requires_grad_(tensor.requires_grad)

    made = map_tensors(batch, copied)
    return made


def device_of(model: nn.Module) -> torch.device | None:
    """The device that all parameters and buffers are on; None where there are none or they are on several."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return devices.pop() if len(devices) == 1 else None


def batch_size(batch: Any) -> int | None:
    """How many samples a batch holds: the length that most of its tensors' first dimensions have; None without one."""
    lengths = [len(tensor) for _, tensor in tensors_in(batch) if tensor.dim() > 0]
    return max(lengths, key=lengths.count) if lengths else None


def given_batch(batch: Any) -> Any:
    """The batch itself; of a DataLoader its first one."""
    return first_batch(batch) if isinstance(batch, DataLoader) else batch


def first_batch(batches: Any) -> Any:
    """The first batch of a loader, whose generators and those of the process are as before.

    Raises ConfigError where it has none, or is an iterator that it would be lost to.
    """
    with same_chance(batches):
        for batch in checked_loader(batches):
            return batch
    raise ConfigError("the loader gives no batch: its data set is empty, or smaller than a batch with drop_last=True")


def checked_loader(batches: Any) -> Iterable[Any]:
    """The loader, where it can be gone through more than once. Raises ConfigError otherwise."""
    if isinstance(batches, Iterator):
        raise ConfigError(
            f"loader is a {type(batches).__name__}, which can be read only once: give the DataLoader (or a list of "
            "batches) itself, not iter() of it"
        )
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise ConfigError(f"loader is a {type(batches).__name__}: give a DataLoader or another iterable of batches")
    return batches  # type: ignore[no-any-return]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """The model in training mode, its dropout modules in evaluation mode; the modes are as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def with_gradients() -> Iterator[None]:
    """Gradients are computed inside, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.enable_grad():
        yield

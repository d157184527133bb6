"""A model's loss as an exact function of its parameters: in float64, and by the same chance at every evaluation."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode

from .batches import Loss, device_of, fresh, loss_value, map_tensors, with_gradients
from .optimizers import trainable


@contextmanager
def float64_by_default() -> Iterator[None]:
    """What the model makes by itself, such as zeros to begin with, is float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_RAISED = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class _NoLowerPrecision(TorchFunctionMode):
    """What a model would convert to a lower precision, or make in one, is float64: its logits before a loss, a mask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return torch.Tensor.double(args[0])
        if func is torch.Tensor.cfloat:  # type: ignore[attr-defined]
            return args[0].to(torch.complex128)
        raised = [_raised_dtype(value) for value in args]
        named = {name: _raised_dtype(value) for name, value in (kwargs or {}).items()}
        return func(*raised, **named)


class Exact:
    """The loss as a function of the parameters: of a float64 copy of the model, with the same chance every time."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Any) -> None:
        self._loss: Loss = loss
        if isinstance(loss, nn.Module):  # together with the model, with which it may share parameters
            self.model, criterion = copy.deepcopy((model, loss), _results_in(model, loss))
            self._loss = criterion._apply(_in_double)  # type: ignore[no-untyped-call]
        else:
            self.model = copy.deepcopy(model, _results_in(model))
        self.model._apply(_in_double)  # type: ignore[no-untyped-call]
        for part in self.model.modules():
            _keep_still(part)
        for parameter in self.model.parameters():
            # The copy of a scripted module's is computed from it, so that its gradient would go there.
            if not parameter.is_leaf:
                parameter.detach_().requires_grad_()
        self._batch = map_tensors(fresh(batch, device_of(model)), _doubled)
        self.parameters = trainable(self.model)
        self._devices = {parameter.device.type for parameter in self.model.parameters()} - {"cpu", "meta"}
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]

    def value(self) -> float:
        """The loss."""
        with with_gradients():  # a model may take gradients of its own
            return float(self._evaluate().detach())

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Of each parameter its gradient by autograd; None where there is none."""
        with with_gradients():
            value = self._evaluate()
            self.model.zero_grad(set_to_none=True)
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
        return {
            name: None if parameter.grad is None else parameter.grad.detach().to_dense().clone()
            for name, parameter in self.parameters.items()
        }

    @contextmanager
    def moving(self, name: str, direction: torch.Tensor) -> Iterator[Any]:
        """A function of the distance that one parameter is moved along a direction; it is back afterwards.

        Of a complex parameter the direction has a last axis of two: its real and its imaginary part.
        """
        parameter = self.parameters[name]
        direction = torch.view_as_complex(direction) if parameter.is_complex() else direction
        base = parameter.detach().clone()

        def at(distance: float) -> float:
            parameter.data.copy_(base + distance * direction)
            return self.value()

        try:
            yield at
        finally:
            parameter.data.copy_(base)

    def _evaluate(self) -> torch.Tensor:
        for buffer, value in self._buffers:
            buffer.data.copy_(value)
        _seed_torch(self._devices)
        np.random.seed(0)
        random.seed(0)
        with _NoLowerPrecision():
            return loss_value(self.model, self._loss, map_tensors(self._batch, torch.clone))


def _results_in(*modules: nn.Module) -> dict[int, Any]:
    """What `copy.deepcopy` takes for tensors that modules keep of their last forward pass and that it cannot copy."""
    parts = [part for module in modules for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    kept = [value for part in parts for value in vars(part).values() if isinstance(value, torch.Tensor)]
    return {id(value): value.detach().clone() for value in kept if not value.is_leaf}


def _keep_still(module: nn.Module) -> None:
    """A spectral norm takes no step of its power iteration, whose vectors its gradient takes for constants."""
    hooks = getattr(module, "_forward_pre_hooks", {}).values()
    if isinstance(module, parametrizations._SpectralNorm) or any(isinstance(one, SpectralNorm) for one in hooks):
        module.training = False


def _seed_torch(devices: set[str]) -> None:
    """The generators in use. `torch.manual_seed` would also seed those of a GPU that is used only after the test."""
    torch.default_generator.manual_seed(0)
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    for kind in devices | ({"cuda"} if in_use else set()):
        of_kind = torch.get_device_module(kind)
        getattr(of_kind, "manual_seed_all", of_kind.manual_seed)(0)


def _raised_dtype(value: Any) -> Any:
    return _RAISED.get(value, value) if isinstance(value, torch.dtype) else value


def _in_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_RAISED.get(tensor.dtype, tensor.dtype))


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return _in_double(tensor.detach()).requires_grad_(tensor.requires_grad)

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


_LOWER = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class _NoLowerPrecision(TorchFunctionMode):
    """What a model would convert to a lower precision, or make in one, is float64: its logits before a loss, a mask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return torch.Tensor.double(args[0])
        raised = [torch.float64 if any(value is one for one in _LOWER) else value for value in args]
        named = {
            name: torch.float64 if any(value is one for one in _LOWER) else value
            for name, value in (kwargs or {}).items()
        }
        return func(*raised, **named)


class Exact:
    """The loss as a function of the parameters: of a float64 copy of the model, with the same chance every time."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Any) -> None:
        self._loss: Loss = loss
        if isinstance(loss, nn.Module):  # together with the model, with which it may share parameters
            self.model, criterion = copy.deepcopy((model, loss))
            self._loss = criterion.double()
        else:
            self.model = copy.deepcopy(model)
        self.model.double()
        self._batch = map_tensors(fresh(batch, device_of(model)), _doubled)
        self.parameters = trainable(self.model)
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
        """A function of the distance that one parameter is moved along a direction; it is back afterwards."""
        parameter = self.parameters[name]
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
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        with _NoLowerPrecision():
            return loss_value(self.model, self._loss, map_tensors(self._batch, torch.clone))


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)

"""Everything about a model and its surroundings that a test of the toolkit has to leave as it found it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader


def bits(value: Any) -> Any:
    """A value, with every tensor in it as its identity, type, shape and bytes."""
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        gradient = value.grad if value.is_leaf else None
        return id(value), value.dtype, tuple(value.shape), content, value.requires_grad, bits(gradient)
    if isinstance(value, dict):
        return [(bits(key), bits(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return [bits(inner) for inner in value]
    return value if isinstance(value, (int, float, str, bytes, bool, type(None))) else id(value)


def everything(model: nn.Module, *optimizers: Optimizer, loaders: Iterable[DataLoader[Any]] = ()) -> dict[str, Any]:
    """What `preserved` promises to put back, to compare before and after."""
    generators = [
        generator
        for loader in loaders
        for generator in (loader.generator, getattr(loader.sampler, "generator", None))
        if isinstance(generator, torch.Generator)
    ]
    name, keys, *rest = np.random.get_state()
    return {
        "parameters": [(name, bits(parameter)) for name, parameter in model.named_parameters()],
        "buffers": [(name, bits(buffer)) for name, buffer in model.named_buffers()],
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "attributes": [(name, sorted(vars(module))) for name, module in model.named_modules()],
        "optimizers": [
            (bits(dict(one.state)), bits(one.param_groups), sorted(vars(one)), id(one.state)) for one in optimizers
        ],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (name, np.asarray(keys).tobytes(), rest),
        "python": random.getstate(),
        "generators": [generator.get_state().numpy().tobytes() for generator in generators],
        "default type": torch.get_default_dtype(),
        "gradients on": torch.is_grad_enabled(),
    }


class Everyday(nn.Module):
    """Batch norm, dropout, a frozen layer, a tied weight and a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.3)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.last = nn.Linear(16, 3)
        self.tied = nn.Linear(16, 3)
        self.tied.weight = self.last.weight
        self.seen = torch.zeros(2)
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1  # a model that keeps count of its calls, in place
        self.calls.append(len(x))
        hidden = torch.relu(self.norm(self.first(x)))
        hidden = self.dropout(torch.relu(self.frozen(hidden)))
        return self.last(hidden) + self.tied(hidden)


def in_use(make: Any = torch.optim.Adam) -> tuple[Everyday, Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    """A model in the middle of its training: with gradients, an optimizer's state, and one part in evaluation mode."""
    torch.manual_seed(0)
    model = Everyday()
    optimizer: Optimizer = make((one for one in model.parameters() if one.requires_grad), lr=0.01)
    batch = (torch.randn(12, 8), torch.randint(0, 3, (12,)))
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    model.frozen.eval()
    model.first.bias.grad = None
    return model, optimizer, batch

"""The optimizer that a test trains with: the user's own, one made by a callable, or Adam."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError

#: An optimizer, a callable that makes one from a list of parameters, or None for Adam.
OptimizerChoice = Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None


def checked_optimizer(optimizer: OptimizerChoice) -> OptimizerChoice:
    """The choice itself. Raises ConfigError where it is none, or an optimizer that needs a closure."""
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, Optimizer)):
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}: give a torch optimizer, or a callable that makes one from a "
            "list of parameters, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("optimizer is LBFGS, which evaluates the loss many times a step: give a first-order one")
    return optimizer


def optimizers_in(optimizer: OptimizerChoice) -> list[Optimizer]:
    """The user's own optimizer, whose state has to be kept."""
    return [optimizer] if isinstance(optimizer, Optimizer) else []


def make_optimizer(optimizer: OptimizerChoice, model: nn.Module) -> Optimizer:
    """The optimizer of the choice. Raises ConfigError where the callable makes something else."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    if optimizer is None:
        return torch.optim.Adam(trainable(model).values())
    made = optimizer(list(trainable(model).values()))
    if not isinstance(made, Optimizer):
        raise ConfigError(f"optimizer(parameters) gave a {type(made).__name__}: it has to return a torch optimizer")
    checked_optimizer(made)
    return made


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name. Raises ConfigError where there are none."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise ConfigError("no parameter of the model requires a gradient: there is nothing to train")
    return found


def held_by(optimizer: Optimizer) -> set[int]:
    """The ids of the parameters that an optimizer holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

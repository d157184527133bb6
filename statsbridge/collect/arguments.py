"""What the user gave to `init`, checked: models and optimizers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import inf
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError
from .sampling import LARGEST_LABEL

_OLDEST_TORCH = (2, 6)

#: How the depth of modules is found: traced in the first sampled forward, by torch.fx, or not at all.
ORDERS = ("auto", "fx", "execution")

#: What `resume` is for the newest unfinished run of a name.
AUTO = "auto"


def check_torch() -> None:
    """Raise ConfigError where torch is older than the oldest version that works. Vendors' builds are accepted."""
    parts = torch.__version__.split("+")[0].split(".")
    if tuple(int(part) for part in parts[:2]) < _OLDEST_TORCH:
        raise ConfigError(f"torch {torch.__version__} is too old: statsbridge needs torch >= 2.6; upgrade torch")


def check_models(model: object) -> nn.Module | dict[str, nn.Module]:
    """A module, or a dict of them by name. Raises ConfigError for anything else."""
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, Mapping):
        raise ConfigError(
            f"model is a {_type(model)}: give a torch.nn.Module, or a dict of them such as "
            "{'generator': g, 'discriminator': d}"
        )
    if not model:
        raise ConfigError("model is an empty dict: give at least one torch.nn.Module in it")
    for name, module in model.items():
        if not isinstance(name, str) or not name or "." in name:
            raise ConfigError(f"model: {name!r} cannot name a model: use a text that is not empty and has no dot")
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model[{name!r}] is a {_type(module)}, not a torch.nn.Module")
    return dict(model)


def check_optimizers(optimizer: object, parameters: Iterable[torch.Tensor]) -> list[tuple[str | None, Optimizer]]:
    """Optimizers with the name the user gave (None: their class's).

    Raises ConfigError where one is no optimizer or holds none of the models' parameters.
    """
    if optimizer is None:
        return []
    given: list[tuple[str | None, Any]]
    if isinstance(optimizer, Mapping):
        given = [(str(name), value) for name, value in optimizer.items()]
    elif isinstance(optimizer, list | tuple):
        given = [(None, value) for value in optimizer]
    else:
        given = [(None, optimizer)]
    known = {id(parameter) for parameter in parameters}
    for _, value in given:
        if not isinstance(value, Optimizer):
            raise ConfigError(f"optimizer is a {_type(value)}: give a torch.optim.Optimizer, a list or a dict of them")
        if not any(id(parameter) in known for group in value.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"optimizer {type(value).__name__} holds none of the model's parameters: make it from "
                "model.parameters() after the model is complete, and give init() that same model"
            )
    return given


def check_settings(name: object, config: object, start_step: object, order: object, flush_interval: object) -> None:
    """Raise ConfigError for a setting of the wrong kind, saying which are right."""
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise ConfigError(f"name={name!r}: give a text that is not empty, or None")
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config is a {_type(config)}: give a dict, such as vars(arguments)")
    if isinstance(start_step, bool) or not isinstance(start_step, Integral):
        raise ConfigError(f"start_step={start_step!r}: give a whole number")
    if abs(int(start_step)) > LARGEST_LABEL:
        raise ConfigError(f"start_step={start_step}: give one of at most {LARGEST_LABEL}")
    if order not in ORDERS:
        raise ConfigError(f"order={order!r}: give one of {', '.join(map(repr, ORDERS))}")
    if isinstance(flush_interval, bool) or not isinstance(flush_interval, Real) or not 0 < float(flush_interval) < inf:
        raise ConfigError(f"flush_interval={flush_interval!r}: give a number of seconds above 0")


def check_resume(resume: object, name: object) -> None:
    """Raise ConfigError where it is not said which run to go on with."""
    if resume is not None and (not isinstance(resume, str | os.PathLike) or not str(resume)):
        raise ConfigError(f"resume={resume!r}: give a run's folder, id or name, or {AUTO!r}")
    if resume == AUTO and name is None:
        raise ConfigError(f"resume={AUTO!r} goes on with the newest unfinished run of a name: give name=")


def check_max_bytes(max_bytes: object) -> int | None:
    """A number of bytes, or None. Raises ConfigError for anything else."""
    if max_bytes is None:
        return None
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, Real) or not 0 < float(max_bytes) < inf:
        raise ConfigError(f"max_bytes={max_bytes!r}: give a number of bytes above 0, such as 2e9, or None")
    return int(float(max_bytes))


def _type(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")

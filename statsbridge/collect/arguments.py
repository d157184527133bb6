"""What the user gave to `init`, checked: a ConfigError says what was wrong and what to give."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from math import inf, isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..errors import ConfigError
from ..wording import shown
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
    elif isinstance(optimizer, Iterable) and not isinstance(optimizer, str | bytes | torch.Tensor):
        given = [(None, value) for value in optimizer]
    else:
        given = [(None, optimizer)]
    if any(name is not None and not name.strip() for name, _ in given):
        raise ConfigError("optimizer: an empty name cannot name an optimizer: use a text such as 'generator'")
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
        raise ConfigError(f"name={_told(name)}: give a text that is not empty, or None")
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config is a {_type(config)}: give a dict, such as vars(arguments)")
    if isinstance(start_step, bool) or not isinstance(start_step, Integral):
        raise ConfigError(f"start_step={_told(start_step)}: give a whole number")
    if abs(int(start_step)) > LARGEST_LABEL:
        raise ConfigError(f"start_step={_told(start_step)}: give one of at most {LARGEST_LABEL}")
    if not isinstance(order, str) or order not in ORDERS:
        raise ConfigError(f"order={_told(order)}: give one of {', '.join(map(repr, ORDERS))}")
    seconds = _number(flush_interval)
    if seconds is None or not seconds > 0:
        raise ConfigError(f"flush_interval={_told(flush_interval)}: give a number of seconds above 0")
    if seconds > threading.TIMEOUT_MAX:  # nothing can wait so long
        raise ConfigError(f"flush_interval={_told(flush_interval)}: give at most {threading.TIMEOUT_MAX:.0f} seconds")


def check_flag(argument: str, value: object) -> bool:
    """True or False, of NumPy too. Raises ConfigError for all else: of "no" and 0.5 nobody knows what they mean."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{argument}={_told(value)}: give True or False")
    return bool(value)


def check_grad_scaler(scaler: object) -> GradScaler | None:
    """A GradScaler, or None. Raises ConfigError for anything else."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ConfigError(
            f"grad_scaler is a {_type(scaler)}: give the torch.amp.GradScaler in use, or None and it is found by itself"
        )
    return scaler


def check_folder(folder: object) -> Path:
    """The folder that run folders are made in. Raises ConfigError for what is no path, or an empty one."""
    path = _path(folder)
    if path is None or not path.strip():
        raise ConfigError(
            f"dir={_told(folder)}: give the path of a folder, such as 'statsbridge-runs'; '.' is the current one"
        )
    if not _is_possible(path):
        raise ConfigError(f"dir={_told(folder)}: no folder can have this name; give another one")
    return Path(path)


def check_resume(resume: object, name: object) -> None:
    """Raise ConfigError where it is not said which run to go on with."""
    if resume is None:
        return
    path = _path(resume)
    if path is None or not path.strip() or not _is_possible(path):
        raise ConfigError(f"resume={_told(resume)}: give a run's folder, id or name, or {AUTO!r}")
    if isinstance(resume, str) and resume == AUTO and name is None:
        raise ConfigError(f"resume={AUTO!r} goes on with the newest unfinished run of a name: give name=")


def check_max_bytes(max_bytes: object) -> int | None:
    """A number of bytes, or None. Raises ConfigError for anything else."""
    if max_bytes is None:
        return None
    number = _number(max_bytes)
    if number is None or not number >= 1:
        raise ConfigError(f"max_bytes={_told(max_bytes)}: give a number of bytes above 0, such as 2e9, or None")
    return int(number)


def _number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond floats
        number = inf
    return number if isfinite(number) else None


def _path(value: object) -> str | None:
    """The text of a path; None for what is none, and for one in bytes, which no path of ours can be."""
    if not isinstance(value, str | os.PathLike):
        return None
    path: object = os.fspath(value)
    return path if isinstance(path, str) else None


def _is_possible(path: str) -> bool:
    """Whether a file can have this name at all."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half a character
        return False


def _told(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # a whole number of many digits has no text, and an object of the user's may have none either
        return shown(value)


def _type(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")

"""Scalars of every step, kept as they come; those on an accelerator are fetched in one copy, in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch

from . import statistics
from .rows import Columns
from .shards import WHOLE, Part, Scalar, as_number, is_spread


@dataclass(frozen=True, slots=True)
class ScalarGroup:
    """The scalars of one step or of one call of `run.log`."""

    step: int
    iteration: int | None
    time: int  # microseconds since the epoch, UTC
    values: dict[str, Scalar | Part]
    epoch: float | None = None
    kind: str | None = None


def as_scalar(value: object) -> Scalar | Part | None:
    """A float, or a copy of a one-element tensor that stays on its accelerator; None for anything else.

    Of a DTensor that other processes hold parts of there is only a Part, and only where it is an L2 norm.
    The copy guards against a tensor that the training loop goes on accumulating into.
    """
    try:
        return _as_scalar(value)
    except (OverflowError, ValueError, RuntimeError):  # a whole number beyond floats, a tensor without values
        return None


def _as_scalar(value: object) -> Scalar | Part | None:
    if isinstance(value, torch.Tensor):
        if is_spread(value) and value.numel() == 1:
            part = as_number(value)
            number = None if part is None else _as_scalar(part.value)
            return None if part is None or number is None or isinstance(number, Part) else Part(number, part.share)
        if value.numel() != 1 or value.is_complex() or value.layout != torch.strided or value.is_meta:
            return None
        value = value.detach()
        return float(value) if statistics.runs_on_host(value) else value.reshape(()).clone()
    if isinstance(value, Real | np.bool_):
        return float(value)
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
        return float(value.item())
    return None


def all_scalars(
    seen: dict[str, Scalar | Part], seconds: float, given: dict[str, Scalar | Part]
) -> dict[str, Scalar | Part]:
    """All scalars of a step: the user's, which win, what was seen, and what follows from both."""
    values = {**seen, "step_time": seconds, **given}
    if "grad_norm_applied" in values:
        norm = values.setdefault("grad_norm", values["grad_norm_applied"])
        if isinstance(values["grad_norm_applied"], Part) and not isinstance(norm, Part):
            values["grad_norm"] = Part(norm, WHOLE)  # by its definition the same in all processes
    samples = values.get("samples")
    if samples is not None and not isinstance(samples, Part) and seconds > 0:
        values["samples_per_second"] = samples / seconds
    return values


class PendingScalars:
    """Groups waiting to be written. The training thread adds, the background thread takes them all at once."""

    def __init__(self, submit: Callable[[Callable[[], Mapping[str, Columns]]], object]) -> None:
        self._submit = submit
        self._open: list[ScalarGroup] | None = None
        self._lock = threading.Lock()

    def add(self, group: ScalarGroup) -> None:
        """Queue a group; one request to the background thread covers all that gather until it is served."""
        with self._lock:
            if self._open is not None:
                self._open.append(group)
                return
            groups = self._open = [group]
        self._submit(lambda: self._take(groups))

    def seal(self) -> None:
        """What is added from now on is written after whatever is submitted next.

        Readers that follow a run rely on it: no scalar of a step is on disk before all of the steps before it.
        """
        with self._lock:
            self._open = None

    def _take(self, groups: list[ScalarGroup]) -> Mapping[str, Columns]:
        with self._lock:
            if self._open is groups:
                self._open = None
        return {"scalars": scalar_columns(groups)}


def scalar_columns(groups: list[ScalarGroup]) -> Columns:
    """The `scalars` table of some groups. Waits for accelerators, so background thread only.

    What a process knows only a part of has a name that says so.
    """
    rows = [(group, name, value) for group in groups for name, value in group.values.items()]
    shares = [value.share if isinstance(value, Part) else None for _, _, value in rows]
    return {
        "step": [group.step for group, _, _ in rows],
        "iteration": [group.iteration for group, _, _ in rows],
        "time": [group.time for group, _, _ in rows],
        "name": [
            f"shard/{name}" if share is not None and share.shards > 1 else name
            for (_, name, _), share in zip(rows, shares, strict=True)
        ],
        "value": _fetch([value.value if isinstance(value, Part) else value for _, _, value in rows]),
        "epoch": [group.epoch for group, _, _ in rows],
        "kind": [group.kind for group, _, _ in rows],
        "shard": [None if share is None else share.shard for share in shares],
        "shards": [None if share is None else share.shards for share in shares],
    }


def _fetch(values: list[Scalar]) -> list[float]:
    fetched: list[Any] = list(values)
    devices: dict[torch.device, list[int]] = {}
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            devices.setdefault(value.device, []).append(position)
    for positions in devices.values():
        tensors = [values[position] for position in positions]
        wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32  # type: ignore[union-attr]
        numbers = torch.stack([t.to(wide) for t in tensors]).tolist()  # type: ignore[union-attr]
        for position, number in zip(positions, numbers, strict=True):
            fetched[position] = number
    return fetched

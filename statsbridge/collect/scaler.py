"""The user's GradScaler: given or found, and looked at without waiting for its device. Never kept alive."""

from __future__ import annotations

import gc
import sys
import weakref

import torch
from torch.amp import grad_scaler as scaler_module
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from . import statistics

_FRAMES = 12  # how far above an optimizer's step its GradScaler may be


class ScalerWatch:
    """Knows the current scale of gradients, and whether a step was tried since it was last asked.

    Where none was given: the scaler whose `step` called the last optimizer step of the models. Before there was
    one, the only scaler of this process that is in use, a guess that the step of the same window confirms or
    not: see `doubtful`.
    """

    def __init__(self, scaler: GradScaler | None) -> None:
        self._given = scaler is not None
        self._scaler: weakref.ref[GradScaler] | None = None if scaler is None else weakref.ref(scaler)
        self._searched = self._given
        self._several = False  # the search has found more than one
        self._version = self._current_version()
        self._drivers: set[int] = set()  # scalers (ids, 0: none) that drove the optimizer steps of this window
        self._used: set[int] = set()  # those by whose scale its gradients were divided

    def open(self) -> None:
        """A window begins."""
        self._drivers, self._used = set(), set()

    def scale_of_backward(self) -> torch.Tensor | None:
        """The one-element tensor that gradients are multiplied by during backward; None without a scaler."""
        if not self._searched:
            self._search()
        scale = self._scale()
        self._used.add(0 if scale is None else id(self._known()))
        return scale

    def stepping(self) -> None:
        """An optimizer of the models steps right now: look who has called it."""
        if self._given:
            return
        driver = _driving_scaler()
        if driver is not None and _scale_in_use(driver) is None:
            driver = None
        if driver is not self._known():
            self._scaler = None if driver is None else weakref.ref(driver)
            self._version = self._current_version()
        self._searched, self._several = True, False
        self._drivers.add(0 if driver is None else id(driver))

    @property
    def doubtful(self) -> bool:
        """Whether gradients of this window may have been divided by the wrong scale, or wrongly not at all."""
        if self._given or not self._used:
            return False
        return self._used != self._drivers if self._drivers else self._several

    @property
    def in_use(self) -> bool:
        """Whether a scaler is known that scales gradients."""
        return self._scale() is not None

    def tried(self) -> bool:
        """Whether `scaler.update()` has run since the last call: where no optimizer stepped then, it skipped.

        `update` changes the scale in place, which counts up the tensor's version on the host.
        """
        before, self._version = self._version, self._current_version()
        # The scale is made when it is first used, at version 0: that is no update.
        return self._version is not None and self._version != (before or (self._version[0], 0))

    def _known(self) -> GradScaler | None:
        return None if self._scaler is None else self._scaler()

    def _scale(self) -> torch.Tensor | None:
        scaler = self._known()
        return None if scaler is None else _scale_in_use(scaler)

    def _current_version(self) -> tuple[int, int] | None:
        scale = self._scale()
        return None if scale is None else (id(scale), scale._version)

    def _search(self) -> None:
        """Look through all objects, once a run: that takes some milliseconds, and sees no frozen ones."""
        self._searched = True
        kinds = _kinds_of_scaler()
        found = [thing for thing in gc.get_objects() if id(type(thing)) in kinds]
        used = [scaler for scaler in found if _scale_in_use(scaler) is not None]
        self._several = len(used) > 1
        if len(used) == 1:
            self._scaler = weakref.ref(used[0])
            self._version = self._current_version()


def _kinds_of_scaler() -> set[int]:
    """The ids of GradScaler and all classes made of it: to ask each of some 300,000 objects takes ten times as long."""
    kinds: list[type] = [GradScaler]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return set(map(id, kinds))


def _scale_in_use(scaler: GradScaler) -> torch.Tensor | None:
    """Its scale, None before `scaler.scale()` was first called and where it is disabled."""
    scale = getattr(scaler, "_scale", None) if scaler.is_enabled() else None
    return scale if isinstance(scale, torch.Tensor) else None


def _driving_scaler() -> GradScaler | None:
    """The scaler in whose `step` we are."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        caller = frame.f_back
        if caller is None:
            return None
        frame = caller
        if frame.f_code.co_filename == scaler_module.__file__:
            scaler = frame.f_locals.get("self")
            return scaler if isinstance(scaler, GradScaler) else None
    return None


def fused_scale(optimizer: Optimizer) -> torch.Tensor | None:
    """The scale that a fused optimizer divides its gradients by itself; they still carry it in the hook."""
    scale = getattr(optimizer, "grad_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


def fused_skip(optimizer: Optimizer) -> bool:
    """Whether a fused step on the host is about to do nothing because its gradients overflowed."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and statistics.runs_on_host(found) and bool(found.item())

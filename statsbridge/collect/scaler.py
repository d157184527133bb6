"""The user's GradScaler, looked at without waiting for its device."""

from __future__ import annotations

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from . import statistics


class ScalerWatch:
    """Knows the current scale of gradients, and whether a step was tried since it was last asked."""

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler
        self._version = self._current_version()

    def scale(self) -> torch.Tensor | None:
        """The one-element tensor that gradients are multiplied by during backward; None without a scaler."""
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        scale: torch.Tensor | None = self._scaler._scale
        return scale

    def tried(self) -> bool:
        """Whether `scaler.update()` has run since the last call: where no optimizer stepped then, it skipped.

        `update` changes the scale in place, which counts up the tensor's version on the host.
        """
        before, self._version = self._version, self._current_version()
        # The scale is made when it is first used, at version 0: that is no update.
        return self._version is not None and self._version != (before or (self._version[0], 0))

    def _current_version(self) -> tuple[int, int] | None:
        scale = self.scale()
        return None if scale is None else (id(scale), scale._version)


def fused_scale(optimizer: Optimizer) -> torch.Tensor | None:
    """The scale that a fused optimizer divides its gradients by itself; they still carry it in the hook."""
    scale = getattr(optimizer, "grad_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


def fused_skip(optimizer: Optimizer) -> bool:
    """Whether a fused step on the host is about to do nothing because its gradients overflowed."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and statistics.runs_on_host(found) and bool(found.item())

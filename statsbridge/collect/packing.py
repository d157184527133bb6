"""One asynchronous copy to the host for all that a step has left on a device."""

from collections.abc import Sequence
from typing import Any

import torch

from .piece import Parts, Piece

_FIELDS = ("integers", "floats", "values", "histogram", "scale")
_WITH_STREAMS = ("cuda", "xpu")


class Packed:
    """The results of many pieces of one device, on their way to host memory in one buffer."""

    def __init__(self, device: torch.device, parts: Sequence[Parts]) -> None:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        self._slots: list[tuple[Parts, str, torch.dtype, int]] = []
        for part in parts:
            for field in _FIELDS:
                tensor = getattr(part, field)
                if tensor is not None:
                    by_dtype.setdefault(tensor.dtype, []).append(tensor)
                    self._slots.append((part, field, tensor.dtype, tensor.numel()))
                    setattr(part, field, None)
            part.packed = self
        # The widest first, so that each group begins at a multiple of its own width.
        self._order = sorted(by_dtype, key=lambda dtype: -dtype.itemsize)
        groups = [torch.cat(by_dtype[dtype]) for dtype in self._order]
        self._sizes = [group.nbytes for group in groups]
        self._host, self._event = _to_host(torch.cat([group.view(torch.uint8) for group in groups]), device)

    def unpack(self) -> None:
        """Wait for the copy, then give every piece its results, in host memory; once. BACKGROUND THREAD."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        groups = dict(zip(self._order, torch.split(self._host, self._sizes), strict=True))
        position = dict.fromkeys(self._order, 0)
        for part, field, dtype, length in self._slots:
            start = position[dtype]
            position[dtype] = stop = start + length * dtype.itemsize
            setattr(part, field, groups[dtype][start:stop].view(dtype))
        self._slots.clear()


def pack(pieces: Sequence[Piece]) -> None:
    """Start the copy to the host of what these pieces have left on accelerators. TRAINING THREAD; does not wait.

    One packed buffer and one copy for each device; pieces measured in host memory, and packed ones, are left as they
    are.
    """
    waiting: dict[torch.device, list[Parts]] = {}
    for piece in pieces:
        parts = piece.parts
        if (
            parts is not None
            and parts.packed is None
            and (held := parts.values if parts.values is not None else parts.floats) is not None
        ):
            waiting.setdefault(held.device, []).append(parts)
    for device, parts_of_device in waiting.items():
        Packed(device, parts_of_device)


def _to_host(packed: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Any]:
    """The packed buffer in host memory, and the event that marks the end of the copy where it is asynchronous."""
    if device.type not in _WITH_STREAMS:
        return packed.to("cpu", copy=True), None
    host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
    host.copy_(packed, non_blocking=True)
    module = torch.get_device_module(device)
    with module.device(device):
        event = module.Event()
        event.record()
    return host, event

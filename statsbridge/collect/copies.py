"""Copies of parameters from before an optimizer's step: what updates are measured against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .kept import Kept
from .memory import available_bytes

#: The copy of the parameters that updates are measured against may take at most this part of free memory.
_MEMORY_SHARE = 0.5


class ParameterCopies:
    """One copy of each parameter, freed with the module that holds it; none where memory is short.

    Args:
        declined: told once why there are none.
    """

    def __init__(self, declined: Callable[[str], None]) -> None:
        self._declined = declined
        self._allowed = True
        self._copies: Any = WeakIdKeyDictionary()  # module -> name of its parameter -> its id and the copy

    def of(self, kept: Kept, parameter: torch.Tensor) -> torch.Tensor | None:
        """The copy of this very parameter."""
        number, copy = self._place(kept).get(kept.key, (0, None))
        return copy if number == id(parameter) else None

    def discard(self, kept: Kept) -> None:
        """There is none of this parameter any more."""
        self._place(kept).pop(kept.key, None)

    def clear(self) -> None:
        self._copies.clear()

    def take(self, parameters: Iterable[tuple[Kept, torch.Tensor, torch.Tensor]]) -> None:
        """Copy what is held of each parameter (the last of three) over what was copied before."""
        dense = [one for one in parameters if one[1].layout == torch.strided]
        missing = [one for one in dense if not _fits(self.of(*one[:2]), one[2])]
        if missing and not self._allocate(missing):
            return
        pairs = [(copy, held) for kept, p, held in dense if (copy := self.of(kept, p)) is not None]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([copy for copy, _ in pairs], [held for _, held in pairs])

    def _place(self, kept: Kept) -> dict[str, tuple[int, torch.Tensor]]:
        holder = kept.holder()
        found: dict[str, tuple[int, torch.Tensor]] = {} if holder is None else self._copies.setdefault(holder, {})
        return found

    def _allocate(self, parameters: Sequence[tuple[Kept, torch.Tensor, torch.Tensor]]) -> bool:
        """Buffers for what is held of each parameter."""
        if not self._allowed:
            return False
        needed: dict[torch.device, int] = defaultdict(int)
        for kept, _, held in parameters:
            self.discard(kept)  # of the one that was there before
            needed[held.device] += held.numel() * held.element_size()
        for device, size in needed.items():
            free = available_bytes(device)
            if free is not None and size > free * _MEMORY_SHARE:
                self._decline(
                    f"a copy of the parameters takes {size / 2**20:,.0f} MiB on {device} and {free / 2**20:,.0f} MiB "
                    "are free"
                )
                return False
        try:
            for kept, parameter, held in parameters:
                self._place(kept)[kept.key] = (id(parameter), torch.empty_like(held))
        except RuntimeError as error:  # out of memory all the same
            self._decline(f"a copy of the parameters could not be made: {error}")
            return False
        return True

    def _decline(self, reason: str) -> None:
        self._allowed = False
        self.clear()  # copies that are not renewed would make wrong updates
        self._declined(f"updates are not measured: {reason}; narrow modules= or leave 'update' out of sites=")


def _fits(buffer: torch.Tensor | None, held: torch.Tensor) -> bool:
    return (
        buffer is not None
        and buffer.shape == held.shape
        and buffer.dtype == held.dtype
        and buffer.device == held.device
    )

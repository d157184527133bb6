"""Parameters, their gradients and their updates on a sampled step, read around the optimizer's step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from .filters import Filters
from .memory import available_bytes
from .modules import ModuleEntry, ModuleIndex
from .norms import global_norm
from .rows import Key, Rows
from .statistics import Piece

#: The copy of the parameters that updates are measured against may take at most this part of free memory.
_MEMORY_SHARE = 0.5


class Measure(Protocol):
    def __call__(
        self,
        key: Key,
        tensor: torch.Tensor,
        *,
        minus: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> Piece | None: ...


class _Named(NamedTuple):
    """What a parameter is called. It does not hold the parameter, which may be freed with its model."""

    module: ModuleEntry
    tensor: str


class ParameterWatch:
    """Fills the rows of parameters. Around each optimizer step of a sampled window, and at its close."""

    #: Rows of these sites are of the last optimizer step in the window: an earlier one is replaced.
    replaced_sites = frozenset({"parameter_grad", "update", "optimizer_state"})

    def __init__(self, index: ModuleIndex, filters: Filters, measure: Measure, declined: Callable[[str], None]) -> None:
        self._index = index
        self._filters = filters
        self._measure = measure
        self._declined = declined
        self._entries: Any = WeakIdKeyDictionary()  # parameter -> _Named
        self._chosen_entries: Any = WeakIdKeyDictionary()  # those that the filters let through
        self._before: Any = WeakIdKeyDictionary()  # parameter -> its copy from before the step
        self._begun: Any = WeakIdKeyDictionary()  # parameters measured in this window
        self._buffers_allowed = True
        self.refresh()

    def refresh(self) -> None:
        """Look again which parameters the models hold: they may be replaced, unfrozen or added."""
        entries = self._index.parameters()
        chosen = {name for name in {e.module.name for e in entries} if self._filters.module(name)}
        self._entries = WeakIdKeyDictionary({e.parameter: _Named(e.module, e.tensor) for e in entries})
        self._chosen_entries = WeakIdKeyDictionary(
            {e.parameter: _Named(e.module, e.tensor) for e in entries if e.module.name in chosen}
        )

    def tracked(self, parameter: torch.Tensor) -> bool:
        """Whether the tensor is a parameter of the models."""
        return parameter in self._entries

    def open(self) -> None:
        self.refresh()
        self._begun = WeakIdKeyDictionary()

    # ------------------------------------------------------------------ around an optimizer step

    def begin(self, rows: Rows, parameters: Iterable[torch.Tensor]) -> None:
        """Measure and copy parameters before their first step of the window."""
        new = [(e, p) for e, p in self._chosen(parameters) if p not in self._begun]
        for entry, parameter in new:
            self._begun[parameter] = True
            self._value(rows, entry, parameter)
        if "update" in self._filters.sites:
            self._copy([parameter for _, parameter in new if _moves(parameter)])
            for _, parameter in new:
                if not _moves(parameter):
                    self._before.pop(parameter, None)  # of an earlier window: not from before this step

    def gradients(self, rows: Rows, parameters: Iterable[torch.Tensor], scale: torch.Tensor | None) -> None:
        """Measure gradients as the optimizer sees them; `scale` divides those that a fused step unscales itself."""
        if "parameter_grad" in self._filters.sites:
            for entry, parameter in self._chosen(parameters):
                if _moves(parameter):
                    self._gradient(rows, entry, parameter, scale)

    def updates(self, rows: Rows, parameters: Iterable[torch.Tensor]) -> None:
        """Measure how far the parameters are from where they were before the window's first step."""
        if "update" in self._filters.sites:
            for entry, parameter in self._chosen(parameters):
                before = self._before.get(parameter)
                if before is not None and _moves(parameter):
                    self._put(rows, _key(entry, "update"), parameter, minus=before)

    def optimizer_state(self, rows: Rows, optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """Measure what the optimizer keeps for each parameter, such as Adam's `exp_avg`."""
        if "optimizer_state" not in self._filters.sites:
            return
        for entry, parameter in self._chosen(parameters):
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    key = Key(entry.module.index, 0, "optimizer_state", f"{entry.tensor}.{name}")
                    self._put(rows, key, value)

    # ------------------------------------------------------------------ at the close of the window

    def forget(self) -> None:
        """Let go of everything: the run is over."""
        for held in (self._entries, self._chosen_entries, self._before, self._begun):
            held.clear()

    def complete(self, rows: Rows, held: set[int], reason: str) -> None:
        """Measure what no optimizer has stepped: frozen parameters, and those of a loop of the user's own.

        Gradients of parameters that are `held` (ids) by an optimizer which did not step are no step's gradients,
        and may be scaled or overflown: they get a status, `reason`, and no numbers.
        """
        for entry, parameter in self._chosen(self._chosen_entries.keys()):
            if parameter in self._begun:
                continue
            self._value(rows, entry, parameter)
            if not parameter.requires_grad or "parameter_grad" not in self._filters.sites:
                continue
            if id(parameter) in held:
                rows.row(_key(entry, "parameter_grad")).status = reason
            else:
                self._gradient(rows, entry, parameter, None)

    def norm(self) -> float | torch.Tensor:
        """Global L2 norm of all parameters that require gradients."""
        return global_norm([parameter for parameter in self._entries if parameter.requires_grad])

    @property
    def cover_the_models(self) -> bool:
        """Whether the filters let every module's updates through: a global ratio needs all of them."""
        return "update" in self._filters.sites and len(self._chosen_entries) == len(self._entries)

    # ------------------------------------------------------------------ inside

    def _chosen(self, parameters: Iterable[torch.Tensor]) -> list[tuple[_Named, torch.Tensor]]:
        found = ((self._chosen_entries.get(parameter), parameter) for parameter in parameters)
        return [(entry, parameter) for entry, parameter in found if entry is not None]

    def _put(self, rows: Rows, key: Key, tensor: torch.Tensor, *, minus: torch.Tensor | None = None) -> None:
        piece = self._measure(key, tensor, minus=minus)
        if piece is not None:
            rows.replace(key, piece)

    def _value(self, rows: Rows, entry: _Named, parameter: torch.Tensor) -> None:
        # An update's ratio needs the norm of its parameter, whether that has a row of its own or not.
        if not self._filters.sites.isdisjoint(("parameter", "update")):
            self._put(rows, _key(entry, "parameter"), parameter)

    def _gradient(self, rows: Rows, entry: _Named, parameter: torch.Tensor, scale: torch.Tensor | None) -> None:
        key = _key(entry, "parameter_grad")
        if parameter.grad is None:
            row = rows.row(key)
            if not row.measured:
                row.status = "no_grad"
            return
        piece = self._measure(key, parameter.grad, scale=scale)
        if piece is not None:
            rows.replace(key, piece)
            rows.row(key).status = None

    def _copy(self, parameters: Sequence[torch.Tensor]) -> None:
        dense = [parameter for parameter in parameters if parameter.layout == torch.strided]
        missing = [p for p in dense if not _fits(self._before.get(p), p)]
        if missing and not self._allocate(missing):
            return
        if dense:
            with torch.no_grad():
                torch._foreach_copy_([self._before[p] for p in dense], [p.detach() for p in dense])

    def _allocate(self, parameters: Sequence[torch.Tensor]) -> bool:
        if not self._buffers_allowed:
            return False
        needed: dict[torch.device, int] = defaultdict(int)
        for parameter in parameters:
            needed[parameter.device] += parameter.numel() * parameter.element_size()
        for device, size in needed.items():
            free = available_bytes(device)
            if free is not None and size > free * _MEMORY_SHARE:
                self._decline(
                    f"a copy of the parameters takes {size / 2**20:,.0f} MiB on {device} and {free / 2**20:,.0f} MiB "
                    "are free"
                )
                return False
        try:
            for parameter in parameters:
                self._before[parameter] = torch.empty_like(parameter, requires_grad=False)
        except RuntimeError as error:  # out of memory all the same
            self._decline(f"a copy of the parameters could not be made: {error}")
            return False
        return True

    def _decline(self, reason: str) -> None:
        self._buffers_allowed = False
        self._before = WeakIdKeyDictionary()  # copies that are not renewed would make wrong updates
        self._declined(f"updates are not measured: {reason}; narrow modules= or leave 'update' out of sites=")


def _key(entry: _Named, site: str) -> Key:
    return Key(entry.module.index, 0, site, entry.tensor)


def _moves(parameter: torch.Tensor) -> bool:
    """A frozen parameter that an optimizer happens to hold has neither gradient nor update."""
    return parameter.requires_grad or parameter.grad is not None


def _fits(buffer: torch.Tensor | None, parameter: torch.Tensor) -> bool:
    return (
        buffer is not None
        and buffer.shape == parameter.shape
        and buffer.dtype == parameter.dtype
        and buffer.device == parameter.device
    )

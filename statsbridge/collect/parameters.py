"""Parameters, their gradients and their updates on a sampled step, read around the optimizer's step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from .filters import Filters
from .memory import available_bytes
from .modules import ModuleIndex
from .parameter_facts import Named, ParameterFacts
from .rows import Key, Rows, key_of
from .shards import Layout, Part, Scalar, at_rest
from .statistics import Piece, sum_of_squares

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


class ParameterWatch:
    """Fills the rows of parameters. Around each optimizer step of a sampled window, and at its close."""

    #: Rows of these sites are of the last optimizer step in the window: an earlier one is replaced.
    replaced_sites = frozenset({"parameter_grad", "update", "optimizer_state"})

    def __init__(
        self,
        index: ModuleIndex,
        filters: Filters,
        layout: Layout,
        measure: Measure,
        declined: Callable[[str], None],
    ) -> None:
        self._index = index
        self._layout = layout
        self._filters = filters
        self._measure = measure
        self._declined = declined
        self._entries: Any = WeakIdKeyDictionary()  # parameter -> Named
        self._chosen_entries: Any = WeakIdKeyDictionary()  # those that the filters let through
        self._before: Any = WeakIdKeyDictionary()  # parameter -> its copy from before the step
        self._begun: Any = WeakIdKeyDictionary()  # parameters measured in this window
        self._buffers_allowed = True
        self.incomplete = False  # whether some had no shape yet when they were last looked at
        self._versions = (0, 0)
        self.facts = ParameterFacts()
        self.refresh()

    def refresh(self) -> None:
        """Look again which parameters the models hold: they may be replaced, unfrozen or added."""
        self._layout.refresh(self._index.wrappers())
        entries = self._index.parameters()
        resting = at_rest(self._index.modules())
        self.incomplete = self._index.lazy
        named = {p: name for p, name in self._entries.items() if self._layout.is_cut(p)}
        named |= {resting.get(id(e.parameter), e.parameter): Named(e.module, e.tensor) for e in entries}
        chosen = {path for path in {name.module.name for name in named.values()} if self._filters.module(path)}
        self._entries = WeakIdKeyDictionary(named)
        self._chosen_entries = WeakIdKeyDictionary({p: name for p, name in named.items() if name.module.name in chosen})
        self.facts.look(named, self._layout.is_cut)

    def use(self, filters: Filters) -> None:
        """Collect by these filters from the next window on."""
        self._filters = filters

    def tracked(self, parameter: torch.Tensor) -> bool:
        """Whether the tensor is a parameter of the models."""
        return parameter in self._entries

    @property
    def changed(self) -> bool:
        """Whether any parameter was written to since the window was opened."""
        count, versions = self._count_versions()
        return count == self._versions[0] and versions != self._versions[1]  # they are not those that came or went

    def open(self) -> None:
        self._versions = self._count_versions()
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

    def gradients(self, rows: Rows, parameters: Iterable[torch.Tensor], scale: torch.Tensor | None) -> dict[int, float]:
        """Measure gradients as the optimizer sees them; `scale` divides those that a fused step unscales itself.

        Returns:
            The sums of squares of large gradients, before they are unscaled, by the id of their parameter.
        """
        squares: dict[int, float] = {}
        if "parameter_grad" in self._filters.sites:
            for entry, parameter in self._chosen(parameters):
                if _moves(parameter):
                    piece = self._gradient(rows, entry, parameter, scale)
                    square = None if piece is None else sum_of_squares(piece)
                    if square is not None:
                        squares[id(parameter)] = square
        return squares

    def updates(self, rows: Rows, parameters: Iterable[torch.Tensor]) -> None:
        """Measure how far the parameters are from where they were before the window's first step."""
        if "update" in self._filters.sites:
            for entry, parameter in self._chosen(parameters):
                before = self._before.get(parameter)
                if before is not None and _moves(parameter):
                    self._put(rows, _key(entry, "update"), parameter, parameter, minus=before)

    def note_missing(self) -> None:
        """After an optimizer step of the window: which parameters has none stepped so far?"""
        if len(self._begun) < len(self._chosen_entries):
            self.facts.stepped([(name, p) for p, name in self._chosen_entries.items() if p not in self._begun])

    def optimizer_state(self, rows: Rows, optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """Measure what the optimizer keeps for each parameter, such as Adam's `exp_avg`."""
        if "optimizer_state" not in self._filters.sites:
            return
        for entry, parameter in self._chosen(parameters):
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    key = Key(entry.module.index, 0, "optimizer_state", f"{entry.tensor}.{name}")
                    self._put(rows, key, parameter, value)

    # ------------------------------------------------------------------ at the close of the window

    def forget(self) -> None:
        """Let go of everything: the run is over."""
        for held in (self._entries, self._chosen_entries, self._before, self._begun):
            held.clear()

    def complete(self, rows: Rows, held: set[int] | None, reason: str) -> None:
        """Measure what no optimizer has stepped: frozen parameters, and those of a loop of the user's own.

        Gradients of parameters that are `held` (ids) by an optimizer which did not step are no step's gradients,
        and may be scaled or overflown: they get a status, `reason`, and no numbers. None holds them all.
        """
        for entry, parameter in self._chosen(self._chosen_entries.keys()):
            if parameter in self._begun:
                continue
            self._value(rows, entry, parameter)
            if not parameter.requires_grad or "parameter_grad" not in self._filters.sites:
                continue
            if held is None or id(parameter) in held:
                self._silence(rows, _key(entry, "parameter_grad"), parameter, reason)
            else:
                self._gradient(rows, entry, parameter, None)

    def norm(self) -> Scalar | Part | None:
        """Global L2 norm of all parameters that require gradients; of the part of them that lies here."""
        parameters = [parameter for parameter in self._entries if parameter.requires_grad]
        return self._layout.norm(parameters, parameters, {})

    @property
    def cover_the_models(self) -> bool:
        """Whether the filters let every module's updates through: a global ratio needs all of them."""
        return "update" in self._filters.sites and len(self._chosen_entries) == len(self._entries)

    # ------------------------------------------------------------------ inside

    def _count_versions(self) -> tuple[int, int]:
        # Inference tensors count no versions.
        versions = [0 if parameter.is_inference() else parameter._version for parameter in self._entries]
        return len(versions), sum(versions)

    def _chosen(self, parameters: Iterable[torch.Tensor]) -> list[tuple[Named, torch.Tensor]]:
        found = ((self._chosen_entries.get(parameter), parameter) for parameter in parameters)
        return [(entry, parameter) for entry, parameter in found if entry is not None]

    def _put(
        self,
        rows: Rows,
        key: Key,
        parameter: torch.Tensor,
        tensor: torch.Tensor,
        *,
        minus: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> Piece | None:
        """Measure what is held of `tensor`: the parameter, or its gradient or state; None where that fails."""
        held = self._layout.held(tensor, parameter)
        piece = Piece("partial", 0) if held.partial else self._measure(key, held.tensor, minus=minus, scale=scale)
        if piece is None:
            return None
        rows.replace(key, piece)
        row = rows.row(key)
        row.share, row.counted = held.share, held.counted
        return piece

    def _silence(self, rows: Rows, key: Key, parameter: torch.Tensor, reason: str) -> None:
        """A row without numbers, of as much as the parameter is."""
        row, held = rows.row(key), self._layout.held(parameter, parameter)
        row.share, row.counted = held.share, held.counted
        row.status = "empty" if held.tensor.numel() == 0 else reason

    def _value(self, rows: Rows, entry: Named, parameter: torch.Tensor) -> None:
        # An update's ratio needs the norm of its parameter, whether that has a row of its own or not.
        if not self._filters.sites.isdisjoint(("parameter", "update")):
            self._put(rows, _key(entry, "parameter"), parameter, parameter)

    def _gradient(self, rows: Rows, entry: Named, parameter: torch.Tensor, scale: torch.Tensor | None) -> Piece | None:
        key = _key(entry, "parameter_grad")
        if parameter.grad is None:
            if not rows.row(key).measured:
                self._silence(rows, key, parameter, "no_grad")
            return None
        piece = self._put(rows, key, parameter, parameter.grad, scale=scale)
        if piece is not None:
            rows.row(key).status = None
        return piece

    def _copy(self, parameters: Sequence[torch.Tensor]) -> None:
        dense = {p: self._layout.held(p, p).tensor.detach() for p in parameters if p.layout == torch.strided}
        missing = {p: held for p, held in dense.items() if not _fits(self._before.get(p), held)}
        if missing and not self._allocate(missing):
            return
        if dense:
            with torch.no_grad():
                torch._foreach_copy_([self._before[p] for p in dense], list(dense.values()))

    def _allocate(self, parameters: Mapping[torch.Tensor, torch.Tensor]) -> bool:
        """Buffers for what is held of each parameter."""
        if not self._buffers_allowed:
            return False
        needed: dict[torch.device, int] = defaultdict(int)
        for held in parameters.values():
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
            for parameter, held in parameters.items():
                self._before[parameter] = torch.empty_like(held)
        except RuntimeError as error:  # out of memory all the same
            self._decline(f"a copy of the parameters could not be made: {error}")
            return False
        return True

    def _decline(self, reason: str) -> None:
        self._buffers_allowed = False
        self._before = WeakIdKeyDictionary()  # copies that are not renewed would make wrong updates
        self._declined(f"updates are not measured: {reason}; narrow modules= or leave 'update' out of sites=")


def _key(entry: Named, site: str) -> Key:
    return key_of(entry.module.index, 0, site, entry.tensor)


def _moves(parameter: torch.Tensor) -> bool:
    """A frozen parameter that an optimizer happens to hold has neither gradient nor update."""
    return parameter.requires_grad or parameter.grad is not None


def _fits(buffer: torch.Tensor | None, held: torch.Tensor) -> bool:
    return (
        buffer is not None
        and buffer.shape == held.shape
        and buffer.dtype == held.dtype
        and buffer.device == held.device
    )

"""Parameters, their gradients and their updates on a sampled step, read around the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch.optim import Optimizer

from .copies import ParameterCopies
from .filters import Filters
from .kept import Kept, Named
from .modules import ModuleIndex
from .parameter_facts import ParameterFacts
from .rows import Key, Rows, key_of
from .shards import Layout, Part, Scalar, at_rest
from .statistics import Piece, sum_of_squares

#: Sampled steps in a row in which parameters are not used in forward passes, have no gradient and do not step.
FEWEST_BYPASSES = 3

BYPASSED = (
    "forward passes use other tensors in the place of the model's parameters (torch.func.functional_call?), which get "
    "no gradient and no optimizer's step: rows of parameters are of the model's own, whatever is trained; to have "
    "gradients and updates, put the gradients into p.grad and let an optimizer of model.parameters() step, or give "
    "what you train to run.log_tensor"
)


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
        self._copies = ParameterCopies(declined)
        self._entries: dict[int, Kept] = {}  # by the id of the parameter
        self._chosen_entries: dict[int, Kept] = {}  # those that the filters let through
        self._begun: set[int] = set()  # parameters measured in this window
        self._settled = False
        self._ids: list[int] = []  # of what the modules held when they were last looked at
        self._versions = (0, 0)
        self._displaced: list[Kept] = []  # those in whose place the first forward pass of the window had others
        self._bypasses = 0  # windows in a row in which those had neither gradient nor step
        self.facts = ParameterFacts()
        self.refresh(settled=True)

    def refresh(self, *, settled: bool) -> None:
        """Look again which parameters the models hold: they may be replaced, unfrozen or added.

        `settled`: whether no forward pass is running, in which others may stand in their place.
        """
        self._layout.refresh(self._index.wrappers())
        self._ids = self._index.parameter_ids()
        self._entries = self._find()
        paths = {kept.name.module.name for kept in self._entries.values()}
        chosen = {path for path in paths if self._filters.module(path)}
        self._chosen_entries = {n: kept for n, kept in self._entries.items() if kept.name.module.name in chosen}
        self._settled = settled and not self._index.lazy
        if settled:
            self._show_facts()

    def outdated(self) -> bool:
        """Whether the models hold others than when they were looked at; asked once, outside of forward passes."""
        if self._settled:
            return False
        self._settled = True
        found = self._entries if self._index.parameter_ids() == self._ids else self._find()
        if found.keys() == self._entries.keys():
            self._show_facts()
            return False
        places = {kept.name for kept in self._entries.values()}
        self._displaced = [kept for n, kept in found.items() if n not in self._entries and kept.name in places]
        return True

    def bypassed(self) -> bool:
        """Whether by now forward passes go past the parameters, for good; to be asked once a window, true once."""
        displaced = [parameter for _, parameter in _present(self._displaced) if parameter.requires_grad]
        idle = all(p.grad is None and id(p) not in self._begun for p in displaced)
        self._bypasses = self._bypasses + 1 if displaced and idle else 0
        return self._bypasses == FEWEST_BYPASSES

    def use(self, filters: Filters) -> None:
        """Collect by these filters from the next window on."""
        self._filters = filters

    def tracked(self, parameter: torch.Tensor) -> bool:
        """Whether the tensor is a parameter of the models."""
        return _in(self._entries, parameter) is not None

    @property
    def changed(self) -> bool:
        """Whether any parameter was written to since the window was opened."""
        count, versions = self._count_versions()
        return count == self._versions[0] and versions != self._versions[1]  # they are not those that came or went

    def open(self) -> None:
        self._versions = self._count_versions()
        self._displaced = []
        self._begun.clear()

    # ------------------------------------------------------------------ around an optimizer step

    def begin(self, rows: Rows, parameters: Iterable[torch.Tensor]) -> None:
        """Measure and copy parameters before their first step of the window."""
        new = [(kept, p) for kept, p in self._chosen(parameters) if id(p) not in self._begun]
        for kept, parameter in new:
            self._begun.add(id(parameter))
            self._value(rows, kept.name, parameter)
        if "update" in self._filters.sites:
            self._copies.take([(kept, p, self._layout.held(p, p).tensor.detach()) for kept, p in new if _moves(p)])
            for kept, parameter in new:
                if not _moves(parameter):
                    self._copies.discard(kept)  # of an earlier window: not from before this step

    def gradients(self, rows: Rows, parameters: Iterable[torch.Tensor], scale: torch.Tensor | None) -> dict[int, float]:
        """Measure gradients as the optimizer sees them; `scale` divides those that a fused step unscales itself.

        Returns:
            The sums of squares of large gradients, before they are unscaled, by the id of their parameter.
        """
        squares: dict[int, float] = {}
        if "parameter_grad" in self._filters.sites:
            for kept, parameter in self._chosen(parameters):
                if _moves(parameter):
                    piece = self._gradient(rows, kept.name, parameter, scale)
                    square = None if piece is None else sum_of_squares(piece)
                    if square is not None:
                        squares[id(parameter)] = square
        return squares

    def updates(self, rows: Rows, parameters: Iterable[torch.Tensor]) -> None:
        """Measure how far the parameters are from where they were before the window's first step."""
        if "update" in self._filters.sites:
            for kept, parameter in self._chosen(parameters):
                before = self._copies.of(kept, parameter)
                if before is not None and _moves(parameter):
                    self._put(rows, _key(kept.name, "update"), parameter, parameter, minus=before)

    def note_missing(self) -> None:
        """After an optimizer step of the window: which parameters has none stepped so far?"""
        if len(self._begun) < len(self._chosen_entries):
            self.facts.stepped([(kept.name, p) for kept, p in self._all_chosen() if id(p) not in self._begun])

    def optimizer_state(self, rows: Rows, optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """Measure what the optimizer keeps for each parameter, such as Adam's `exp_avg`."""
        if "optimizer_state" not in self._filters.sites:
            return
        for kept, parameter in self._chosen(parameters):
            entry = kept.name
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    key = Key(entry.module.index, 0, "optimizer_state", f"{entry.tensor}.{name}")
                    self._put(rows, key, parameter, value)

    # ------------------------------------------------------------------ at the close of the window

    def forget(self) -> None:
        """Let go of everything: the run is over."""
        for held in (self._entries, self._chosen_entries, self._copies, self._begun):
            held.clear()
        self._settled = True

    def complete(self, rows: Rows, held: set[int] | None, reason: str) -> None:
        """Measure what no optimizer has stepped: frozen parameters, and those of a loop of the user's own.

        Gradients of parameters that are `held` (ids) by an optimizer which did not step are no step's gradients,
        and may be scaled or overflown: they get a status, `reason`, and no numbers. None holds them all.
        """
        for kept, parameter in self._all_chosen():
            if id(parameter) in self._begun:
                continue
            entry = kept.name
            self._value(rows, entry, parameter)
            if not parameter.requires_grad or "parameter_grad" not in self._filters.sites:
                continue
            if held is None or id(parameter) in held:
                self._silence(rows, _key(entry, "parameter_grad"), parameter, reason)
            else:
                self._gradient(rows, entry, parameter, None)

    def norm(self) -> Scalar | Part | None:
        """Global L2 norm of all parameters that require gradients; of the part of them that lies here."""
        parameters = [p for _, p in _present(self._entries.values()) if p.requires_grad]
        return self._layout.norm(parameters, parameters, {})

    @property
    def cover_the_models(self) -> bool:
        """Whether the filters let every module's updates through: a global ratio needs all of them."""
        return "update" in self._filters.sites and len(self._chosen_entries) == len(self._entries)

    # ------------------------------------------------------------------ inside

    def _count_versions(self) -> tuple[int, int]:
        # Inference tensors count no versions.
        versions = [0 if p.is_inference() else p._version for _, p in _present(self._entries.values())]
        return len(versions), sum(versions)

    def _find(self) -> dict[int, Kept]:
        """The parameters as they are now, by their ids."""
        resting = at_rest(self._index.modules())
        found = {id(p): kept for kept, p in _present(self._entries.values()) if self._layout.is_cut(p)}
        for entry in self._index.parameters():
            parameter = resting.get(id(entry.parameter), entry.parameter)
            hidden = parameter is not entry.parameter or self._layout.is_cut(parameter)
            found[id(parameter)] = Kept(entry, parameter, hidden=hidden)
        return found

    def _show_facts(self) -> None:
        self.facts.look([(kept.name, p) for kept, p in _present(self._entries.values()) if not self._layout.is_cut(p)])

    def _chosen(self, parameters: Iterable[torch.Tensor]) -> list[tuple[Kept, torch.Tensor]]:
        found = ((_in(self._chosen_entries, parameter), parameter) for parameter in parameters)
        return [(kept, parameter) for kept, parameter in found if kept is not None]

    def _all_chosen(self) -> list[tuple[Kept, torch.Tensor]]:
        return _present(self._chosen_entries.values())

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


def _in(entries: Mapping[int, Kept], parameter: torch.Tensor) -> Kept | None:
    kept = entries.get(id(parameter))
    # The id of a parameter that is gone may belong to another one by now.
    return kept if kept is not None and kept.parameter() is parameter else None


def _present(entries: Iterable[Kept]) -> list[tuple[Kept, torch.Tensor]]:
    return [(kept, parameter) for kept in entries if (parameter := kept.parameter()) is not None]


def _key(entry: Named, site: str) -> Key:
    return key_of(entry.module.index, 0, site, entry.tensor)


def _moves(parameter: torch.Tensor) -> bool:
    """A frozen parameter that an optimizer happens to hold has neither gradient nor update."""
    return parameter.requires_grad or parameter.grad is not None

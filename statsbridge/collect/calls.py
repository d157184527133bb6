"""What is known of every module call: its place in execution and its depth in the flow of data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from .fx_order import fx_order
from .modules import ModuleEntry, ModuleIndex

#: Module (index of its entry) and call.
Call = tuple[int, int]


class Place(NamedTuple):
    """Position of one call in execution, its depth (None: not traced), and how both were found."""

    order: int | None
    depth: int | None
    source: str | None


_NOWHERE = Place(None, None, None)


class CallTable:
    """The calls seen so far, by the outermost module they ran in.

    A new trace replaces what it saw and keeps the rest: a model that takes one branch now and another later is
    traced once for each, not at every change.
    """

    def __init__(self) -> None:
        self._roots: dict[int, dict[Call, tuple[int | None, str]]] = {}
        self._places: dict[Call, Place] = {}
        self.changed = True  # since the last `columns`

    def place(self, module: int, call: int) -> Place:
        """Where a call stands; nulls where it was never seen."""
        return self._places.get((module, call), _NOWHERE)

    def known(self, module: int, call: int) -> bool:
        """Whether the call was seen before."""
        return (module, call) in self._places

    def traced(self, root: int, calls: Iterable[tuple[int, int, int | None]], source: str) -> None:
        """Take over a whole traced forward: (module, call, depth) in the order in which outputs were ready."""
        new = {(module, call): (depth, source) for module, call, depth in calls}
        kept = {call: found for call, found in self._roots.get(root, {}).items() if call not in new}
        self._roots[root] = new | kept
        self._number()

    def met(self, root: int, calls: Iterable[Call]) -> None:
        """Calls outside any trace: their depth is unknown until the next one."""
        self._roots.setdefault(root, {}).update(dict.fromkeys(calls, (None, "execution")))
        self._number()

    def _number(self) -> None:
        self._places = {}
        for calls in self._roots.values():
            for call, (depth, source) in calls.items():
                self._places.setdefault(call, Place(len(self._places), depth, source))
        self.changed = True

    def columns(self, entries: Sequence[ModuleEntry]) -> Mapping[str, Any]:
        """The `modules` table without its step: every module with call 0, and every further call."""
        calls = {(entry.index, 0) for entry in entries} | self._places.keys()
        rows = [(entries[module], call, self.place(module, call)) for module, call in sorted(calls)]
        rows.sort(key=lambda row: (row[2].order is None, row[2].order or 0))
        self.changed = False
        return {
            "module": [entry.name for entry, _, _ in rows],
            "type": [entry.type for entry, _, _ in rows],
            "parent": [entry.parent for entry, _, _ in rows],
            "call": [call for _, call, _ in rows],
            "order": [place.order for _, _, place in rows],
            "depth": [place.depth for _, _, place in rows],
            "leaf": [entry.leaf for entry, _, _ in rows],
            "parameters": [entry.parameters for entry, _, _ in rows],
            "order_source": [place.source for _, _, place in rows],
        }


def static_calls(
    models: nn.Module | Mapping[str, nn.Module], index: ModuleIndex
) -> list[tuple[int, list[tuple[int, int, int | None]]]]:
    """For each root (index of its entry) what `CallTable.traced` takes, found by torch.fx without a forward pass.

    Raises ConfigError where torch.fx cannot trace a model.
    """
    found = []
    for model in [models] if isinstance(models, nn.Module) else models.values():
        places = sorted(fx_order(model, index).items(), key=lambda item: item[1])
        calls: list[tuple[int, int, int | None]] = [(module, call, depth) for (module, call), (_, depth) in places]
        found.append((calls[-1][0], calls))  # the root's output is ready last
    return found

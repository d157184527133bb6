"""The curves of a mirror: their names, and the budget they are made within."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .contract import Series

UNSEEN = -2
LEFT_OUT = -1

ROOT = "root"
_PARAMETER_SITES = frozenset({"parameter", "parameter_grad", "update", "optimizer_state"})
# Scalars and aggregates that begin late, such as a validation loss or a count of NaNs, still find room.
_KEPT = 50


@dataclass(frozen=True, slots=True)
class Candidate:
    """A curve that could be made. `rank`: its place in the order of spending; `place`: depth and order."""

    series: Series
    rank: tuple[int, ...]
    place: tuple[float, float]


class Curves:
    """All curves so far. Choices depend on the order of the rows alone."""

    def __init__(self, max_series: int) -> None:
        self.series: list[Series] = []
        self._names: set[str] = set()
        self._limit = max_series
        self._kept = min(_KEPT, max_series // 10)
        self.left_out: Counter[str] = Counter()

    def scalar(self, series: Series) -> int:
        """The number of a new curve of a scalar, or LEFT_OUT where the budget is spent."""
        if len(self.series) >= self._limit:
            self.left_out[series.kind] += 1
            return LEFT_OUT
        return self._make(series)

    def choose(self, candidates: Sequence[Candidate]) -> list[int]:
        """The number of each candidate's curve; LEFT_OUT for those that the budget has no room for.

        Where not all of one rank fit, those chosen are spread evenly over the depth of the model.
        """
        numbers = [LEFT_OUT] * len(candidates)
        by_rank: dict[tuple[int, ...], list[int]] = {}
        for number, candidate in enumerate(candidates):
            by_rank.setdefault(candidate.rank, []).append(number)
        for _, members in sorted(by_rank.items()):
            kept = 0 if candidates[members[0]].series.kind == "aggregate" else self._kept
            room = max(0, self._limit - kept - len(self.series))
            if room < len(members):
                self.left_out[candidates[members[0]].series.kind] += len(members) - room
                members = _spread(sorted(members, key=lambda number: candidates[number].place), room)
            for number in members:
                numbers[number] = self._make(candidates[number].series)
        return numbers

    def _make(self, series: Series) -> int:
        name, copies = series.name, 1
        while name in self._names:
            copies += 1
            name = f"{series.name}--{copies}"
        self._names.add(name)
        self.series.append(series if name == series.name else replace(series, name=name))
        return len(self.series) - 1


def _spread(ordered: Sequence[int], room: int) -> list[int]:
    if room <= 1:
        return list(ordered[:room])
    chosen = np.round(np.linspace(0, len(ordered) - 1, room)).astype(int)
    return [ordered[number] for number in chosen]


def statistic_name(site: str, statistic: str, module: str, call: int, tensor: str) -> str:
    """The name of one statistic's curve, for people: `parameter/l2/blocks.0.conv1.weight`.

    A tensor inside an output follows a slash, a further call of a module a colon; the whole model is `root`.
    """
    if site in {"tensor", "tensor_grad"} and not module:
        return f"{site}/{statistic}/{tensor}"
    return f"{site}/{statistic}/{_of_tensor(site, module or ROOT, tensor)}{f':{call}' if call else ''}"


def aggregate_name(site: str, statistic: str, type: str, tensor: str) -> str:
    """The name of the curve of one statistic of all modules of a type: `by_type/parameter/std/Conv2d.weight`."""
    return f"by_type/{site}/{statistic}/{_of_tensor(site, type, tensor)}"


def _of_tensor(site: str, of: str, tensor: str) -> str:
    if not tensor:
        return of
    return f"{of}.{tensor}" if site in _PARAMETER_SITES else f"{of}/{tensor}"

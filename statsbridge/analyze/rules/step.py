"""One step of a training as the rules see it, and what they say of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...log.schema import SITES
from ..findings import Severity
from .known import Flags, Floats, Integers, Known

_SITE_NUMBERS = {name: number for number, name in enumerate(SITES)}


class Fact(NamedTuple):
    """An event of the collector: something that statistics cannot show."""

    kind: str
    module: str | None
    site: str | None
    tensor: str | None
    value: float | None
    threshold: float | None
    message: str


class Rows:
    """Some rows of `stats` of one step: `ids` and the numeric columns, float64 with NaN where null."""

    def __init__(self, ids: Integers, columns: Mapping[str, npt.NDArray[Any]], places: Integers) -> None:
        """`places`: where the rows are in `columns`."""
        self.ids = ids
        self._columns, self._places = columns, places
        self._taken: dict[str, npt.NDArray[Any]] = {}

    def __getitem__(self, name: str) -> Floats:
        values = self._taken.get(name)
        if values is None:
            values = self._taken[name] = self._columns[name][self._places]
        return values

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __len__(self) -> int:
        return len(self.ids)

    def where(self, wanted: Flags | Integers) -> Rows:
        return Rows(self.ids[wanted], self._columns, self._places[wanted])

    @property
    def nonfinite(self) -> Flags:
        """Whether a row has a NaN or an infinity among its elements."""
        flags: Flags = (self["nan_count"] > 0) | (self["inf_count"] > 0)
        return flags

    @property
    def measured(self) -> Flags:
        """Whether a row has numbers."""
        flags: Flags = ~np.isnan(self["l2"])
        return flags


@dataclass(slots=True)
class Step:
    """What was recorded of one step. `rows`: None where it was not sampled. `scalars`: those that rules look at.

    `losses`: the scalars that are losses of the training, which are in `scalars` too.
    """

    step: int
    known: Known
    scalars: Mapping[str, float]
    losses: Mapping[str, float]
    facts: tuple[Fact, ...]
    rows: Rows | None
    _sites: dict[str, Rows] = field(default_factory=dict)
    _leaves: dict[str, Rows] = field(default_factory=dict)

    def site(self, name: str) -> Rows:
        """The rows of one site; only where the step was sampled."""
        assert self.rows is not None
        if name not in self._sites:
            self._sites[name] = self.rows.where(self.known.site[self.rows.ids] == _SITE_NUMBERS[name])
        return self._sites[name]

    def leaves(self, site: str) -> Rows:
        """The measured rows of one site that belong to modules without children; only where it was sampled."""
        if site not in self._leaves:
            rows = self.site(site)
            self._leaves[site] = rows.where(rows.measured & self.known.leaves(rows.ids))
        return self._leaves[site]


#: What a hit's first module is told in: its name as shown, its identity, and the value there.
Say = Callable[[str, int, float], str]


@dataclass(frozen=True, slots=True)
class Hits:
    """Identities for which a rule holds at a step. `since`: the step at which it began for each.

    `backward`: whether it arises from the output towards the input. `causes`: likelier ones than those of the kind.
    """

    kind: str
    severity: Severity
    ids: Integers
    values: Floats
    since: Integers
    threshold: float | None
    say: Say
    backward: bool = False
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong with the training as a whole, or with a module that has no rows."""

    kind: str
    severity: Severity
    since: int
    message: str
    value: float | None = None
    threshold: float | None = None
    module: str | None = None
    site: str | None = None
    tensor: str | None = None
    causes: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()


class Rule(Protocol):
    """Looks at the steps of one training, in order; remembers no more than a bounded amount of each identity."""

    def look(self, step: Step) -> Iterable[Hits | Alarm]: ...


def match(wanted: Integers, there: Integers) -> Integers:
    """The position of each of `wanted` in `there`, which has none twice; -1 where it is not."""
    if not len(there):
        return np.full(len(wanted), -1)
    order = np.argsort(there)
    place = order[np.minimum(np.searchsorted(there, wanted, sorter=order), len(there) - 1)]
    positions: Integers = np.where(there[place] == wanted, place, -1)
    return positions


def shown(name: str) -> str:
    """A module as sentences name it."""
    return f"module {name}" if name else "the model"

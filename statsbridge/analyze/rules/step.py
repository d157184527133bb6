"""One step of a training as the rules see it, and what they say of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ...log.schema import SITES
from ..findings import Severity
from .known import Flags, Floats, Integers, Known
from .layout import Columns, Layout

_SITE_NUMBERS = {name: number for number, name in enumerate(SITES)}
_MOST_MATCHES = 256
_MATCHES: dict[tuple[int, int], tuple[Integers, Integers, Integers]] = {}


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

    __slots__ = ("_columns", "_layout", "_measured", "_nonfinite", "_rows", "_taken", "ids")

    def __init__(self, layout: Layout, columns: Columns, rows: slice) -> None:
        """`rows`: where those of the step are in `columns`."""
        self.ids = layout.ids
        self._layout, self._columns, self._rows = layout, columns, rows
        self._taken: dict[str, Floats] = {}
        self._nonfinite: Flags | None = None
        self._measured: Flags | None = None

    def __getitem__(self, name: str) -> Floats:
        values = self._taken.get(name)
        if values is None:
            values = self._taken[name] = self._columns.of(self._layout, name, self._rows)
        return values

    def __contains__(self, name: str) -> bool:
        return name in self._columns.by_row or name in self._columns.by_identity

    def __len__(self) -> int:
        return len(self.ids)

    def where(self, wanted: Flags | Integers) -> Rows:
        layout = self._layout.where(wanted)
        return self if layout is self._layout else Rows(layout, self._columns, self._rows)

    @property
    def nonfinite(self) -> Flags:
        """Whether a row has a NaN or an infinity among its elements."""
        if self._nonfinite is None:
            self._nonfinite = (self["nan_count"] > 0) | (self["inf_count"] > 0)
        return self._nonfinite

    @property
    def measured(self) -> Flags:
        """Whether a row has numbers."""
        if self._measured is None:
            self._measured = ~np.isnan(self["l2"])
        return self._measured


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
            self._sites[name] = self.rows.where(self.known.of_site(self.rows.ids, _SITE_NUMBERS[name]))
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
    """The position of each of `wanted` in `there`, of the first where it is there twice; -1 where it is not.

    What is read-only stays as it is: for two such arrays the positions are kept.
    """
    if wanted.flags.writeable or there.flags.writeable:
        return _match(wanted, there)
    key = (id(wanted), id(there))
    known = _MATCHES.get(key)
    if known is None or known[0] is not wanted or known[1] is not there:
        if len(_MATCHES) >= _MOST_MATCHES:
            _MATCHES.clear()
        known = _MATCHES[key] = (wanted, there, _match(wanted, there))
    return known[2]


def _match(wanted: Integers, there: Integers) -> Integers:
    if not len(there):
        return np.full(len(wanted), -1)
    order = np.argsort(there, kind="stable")
    place = order[np.minimum(np.searchsorted(there, wanted, sorter=order), len(there) - 1)]
    positions: Integers = np.where(there[place] == wanted, place, -1)
    return positions


def shown(name: str) -> str:
    """A module as sentences name it."""
    return f"module {name}" if name else "the model"

"""What the rows of a step are about. That is the same at most steps, so what follows from it is worked out once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_MOST_TAKEN = 1024
_MOST_PARTS = 64  # of one layout that are kept: where a condition holds for other rows at each step, they are dropped


class Layout:
    """Some rows of a step: whom they are about, and where in the step's rows they are.

    `ids` [rows]: identities; read-only, and the same array for the same rows of another step, which is how `Known`
    and `match` know what they have worked out before. `places` [rows]: None for all rows of the step.
    """

    __slots__ = ("_parts", "ids", "places")

    def __init__(self, ids: Integers, places: Integers | None = None) -> None:
        self.ids, self.places = ids, places
        self.ids.flags.writeable = False
        self._parts: dict[tuple[str, bytes], Layout] = {}

    def where(self, wanted: Flags | Integers) -> Layout:
        """The part that a condition, or a list of places, leaves."""
        key = (wanted.dtype.char, wanted.tobytes())
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) >= _MOST_PARTS:
                self._parts.clear()
            found = self._parts[key] = self._part(wanted)
        return found

    def _part(self, wanted: Flags | Integers) -> Layout:
        if wanted.dtype == np.bool_ and wanted.all():
            return self
        places = np.arange(len(self.ids)) if self.places is None else self.places
        return Layout(self.ids[wanted], places[wanted])


@dataclass(frozen=True, slots=True)
class Columns:
    """The numbers of many rows, step after step, as float64 with NaN where there are none.

    `by_row`: one for each row. `by_identity`: of what is the same in all rows of an identity, one for each of these.
    """

    by_row: Mapping[str, npt.NDArray[Any]]
    by_identity: Mapping[str, npt.NDArray[Any]]
    _taken: dict[tuple[Layout, str], npt.NDArray[Any]] = field(default_factory=dict)

    def of(self, layout: Layout, name: str, rows: slice) -> npt.NDArray[Any]:
        """One number of the rows of a layout, of the step whose rows are given."""
        if name in self.by_row:
            values = self.by_row[name][rows]
            return values if layout.places is None else values[layout.places]
        found = self._taken.get((layout, name))
        if found is None:
            if len(self._taken) >= _MOST_TAKEN:
                self._taken.clear()
            found = self._taken[layout, name] = self.by_identity[name][layout.ids]
        return found

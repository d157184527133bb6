"""What is wrong with a training and does not show in its statistics: facts about modules, parameters and outputs.

Each is told once, and again only after it had gone away. Nothing here fetches a value from an accelerator in the
training thread: what has to be looked at travels with the numbers of the step, and is judged in the background.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """A row of `events` in the making. `module` is its dotted path; `value` is judged against `threshold`."""

    kind: str
    message: str
    module: str
    site: str | None = None
    tensor: str | None = None
    value: float | None = None
    threshold: float | None = None


class Told:
    """Which places a fact has been told of."""

    def __init__(self) -> None:
        self._places: set[Hashable] = set()

    def __contains__(self, place: Hashable) -> bool:
        return place in self._places

    def first(self, place: Hashable) -> bool:
        """Whether it is news there. From now on it is not."""
        known = place in self._places
        self._places.add(place)
        return not known

    def gone(self, places: Iterable[Hashable]) -> None:
        """It does not hold there any more: it will be news again."""
        self._places.difference_update(places)

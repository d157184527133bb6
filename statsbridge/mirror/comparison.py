"""Values as recorded against values as they lie in a tracker's store: every one, bit for bit."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from .identities import Floats, Integers

Kind = Literal[
    "missing", "extra", "different", "duplicated", "unreadable", "altered", "rejected", "superseded", "not_yet_sent"
]

DOCUMENTED = frozenset({"altered", "rejected", "superseded", "not_yet_sent"})
"""Differences that have a known cause which the run folder or the adapter states."""

# The coarsest clock among trackers: MLflow keeps whole milliseconds.
TIME_TOLERANCE = 1000  # microseconds
NO_TIME = np.iinfo(np.int64).min

_TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    {
        "kind": pa.string(),
        "key": pa.string(),
        "series": pa.string(),
        "step": pa.int64(),
        "recorded": pa.float64(),
        "found": pa.float64(),
        "recorded_time": _TIME,
        "found_time": _TIME,
        "reason": pa.string(),
    }
)
"""A row for each difference. `key`: the tracker's name of the curve; `series`: ours."""


class Expected(NamedTuple):
    """One value that the tracker should have. `stored`: what it is documented to make of `value`."""

    series: str
    time: int
    value: float
    stored: float
    sent: bool
    refused: str | None


class Found(NamedTuple):
    """One value that the tracker has. `time`: None where it keeps none."""

    time: int | None
    value: float


@dataclass(frozen=True, slots=True)
class Columns:
    """Values in columns that grow, in as little memory as arrays take: number of the key, step, time, value."""

    key: array[int] = field(default_factory=lambda: array("q"))
    step: array[int] = field(default_factory=lambda: array("q"))
    time: array[int] = field(default_factory=lambda: array("q"))
    value: array[float] = field(default_factory=lambda: array("d"))

    def add(self, key: int, step: int, time: int, value: float) -> None:
        """One more value."""
        self.key.append(key)
        self.step.append(step)
        self.time.append(time)
        self.value.append(value)

    def arrays(self) -> tuple[Integers, Integers, Integers, Floats]:
        """All of them."""
        key, step, time = (np.array(column, np.int64) for column in (self.key, self.step, self.time))
        return key, step, time, np.array(self.value, np.float64)


def bits(values: Floats) -> Integers:
    """The bits of floats: equal for all NaNs, different for 0.0 and -0.0."""
    canonical = np.where(np.isnan(values), np.nan, values)
    found: Integers = canonical.view(np.int64)
    return found


def bits_of(value: float) -> int:
    """`bits` of one float."""
    return int.from_bytes(struct.pack("<d", math.nan if math.isnan(value) else value), "little", signed=True)


def near_in_time(recorded: int, found: int | None) -> bool:
    """Whether two times are the same as far as a tracker tells, which may keep none."""
    return found is None or abs(recorded - found) < TIME_TOLERANCE


def compare_step(
    key: str, step: int, expected: list[Expected], found: list[Found], *, keeps_all: bool
) -> Iterator[dict[str, Any]]:
    """The differences of one key at one step; `expected` in the order of sending.

    Of values that a tracker keeps only the last of, that one is compared and the others are superseded.
    """
    matched, rest = _match(expected, found)
    for place, there in matched.items():
        if bits_of(expected[place].value) != bits_of(expected[place].stored):
            yield _row("altered", key, step, expected[place], there, "the tracker keeps such values in this form")
    twins = {(bits_of(there.value), there.time) for there in matched.values()}
    taken = [place for place, one in enumerate(expected) if one.refused is None and (one.sent or place in matched)]
    last = -1 if keeps_all else max(taken, default=-1)
    due: list[Expected] = []
    for place, one in enumerate(expected):
        if place in matched:
            continue
        kind, reason = _explained(one, twins, overwritten=place < last)
        if kind is None:
            due.append(one)
        else:
            yield _row(kind, key, step, one, None, reason)
    left = [there for there in rest if (bits_of(there.value), there.time) not in twins]
    for there in rest:
        if (bits_of(there.value), there.time) in twins:
            yield _row("duplicated", key, step, None, there, "the same value is there once more")
    yield from _unexplained(key, step, due, left, {same for same, _ in twins})


def _unexplained(
    key: str, step: int, due: list[Expected], left: list[Found], there_already: set[int]
) -> Iterator[dict[str, Any]]:
    """Values that should be there, against what is there and should not. `there_already`: bits of those in order."""
    for one in due:
        likeliest = _likeliest(one, left)
        if likeliest is None:
            yield _row("missing", key, step, one, None, "the tracker does not have it")
        else:
            left.remove(likeliest)
            what = "time" if bits_of(one.stored) == bits_of(likeliest.value) else "value"
            yield _row("different", key, step, one, likeliest, f"another {what}")
    for there in left:
        if bits_of(there.value) in there_already:
            yield _row("duplicated", key, step, None, there, "the same value is there once more, at another time")
        else:
            yield _row("extra", key, step, None, there, "the record does not have it")


def _match(expected: list[Expected], found: list[Found]) -> tuple[dict[int, Found], list[Found]]:
    """Place in `expected` → what is found just so; and what is found besides."""
    rest: dict[int, list[Found]] = {}
    for there in found:
        rest.setdefault(bits_of(there.value), []).append(there)
    matched: dict[int, Found] = {}
    for place, one in enumerate(expected):
        same = [there for there in rest.get(bits_of(one.stored), ()) if near_in_time(one.time, there.time)]
        if same:
            matched[place] = min(same, key=lambda there: abs((there.time or one.time) - one.time))
            rest[bits_of(one.stored)].remove(matched[place])
    return matched, [there for group in rest.values() for there in group]


def _explained(one: Expected, twins: set[tuple[int, int | None]], *, overwritten: bool) -> tuple[Kind | None, str]:
    """Why a value need not be there, if there is a reason. `twins`: (bits, time) of the values that are."""
    if one.refused is not None:
        return "rejected", one.refused
    if overwritten:
        return "superseded", "the tracker keeps the last value of a step"
    if any(same == bits_of(one.stored) and near_in_time(one.time, time) for same, time in twins):
        return "superseded", "an equal value of the same moment stands for both"
    if not one.sent:
        return "not_yet_sent", "statsbridge sync delivers it"
    return None, ""


def _likeliest(one: Expected, rest: list[Found]) -> Found | None:
    """Of what is left that which is most probably this value, changed."""
    same_time = [there for there in rest if there.time is not None and near_in_time(one.time, there.time)]
    same_value = [there for there in rest if bits_of(one.stored) == bits_of(there.value)]
    return next(iter([*same_time, *same_value, *rest]), None)


def _row(kind: Kind, key: str, step: int, one: Expected | None, there: Found | None, reason: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "key": key,
        "series": None if one is None else one.series,
        "step": step,
        "recorded": None if one is None else one.value,
        "found": None if there is None else there.value,
        "recorded_time": None if one is None else one.time,
        "found_time": None if there is None else there.time,
        "reason": reason,
    }


def as_table(rows: Iterable[dict[str, Any]]) -> pa.Table:
    """The differences as a table, by key and step."""
    table = pa.Table.from_pylist(list(rows), schema=SCHEMA)
    return table.sort_by([("key", "ascending"), ("step", "ascending")])

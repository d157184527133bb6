"""Whether a tracker's store holds just what was recorded: the whole record against the whole store."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..backends import LOCAL, make_adapters
from ..errors import ConfigError, LogError, MirrorError, Retry, StatsBridgeError
from ..log.attempts import Superseded, read_attempts
from ..log.schema import as_text
from .comparison import (
    DOCUMENTED,
    NO_TIME,
    TIME_TOLERANCE,
    Columns,
    Expected,
    Found,
    as_table,
    bits,
    bits_of,
    compare_step,
)
from .contract import Adapter, Point, Series
from .dead_letters import read_dead_letters
from .gate import Gate
from .identities import Floats, Integers
from .mirrors import destination_of, old_plan
from .policy import load_policy
from .selector import Selector
from .sending import Plan
from .state import Damaged, MirrorState, mirror_name, readable_states
from .tail import Tail


@dataclass(frozen=True, slots=True)
class Verification:
    """One mirror against the record.

    `compared`: values that the record says the tracker should have. `same`: those it has just so.
    `differences`: see `comparison.SCHEMA`. `counts`: kind of difference → how many. `superseded`: of the values
    compared, those of an attempt at the run that a later one has superseded: the tracker was sent both.
    """

    backend: str
    address: str
    compared: int
    same: int
    differences: pa.Table
    counts: Mapping[str, int]
    superseded: int = 0

    @property
    def proved(self) -> bool:
        """Whether every difference has a documented cause."""
        return DOCUMENTED.issuperset(self.counts)


def verify(run: Path, against: str) -> list[Verification]:
    """Compare the mirrors of the run at `run` that are at `against` with its record. Changes neither.

    Every point is compared: what the policy and the selection of the mirror let out, against all that the
    tracker's store has of it. Values must be the same bits (all NaNs are equal, 0.0 and -0.0 are not), unless
    the adapter documents what its tracker makes of them; times must agree within a millisecond where the
    tracker keeps them. Histograms, figures, alerts and artifacts are not compared.

    Args:
        run: the run's folder.
        against: `"backend"` for all mirrors of the run there, or `"backend:target"` for one.

    A mirror of which nothing can be compared, for example because its file is damaged, bars no other one: it has one
    difference, `unreadable`.

    Raises ConfigError where the run has no such mirror; and where none of them can be compared UnknownBackendError,
    PolicyError where the policy forbids to go there, LogError where the record cannot be read, Retry where the store
    cannot be reached.
    """
    policy = load_policy()
    states, damaged = _states(run, against)
    results: list[Verification] = []
    errors: list[StatsBridgeError] = [LogError(one.reason) for one in damaged]
    for state in states:
        try:
            results.append(_verified(run, old_plan(run, state, policy)))
        except StatsBridgeError as error:
            errors.append(error)
            results.append(_nothing(state.backend, state.destination.address, str(error)))
    results += [_nothing(one.backend, "", one.reason) for one in damaged]
    if len(errors) == len(results):
        raise errors[-1]
    return results


def _nothing(backend: str, address: str, reason: str) -> Verification:
    """Of a mirror of which nothing can be compared."""
    return Verification(
        backend, address, 0, 0, as_table([{"kind": "unreadable", "reason": as_text(reason)}]), {"unreadable": 1}
    )


def _states(run: Path, against: str) -> tuple[list[MirrorState], list[Damaged]]:
    states, damaged = readable_states(run)
    backend, _, target = against.partition(":")
    if backend == LOCAL:
        raise ConfigError(f"{LOCAL} is the record itself: give a tracker's name")
    found = [state for state in states if state.backend == backend]
    lost = [one for one in damaged if one.backend == backend]
    if target:
        name = mirror_name(destination_of(make_adapters(against)[0]))
        found = [state for state in found if state.name == name]
        lost = [one for one in lost if one.name == name]
    if not found and not lost:
        there = ", ".join(f"{state.backend} ({state.destination.address})" for state in states)
        raise ConfigError(
            f"run {run.name} has no mirror at {against}; "
            + "; ".join([f"it has {there or 'none'}", *(one.reason for one in damaged)])
        )
    return found, lost


def _verified(run: Path, plan: Plan) -> Verification:
    keys: dict[str, int] = {}
    # The store first: what it has is on disk before, so the record read after it covers all of it.
    found, unreadable = _found(plan, keys)
    refusals = _refusals(run, plan.state.name, unreadable)
    record = _Record(plan.adapter, keys, refusals, Superseded(read_attempts(run)))
    unreadable += record.read(run, plan)
    rows = [{"kind": "unreadable", "reason": as_text(text)} for text in unreadable]
    nothing_read = bool(unreadable) and not len(found[0])
    if not nothing_read:
        rows += _differences(record, found, list(keys), keeps_all=plan.adapter.keeps == "all")
    differences = as_table(rows)
    counts = {row["values"]: row["counts"] for row in differences["kind"].value_counts().to_pylist()}
    compared = record.count
    not_same = sum(counts.get(kind, 0) for kind in ("missing", "different", *DOCUMENTED))
    same = 0 if nothing_read else compared - not_same
    return Verification(
        plan.destination.backend, plan.state.destination.address, compared, same, differences, counts, record.superseded
    )


def _found(plan: Plan, keys: dict[str, int]) -> tuple[tuple[Integers, Integers, Integers, Floats], list[str]]:
    """All that the store has, and what of it cannot be read."""
    columns = Columns()
    unreadable: list[str] = []
    info = plan.gate.info(plan.info)
    try:
        for reading in plan.adapter.read_back(info, plan.destination, plan.state.memory):
            time = NO_TIME if reading.time is None else reading.time
            columns.add(keys.setdefault(reading.key, len(keys)), reading.step, time, reading.value)
    except Retry:
        raise
    except MirrorError as error:
        unreadable.append(f"{plan.title}: {error}")
    return columns.arrays(), unreadable


_Refusals = dict[tuple[str, int, int, int], str]


def _refusals(run: Path, mirror: str, unreadable: list[str]) -> _Refusals:
    """(series, step, time, bits of the value) → why the tracker did not take it; adds what cannot be read."""
    letters = read_dead_letters(run, mirror, unreadable)
    letters = letters.filter(letters["value"].is_valid())
    values = bits(letters["value"].to_numpy()).tolist()
    names, steps = letters["series"].to_pylist(), letters["step"].to_pylist()
    times, reasons = letters["time"].cast(pa.int64()).to_pylist(), letters["reason"].to_pylist()
    return dict(zip(zip(names, steps, times, values, strict=True), reasons, strict=True))


class _Record:
    """What the tracker should have, in the order of sending."""

    def __init__(self, adapter: Adapter, keys: dict[str, int], refusals: _Refusals, attempts: Superseded) -> None:
        self._adapter = adapter
        self._attempts = attempts
        self._keys = keys
        self._refusals = refusals
        self._columns = Columns()
        self._stored = array("d")
        self._series: dict[int, tuple[Series, int]] = {}
        self._name_of_key: dict[int, str] = {}
        self._reasons: dict[int, str] = {}
        self.count = 0
        self.sent = 0
        self.superseded = 0

    def read(self, run: Path, plan: Plan) -> list[str]:
        """Take all that is recorded, as the mirror does; returns what cannot be read of it."""
        selector, gate = Selector(plan.state.selection), plan.gate
        before = Tail(run, until=plan.state.cursor)
        self._take(before, selector, gate)
        self.sent = self.count
        after = Tail(run, cursor=plan.state.cursor)
        self._take(after, selector, gate)
        return [f"the record: {rows} rows: {text}" for tail in (before, after) for text, rows in tail.lost()]

    def _take(self, tail: Tail, selector: Selector, gate: Gate) -> None:
        while (chunk := tail.read(final=True)) is not None:
            for batch in selector.add(gate.chunk(chunk)):
                last = self._attempts.last_step(batch.attempt)
                self.superseded += sum(point.step > last for point in batch.points)
                for point in batch.points:
                    self._add(point)

    def _add(self, point: Point) -> None:
        self._columns.add(self._key(point.series), point.step, point.time, point.value)
        self._stored.append(self._adapter.stored(point.value))
        if self._refusals:
            about = (point.series.name, point.step, point.time, bits_of(point.value))
            if about in self._refusals:
                self._reasons[self.count] = self._refusals[about]
        self.count += 1

    def _key(self, series: Series) -> int:
        # The series itself is kept too, so that no other one can get its id.
        known = self._series.get(id(series))
        if known is None:
            key = self._adapter.key(series)
            known = self._series[id(series)] = (series, self._keys.setdefault(key, len(self._keys)))
            self._name_of_key[known[1]] = series.name
        return known[1]

    def arrays(self) -> tuple[Integers, Integers, Integers, Floats, Floats]:
        """key, step, time, value and what the tracker makes of it, of all values."""
        return *self._columns.arrays(), np.array(self._stored, np.float64)

    def expected(self, number: int, time: int, value: float, stored: float, key: int) -> Expected:
        """The value of that number, whole."""
        name = self._name_of_key[key]
        return Expected(name, time, value, stored, number < self.sent, self._reasons.get(number))


def _differences(
    record: _Record, found: tuple[Integers, Integers, Integers, Floats], keys: list[str], *, keeps_all: bool
) -> Iterator[dict[str, Any]]:
    """All differences, by key and step. What is there once, as it should be, is settled for all at once."""
    key, step, time, value, stored = record.arrays()
    found_key, found_step, found_time, found_value = found
    places = _places(np.concatenate((key, found_key)), np.concatenate((step, found_step)))
    place, found_place = places[: len(key)], places[len(key) :]
    size = int(places.max(initial=-1)) + 1
    once = (np.bincount(place, minlength=size) == 1) & (np.bincount(found_place, minlength=size) == 1)
    one, other = np.full(size, -1), np.full(size, -1)
    one[place], other[found_place] = np.arange(len(key)), np.arange(len(found_key))
    a, b = one[once], other[once]
    near = (found_time[b] == NO_TIME) | (np.abs(time[a] - found_time[b]) < TIME_TOLERANCE)
    settled = np.zeros(size, bool)
    settled[np.flatnonzero(once)] = (
        near & (bits(stored[a]) == bits(found_value[b])) & (bits(value[a]) == bits(stored[a]))
    )
    expected = _by_place(place, ~settled)
    there = _by_place(found_place, ~settled)
    for at in sorted({*expected, *there}):
        numbers, others = expected.get(at, []), there.get(at, [])
        number = int(key[numbers[0]] if numbers else found_key[others[0]])
        label = int(step[numbers[0]] if numbers else found_step[others[0]])
        yield from compare_step(
            keys[number],
            label,
            [record.expected(n, int(time[n]), float(value[n]), float(stored[n]), number) for n in numbers],
            [Found(_time_or_none(int(found_time[n])), float(found_value[n])) for n in others],
            keeps_all=keeps_all,
        )


def _places(key: Integers, step: Integers) -> Integers:
    """A number for each (key, step), ascending by key, then step."""
    steps, code = np.unique(step, return_inverse=True)
    places: Integers = np.unique(key * max(1, len(steps)) + code, return_inverse=True)[1]
    return places


def _by_place(place: Integers, wanted: np.ndarray) -> dict[int, list[int]]:
    """Place → the numbers of its values, in their order, for the places that are wanted."""
    found: dict[int, list[int]] = {}
    for number in np.flatnonzero(wanted[place]).tolist() if len(place) else ():
        found.setdefault(int(place[number]), []).append(number)
    return found


def _time_or_none(time: int) -> int | None:
    return None if time == NO_TIME else time


def proved(results: Iterable[Verification]) -> bool:
    """Whether all of them are."""
    return all(result.proved for result in results)

"""The runs that the page may show, and the few of them that are kept open."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from ...analyze.run_data import RunData, load
from ...errors import LogError
from ...log.attempts import EVERYTHING, Superseded, attempt_numbers, read_attempts
from ...log.parts import Part, distinct_steps, glance, list_parts, live_parts
from ...log.runs import read_info, run_state, runs_in
from ...log.schema import SCHEMAS

KEPT_RUNS = 24
"""Runs kept open, of small ones: twenty that are compared, and those one comes from."""
_ROWS = 1_000_000
"""Rows of `stats` that count as much as one more run."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """The values that were used last, up to a total weight; safe to use from several threads."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Key, tuple[Value, float]] = OrderedDict()
        self._lock = threading.Lock()
        self._making: dict[Key, threading.Lock] = {}

    def get(self, key: Key) -> Value | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Key, value: Value, weight: float = 1.0) -> None:
        """Keep `value`; what was not used for longest makes room. One entry is kept, however heavy."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = (value, weight)
            while len(self._entries) > 1 and sum(taken for _, taken in self._entries.values()) > self._capacity:
                self._entries.popitem(last=False)

    def made(self, key: Key, make: Callable[[], Value]) -> Value:
        """What is kept, or what `make` gives. Of several that ask for it at the same time one makes it."""
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        try:
            with making:
                value = self.get(key)
                if value is None:
                    value = make()
                    self.put(key, value)
                return value
        finally:
            with self._lock:
                self._making.pop(key, None)


@dataclass(frozen=True, slots=True)
class Listed:
    """One run in the list of runs. `findings`: severity → how many events of that severity it has."""

    id: str
    name: str
    state: str
    created: str
    steps: int
    sampled_steps: int
    bytes: int
    restricted: bool
    findings: Mapping[str, int] = field(default_factory=dict)


class Library:
    """The runs of one folder. A name that is not in its listing is refused, wherever it points."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: Recent[str, tuple[RunData, str]] = Recent(KEPT_RUNS)
        self._listed: Recent[str, tuple[str, Listed]] = Recent(1000)
        self._loading = threading.Lock()

    def ids(self) -> list[str]:
        """The ids of the runs, the newest first."""
        return [path.name for path in reversed(runs_in(self.folder))]

    def path(self, run: str) -> Path:
        """The folder of a run. Raises LogError where it is none of the runs listed."""
        if run not in self.ids():
            raise LogError(f"no run {run!r} in {self.folder}: choose one of the list")
        return self.folder / run

    def version(self, run: str) -> str:
        """A text that changes whenever there is something new of the run; only names in folders are looked at."""
        return _version(self.path(run))

    def open(self, run: str) -> tuple[RunData, str]:
        """The run as it is now, and its version: the same object until something new was written. Raises LogError."""
        path = self.path(run)
        version = _version(path)
        kept = self._open.get(run)
        if kept is not None and kept[1] == version:
            return kept
        # One at a time: two clicks must not read the same run twice.
        with self._loading:
            kept = self._open.get(run)
            if kept is None or kept[1] != version:
                kept = (load(path), version)
                self._open.put(run, kept, 1.0 + rows_of(path) / _ROWS)
            return kept

    def state(self, run: str) -> str:
        """Whether a run is running, finished, …"""
        return run_state(self.path(run))

    def name(self, run: str) -> str:
        """What the user called a run; its id where that cannot be read."""
        try:
            return str(read_info(self.path(run))["name"])
        except LogError:
            return run

    def listing(self) -> list[Listed]:
        """All runs, the newest first. Of a run that has not changed nothing is read again."""
        found = []
        for path in reversed(runs_in(self.folder)):
            version = _version(path)
            kept = self._listed.get(path.name)
            if kept is None or kept[0] != version:
                kept = (version, _listed(path))
                self._listed.put(path.name, kept)
            found.append(kept[1])
        return found


def rows_of(path: Path) -> int:
    """How many rows of `stats` a run has. Only names are looked at."""
    return sum(part.rows for part in live_parts(path, "stats"))


def _version(path: Path) -> str:
    told = [run_state(path)]
    with suppress(OSError):
        told.append(str(len(attempt_numbers(path))))
    for table in SCHEMAS:
        parts = list_parts(path, table)
        # Merging parts changes their number and nothing that there is to see.
        ends = {part.rank: part.last for part in sorted(parts, key=lambda part: part.last)}
        told.append(",".join(map(str, ends.values())))
    return ";".join(told)


def _listed(path: Path) -> Listed:
    try:
        info = read_info(path)
    except LogError:
        return Listed(path.name, path.name, "unreadable", "", 0, 0, 0, False)
    superseded = EVERYTHING
    with suppress(LogError):
        superseded = Superseded(read_attempts(path))
    parts = {table: live_parts(path, table) for table in SCHEMAS}
    return Listed(
        id=path.name,
        name=str(info["name"]),
        state=run_state(path),
        created=str(info["created"])[:19].replace("T", " "),
        steps=distinct_steps(_of_lowest_rank(parts["scalars"]), superseded),
        sampled_steps=distinct_steps(_of_lowest_rank(parts["stats"]), superseded),
        bytes=sum(part.size for found in parts.values() for part in found),
        restricted=bool(info.get("restricted")),
        findings=_severities(parts["events"], superseded),
    )


def _of_lowest_rank(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.rank == parts[0].rank]


def _severities(parts: Sequence[Part], superseded: Superseded) -> Mapping[str, int]:
    counted: Counter[str] = Counter()
    for part in parts:
        rows = glance(part, ["attempt", "step", "severity"])
        if rows is not None:
            counted.update(text for text in superseded.drop(rows)["severity"].to_pylist() if text is not None)
    return counted

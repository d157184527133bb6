"""Attempts: the processes that, one after the other, have written one run, and what a later one supersedes.

The first attempt, 0, has no file. Each later one has `attempts/<number>.json`, on disk before its first row.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import LogError

FOLDER = "attempts"

_NAME = re.compile(r"(?P<number>[1-9]\d*)\.json")
_INTEGERS = np.iinfo(np.int64)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a run that was begun before.

    `first_step`: the label of its first step, from which on earlier attempts do not count. `config`: the user's,
    as given when it was resumed. `information`: how it was recorded (versions, sampling, sites, …).
    """

    number: int
    first_step: int
    started: str  # ISO 8601, UTC
    config: Mapping[str, Any] = field(default_factory=dict)
    information: Mapping[str, Any] = field(default_factory=dict)


def attempt_file(run: Path, number: int) -> Path:
    """The file that says of attempt `number` (1, 2, …) that it has begun."""
    return run / FOLDER / f"{number}.json"


def attempt_numbers(run: Path) -> list[int]:
    """The numbers of the attempts after the first, ascending. Only names are looked at. Raises OSError."""
    try:
        names = os.listdir(run / FOLDER)
    except FileNotFoundError:
        return []
    return sorted(int(found["number"]) for name in names if (found := _NAME.fullmatch(name)))


def read_attempts(run: Path) -> tuple[Attempt, ...]:
    """The attempts after the first, in order. Raises LogError where one's file cannot be read."""
    try:
        numbers = attempt_numbers(run)
    except OSError as error:
        raise LogError(f"{run / FOLDER} cannot be read: {error.strerror or error}") from error
    return tuple(_read(attempt_file(run, number), number) for number in numbers)


def _read(file: Path, number: int) -> Attempt:
    try:
        raw = json.loads(file.read_bytes())
        known = {name: raw[name] for name in ("config", "information") if name in raw}
        return Attempt(number, int(raw["first_step"]), str(raw["started"]), **known)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LogError(
            f"{file} cannot be read, so it is not known which rows count: {error}. "
            'load(path, attempts="all") reads all of them'
        ) from error


@dataclass(frozen=True, slots=True)
class Superseded:
    """Which rows of a run a later attempt has superseded: those of earlier ones from its first step on.

    Rows without a step are never superseded.
    """

    attempts: Sequence[Attempt] = ()

    def drop(self, rows: pa.Table) -> pa.Table:
        """`rows`, which have the columns `attempt` and `step`, without those that do not count."""
        if not self.attempts or rows.num_rows == 0:
            return rows
        numbers, last = self._last_steps()
        attempt = rows["attempt"].to_numpy()
        step = pc.fill_null(rows["step"], _INTEGERS.min).to_numpy()
        kept = step <= last[np.searchsorted(numbers, attempt, side="right")]
        return rows if kept.all() else rows.filter(pa.array(kept))

    def last_step(self, attempt: int) -> int:
        """The last step of `attempt` that counts, if it was recorded."""
        numbers, last = self._last_steps()
        return int(last[np.searchsorted(numbers, attempt, side="right")])

    def condition(self) -> str | None:
        """The same as a condition in SQL; None where every row counts."""
        later = [f"(attempt >= {one.number} OR step < {one.first_step})" for one in self.attempts]
        return f"step IS NULL OR ({' AND '.join(later)})" if later else None

    def _last_steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the attempts after the first; the last step that counts of those before each, and of the last."""
        numbers = np.array([one.number for one in self.attempts], np.int64)
        first = np.array([one.first_step for one in self.attempts], np.int64)
        # The least of an attempt and all after it.
        least = np.minimum.accumulate(first[::-1])[::-1] - 1
        return numbers, np.append(least, _INTEGERS.max)


EVERYTHING = Superseded()
"""Every row counts."""

"""Scalars of a chunk as points: each under its own name, and beside it its moving average."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..analyze.smoothing import MovingAverage
from .contract import Series
from .curves import LEFT_OUT, UNSEEN, Curves
from .identities import Floats, Integers, integers

SMOOTHED = "/smoothed"
_LEARNING_RATES = "lr/"


@dataclass(frozen=True, slots=True)
class ScalarRows:
    """The rows of one chunk's `scalars`, one entry of each array a row.

    `position`: the training step in whose course the row was written; `step`: the one it was written for.
    `regular`: whether `run.step` wrote it. `name` numbers `names`.
    """

    attempt: Integers
    position: Integers
    step: Integers
    time: Integers
    regular: np.ndarray
    name: Integers
    names: list[str]
    value: Floats
    valid: np.ndarray


@dataclass(slots=True)
class _Curve:
    raw: int = UNSEEN
    smoothed: int = UNSEEN
    average: MovingAverage | None = None
    attempt: int = -1


@dataclass(slots=True)
class ScalarCurves:
    """The curves of scalars so far, and where in the training the last row stood."""

    curves: Curves
    smoothing: float | None
    _known: dict[str, _Curve] = field(default_factory=dict)
    _attempt: int = -1
    _step: int | None = None

    def rows(self, scalars: pa.Table) -> ScalarRows:
        """The rows of a `scalars` table, which follow those of the last call."""
        name = scalars["name"].combine_chunks().cast(pa.string()).dictionary_encode()
        attempt, step = integers(scalars["attempt"]), integers(scalars["step"])
        regular = pc.is_valid(scalars["iteration"]).to_numpy()
        return ScalarRows(
            attempt=attempt,
            position=self._positions(attempt, step, regular),
            step=step,
            time=integers(scalars["time"].cast(pa.int64())),
            regular=regular,
            name=pc.fill_null(name.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64),
            names=name.dictionary.to_pylist(),
            value=pc.fill_null(scalars["value"], math.nan).to_numpy(),
            valid=pc.and_(pc.is_valid(scalars["value"]), pc.is_valid(scalars["name"])).to_numpy(),
        )

    def _positions(self, attempt: Integers, step: Integers, regular: np.ndarray) -> Integers:
        """Of each row the step that `run.step` closed last before it, or with it."""
        position = np.empty_like(step)
        bounds = np.flatnonzero(np.diff(attempt)) + 1
        for rows in np.split(np.arange(len(step)), bounds):
            if not len(rows):
                continue
            if attempt[rows[0]] != self._attempt:
                self._attempt, self._step = int(attempt[rows[0]]), None
            closed = np.where(regular[rows], step[rows], np.iinfo(np.int64).min)
            if self._step is not None:
                closed[0] = max(closed[0], self._step)
            reached = np.maximum.accumulate(closed)
            before = reached == np.iinfo(np.int64).min
            # Before the first step there is nothing to be late for.
            position[rows] = np.where(before, step[rows], reached)
            if not before[-1]:
                self._step = int(reached[-1])
        return position

    def begin(self, rows: ScalarRows, chosen: Integers) -> None:
        """Make the curves of rows of one step that have none yet: raw ones first."""
        for row in chosen.tolist():
            curve = self._known.setdefault(rows.names[rows.name[row]], _Curve())
            if curve.raw == UNSEEN:
                name = rows.names[rows.name[row]]
                curve.raw = self.curves.scalar(Series(name, "scalar"))
        for row in chosen.tolist():
            name = rows.names[rows.name[row]]
            curve = self._known[name]
            if curve.smoothed == UNSEEN and self._is_smoothed(name) and rows.regular[row]:
                smoothed = Series(name + SMOOTHED, "scalar", smoothing=self.smoothing)
                curve.smoothed = LEFT_OUT if curve.raw == LEFT_OUT else self.curves.scalar(smoothed)

    def unseen(self, rows: ScalarRows) -> Integers:
        """The rows that may begin a curve: the first of their name, and the first that `run.step` wrote."""
        found: list[int] = []
        for regular in (False, True):
            among = np.flatnonzero(rows.valid & rows.regular) if regular else np.flatnonzero(rows.valid)
            names, first = np.unique(rows.name[among], return_index=True)
            for name, row in zip(names.tolist(), among[first].tolist(), strict=True):
                curve = self._known.get(rows.names[name])
                new = curve is None or (regular and curve.smoothed == UNSEEN and self._is_smoothed(rows.names[name]))
                if new:
                    found.append(row)
        return np.unique(np.array(found, np.int64))

    def numbers(self, rows: ScalarRows) -> Integers:
        """Of each row the number of its curve, LEFT_OUT where it has none."""
        of_name = [curve.raw if (curve := self._known.get(name)) else LEFT_OUT for name in rows.names]
        return np.where(rows.valid, np.array([*of_name, LEFT_OUT], np.int64)[rows.name], LEFT_OUT)

    def smoothed(self, rows: ScalarRows) -> tuple[Integers, Floats]:
        """Of each row the number of the curve of its average (LEFT_OUT: none), and the average with it."""
        numbers = np.full(len(rows.step), LEFT_OUT, np.int64)
        values = np.full(len(rows.step), math.nan)
        if self.smoothing is None:
            return numbers, values
        for code, name in enumerate(rows.names):
            curve = self._known.get(name)
            if curve is None or curve.smoothed < 0:
                continue
            own = np.flatnonzero((rows.name == code) & rows.regular & rows.valid)
            attempts, numbers_of_rows = rows.attempt[own].tolist(), rows.value[own].tolist()
            averages = []
            for attempt, value in zip(attempts, numbers_of_rows, strict=True):
                if curve.average is None or curve.attempt != attempt:
                    # A resumed run goes back to an earlier step, whose average knew nothing of the later ones.
                    curve.average, curve.attempt = MovingAverage(self.smoothing), attempt
                averages.append(curve.average.add(value))
            values[own] = averages
            numbers[own] = np.where(np.isnan(values[own]), LEFT_OUT, curve.smoothed)
        return numbers, values

    def _is_smoothed(self, name: str) -> bool:
        return self.smoothing is not None and not name.startswith(_LEARNING_RATES)

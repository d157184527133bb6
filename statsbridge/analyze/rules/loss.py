"""The course of the loss: spikes, no progress, oscillation, and where it starts."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from itertools import islice

import numpy as np

from ..thresholds import Thresholds
from .step import Alarm, Step

_WINDOW = 50  # steps that the running median is over
_FIRST = 10  # losses that make the start, as many as make the present
_LEAST = 20  # losses before anything is said of their course
_PATIENCE = 100  # losses for which the present must be no lower than the start
_OSCILLATING = 30  # losses that oscillation is judged by


class RunningMedian:
    """The median and the spread of the last finite values, at most `window` of them."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        if len(self._values) == self._window:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        return self._quantile(0.5)

    @property
    def spread(self) -> float:
        """The standard deviation of a Gaussian with the same quartiles: (Q3 − Q1) / 1.349."""
        return (self._quantile(0.75) - self._quantile(0.25)) / 1.349

    @property
    def highest(self) -> float:
        return self._sorted[-1]

    def _quantile(self, share: float) -> float:
        place = share * (len(self._sorted) - 1)
        below = int(place)
        above = min(below + 1, len(self._sorted) - 1)
        return self._sorted[below] + (place - below) * (self._sorted[above] - self._sorted[below])


class LossSpike:
    """A loss far above its running median: by a factor, by its spread, beyond earlier ones, by what matters at all."""

    def __init__(self, limits: Thresholds) -> None:
        self._factor = limits.loss_spike
        self._running = RunningMedian(_WINDOW)
        self._start = 0.0

    def look(self, step: Step) -> Iterator[Alarm]:
        value = step.losses.get("loss")
        if value is None or not math.isfinite(value):
            return
        running = self._running
        if len(running) >= _FIRST:
            median = running.median
            self._start = self._start or abs(median)
            jump = value - median
            if (
                self._start  # so far it was 0: no loss is many times as large
                and jump > (self._factor - 1) * abs(median)
                and jump > 8 * running.spread
                and jump > (0.2 if median else 1.0) * self._start  # a hinge loss at its floor jumps as a rule
                and jump > 2 * (running.highest - median)
                and len(running) >= _LEAST
            ):
                yield Alarm(
                    "loss_spike",
                    "warning",
                    step.step,
                    f"the loss is {value:.4g}, and {median:.4g} was its median over the {len(running)} steps before: "
                    f"more than {self._factor:g} times as much",
                    value=value,
                    threshold=self._factor * abs(median),
                )
        running.add(value)


class LossCourse:
    """A loss that does not fall, stands still, or swings to and fro.

    Where several optimizers step, each has a loss of its own, as in adversarial training: only standing still is odd.

    `from_the_start`: whether the training's first losses are seen. Where they are not, as in a process that resumes
    it, a loss that has long converged would seem not to fall.
    """

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._guess = None if limits.classes is None or limits.classes < 2 else math.log(limits.classes)
        self._count = 0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=_OSCILLATING)
        self._range = (math.inf, -math.inf)
        self._stuck = 0
        self._swinging: tuple[int, int] | None = None  # losses, and step, when it began
        self._begun = 0
        self._since = 0
        self.from_the_start = True

    def look(self, step: Step) -> Iterator[Alarm]:
        value = step.losses.get("loss")
        if value is None or not math.isfinite(value):
            return
        self._count += 1
        if len(self._first) < _FIRST:
            self._begun = step.step if not self._first else self._begun
            self._first.append(value)
        self._last.append(value)
        self._range = (min(self._range[0], value), max(self._range[1], value))
        if self._count < _LEAST:
            return
        if self.from_the_start:
            yield from self._flat(step.step)
        if len({name.split("/")[1] for name in step.scalars if name.count("/") == 2 and name.startswith("lr/")}) < 2:
            if self.from_the_start:
                yield from self._progress(step.step)
            yield from self._oscillation(step.step)

    def _flat(self, step: int) -> Iterator[Alarm]:
        low, high = self._range
        largest = max(abs(low), abs(high))
        if self._count == _LEAST and high - low <= self._limits.loss_flat * largest:
            yield Alarm(
                "loss_flat",
                "warning",
                self._begun,
                f"the loss has been {high:.6g} from the start: over {self._count} steps it moved by "
                f"{(high - low) / largest if largest else 0:.1e} of itself (limit {self._limits.loss_flat:g})",
                value=(high - low) / largest if largest else 0.0,
                threshold=self._limits.loss_flat,
            )

    def _progress(self, step: int) -> Iterator[Alarm]:
        first = sum(self._first) / _FIRST
        last = sum(islice(self._last, len(self._last) - _FIRST, None)) / _FIRST
        limit = first - (1 - self._limits.loss_decrease) * abs(first)
        if self._guess is not None:  # outputs that only lose their size come down to that, and have learnt nothing
            limit = min(limit, self._limits.loss_decrease * self._guess)
        self._stuck = self._stuck + 1 if last >= limit else 0
        if self._stuck == 1:  # a loss that had fallen before does not stand still from the start
            self._since = self._begun if self._count == _LEAST else step
        # Ten noisy losses prove nothing, and many a training begins on a plateau.
        if self._stuck == _PATIENCE:
            yield Alarm(
                "loss_not_decreasing",
                "warning",
                self._since,
                f"the loss does not fall: the mean of the last {_FIRST} steps is {last:.4g}, that of the first "
                f"{_FIRST} was {first:.4g} (limit: {limit:.4g})"
                + ("" if self._guess is None else f", and who guesses among all classes has {self._guess:.4g}"),
                value=last,
                threshold=limit,
            )

    def _oscillation(self, step: int) -> Iterator[Alarm]:
        x, y, z = (self._last[place] for place in (-3, -2, -1))
        if len(self._last) < _OSCILLATING or (y - x) * (z - y) >= 0:  # a loss that goes on its way does not swing
            return
        values = np.array(self._last)
        largest = float(np.max(np.abs(values)))  # squares of losses beyond 1e154 are infinite
        values = values / largest if largest else values
        half = _OSCILLATING // 2
        early, late = values[:half].mean(), values[half:].mean()
        centred = values - values.mean()
        variance = float(np.mean(centred**2))
        level = abs(float(values.mean()))
        swings = 0.0 if variance == 0 else -float(np.mean(centred[1:] * centred[:-1])) / variance
        holds = swings > self._limits.loss_oscillation and math.sqrt(variance) > 0.1 * level and late > 0.9 * early
        if not holds:
            self._swinging = None
            return
        begun = self._swinging = self._swinging or (self._count, step)
        # Chance makes thirty losses swing once in some thousand; the next thirty after them it does not.
        if self._count - begun[0] >= _OSCILLATING:
            self._swinging = (self._count, begun[1])
            yield Alarm(
                "loss_oscillating",
                "warning",
                begun[1],
                f"the loss swings to and fro without falling: over {_OSCILLATING} steps each is on the other side of "
                f"their mean {level * largest:.4g} than the one before (correlation {-swings:.2f}, limit "
                f"{-self._limits.loss_oscillation:g}), by {math.sqrt(variance) * largest:.2g}",
                value=-swings,
                threshold=-self._limits.loss_oscillation,
            )


class InitialLoss:
    """The first loss against ln C, what a classifier that knows nothing has."""

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._done = limits.classes is None

    def look(self, step: Step) -> Iterator[Alarm]:
        value = step.losses.get("loss")
        if self._done or value is None or not math.isfinite(value):
            return
        self._done = True
        classes = self._limits.classes
        if classes is None or classes < 2:
            return
        expected = math.log(classes)
        if abs(value - expected) > self._limits.initial_loss * expected:
            yield Alarm(
                "initial_loss",
                "warning",
                step.step,
                f"the first loss is {value:.4g}; a classifier of {classes} classes that knows nothing has "
                f"ln {classes} = {expected:.4g} (it may differ by {self._limits.initial_loss:.0%})",
                value=value,
                threshold=expected,
            )

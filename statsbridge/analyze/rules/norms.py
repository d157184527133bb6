"""The norm of all gradients over the steps: growth, and where to clip it."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterator

import numpy as np

from ...wording import counted
from ..thresholds import Thresholds
from .loss import RunningMedian
from .step import Alarm, Step

_WINDOW = 50
_LEAST = 20
_BLOCKS = 20  # of as many steps as the median is over, after which a norm is long ago
_FLOOR = 0.01  # of the median at the start: what lies below is as good as 0
_IN_A_ROW = 3
_KEPT = 4096  # norms; where there are more, every second one, every fourth, …
_PERCENTILE = 95.0
#: The usual value, where a run has no healthy part to take one from.
_USUAL_CLIP = 1.0


def norm_of(step: Step) -> float | None:
    """The norm before clipping, where it is known."""
    return step.scalars.get("grad_norm", step.scalars.get("grad_norm_applied"))


class GradientNorms:
    """The norms of a run, thinned out evenly as they become many, and what clipping would have done to them."""

    def __init__(self) -> None:
        self._norms, self._steps = array("d"), array("q")
        self._stride, self._passed = 1, 0

    def add(self, step: Step) -> None:
        norm = norm_of(step)
        if norm is None:
            return
        if self._passed % self._stride == 0:
            self._norms.append(norm)
            self._steps.append(step.step)
            if len(self._norms) > _KEPT:
                self._norms, self._steps, self._stride = self._norms[::2], self._steps[::2], 2 * self._stride
        self._passed += 1

    def suggestion(self, onset: int) -> str | None:
        """A value to clip at, from the steps before `onset`, and how many steps it would have clipped.

        The 95th percentile of the finite norms before; 1, the usual value, where fewer than ten are known.
        """
        if not self._norms:
            return None
        norms = np.array(self._norms)
        before = norms[(np.array(self._steps) < onset) & np.isfinite(norms)]
        if len(before) >= 10:
            value, why = float(np.percentile(before, _PERCENTILE)), f"95 % of the {len(before)} norms before lie below"
        else:
            value, why = _USUAL_CLIP, "the usual value; there was no healthy part to take one from"
        # A NaN cannot be clipped.
        clipped = int((norms > value).sum()) * self._stride
        about = "about " if self._stride > 1 else ""
        return (
            f"clip the gradient norm at {value:.3g} ({why}): {about}{clipped:,} of {counted(self._passed, 'step')} "
            "would have been clipped"
        )


class GradientNormGrowth:
    """A gradient norm far above its running median: once is a warning, three times in a row is an explosion."""

    def __init__(self, limits: Thresholds) -> None:
        self._limit = limits.gradient_norm_growth
        self._running = RunningMedian(_WINDOW)
        self._start = 0.0
        # Of those that were no explosion: of all steps, and of the last ones, in blocks.
        self._largest = 0.0
        self._recent: deque[float] = deque(maxlen=_BLOCKS)
        self._passed = 0
        self._in_a_row = 0
        self._since = 0

    def look(self, step: Step) -> Iterator[Alarm]:
        norm = norm_of(step)
        if norm is None or not math.isfinite(norm):
            return
        if len(self._running) < _LEAST:
            self._remember(norm)
            return
        median = self._running.median
        self._start = self._start or median
        if not self._start:  # so far there was nothing to learn: no norm is many times as large as 0
            self._remember(norm)
            return
        floor = self._start * _FLOOR
        # Next to a median that is as good as 0 only all norms before are a measure: those of a hinge loss come back.
        # Where there is something to measure by, one that was long ago, such as the very first, is none.
        largest = self._largest if median < floor else max(self._recent)
        if norm <= self._limit * max(median, floor) or norm <= largest:
            self._in_a_row = 0
            self._remember(norm)
            return
        self._since = self._since if self._in_a_row else step.step
        self._in_a_row += 1
        yield Alarm(
            "exploding_gradient",
            "critical" if self._in_a_row >= _IN_A_ROW else "warning",
            self._since,
            f"the gradient norm is {norm:.3g}, and {median:.3g} was its median before: more than {self._limit:g} times "
            "as much",
            value=norm,
            threshold=self._limit * median,
        )

    def _remember(self, norm: float) -> None:
        self._running.add(norm)
        self._largest = max(self._largest, norm)
        if self._passed % _WINDOW == 0:
            self._recent.append(norm)
        self._recent[-1] = max(self._recent[-1], norm)
        self._passed += 1

"""The exponential moving average that is right from its first value on."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from statsbridge.errors import ConfigError


def check_weight(weight: float) -> float:
    """`weight` as a float. Raises ConfigError unless 0 < weight < 1."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1:
        raise ConfigError(f"smoothing={weight!r}: give a weight between 0 and 1, such as 0.9")
    return float(weight)


@dataclass(slots=True)
class MovingAverage:
    """s ← w·s + (1 − w)·x from s = 0, divided by 1 − w^k after k values (Kingma & Ba 2015, section 3).

    Without the division the first values would lie near 0. A NaN or an infinity is passed over: it changes
    nothing, so the average goes on with the next finite value as if it had not been there.

    `weight`: w, between 0 and 1; the larger, the smoother. About 1 / (1 − w) values count.
    """

    weight: float
    total: float = 0.0
    share: float = 0.0  # 1 − w^k

    def add(self, value: float) -> float:
        """Take one more value; the average with it, or NaN where the value is not finite."""
        if not math.isfinite(value):
            return math.nan
        self.total = self.weight * self.total + (1 - self.weight) * value
        self.share = self.weight * self.share + (1 - self.weight)
        return self.total / self.share


def smooth(values: Iterable[float], weight: float) -> list[float]:
    """The bias-corrected moving average of a curve, one number a value; see `MovingAverage`.

    Raises ConfigError unless 0 < weight < 1.
    """
    weight = check_weight(weight)
    rest, total, share = 1 - weight, 0.0, 0.0
    smoothed = []
    for value in values:  # `MovingAverage.add` without its calls, which take five times as long
        if math.isfinite(value):
            total = weight * total + rest * value
            share = weight * share + rest
            smoothed.append(total / share)
        else:
            smoothed.append(math.nan)
    return smoothed

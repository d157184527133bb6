"""Which steps are sampled, and how steps are labelled."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from ..errors import ConfigError
from ..wording import shown

#: The record keeps steps in 64 bits; a quarter of that leaves room to go on from any label by the largest stride.
LARGEST_LABEL = 1 << 61
#: For "never" or "always" `sys.maxsize` has to do.
_LARGEST_NUMBER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """Choose the sampled steps: every `every`-th iteration, and each of the `first` ones.

    Iterations are counted from `start_step`, one for each `run.step()`; a step is sampled where
    `iteration % every == 0` or `iteration < first`. When something is found to be wrong, so are the next `burst`
    steps; 0 for none, and there are none where several processes train together. Raises ConfigError for anything but
    whole numbers with `every >= 1`, `first >= 0` and `burst >= 0`.
    """

    every: int = 10
    first: int = 0
    burst: int = 5

    def __post_init__(self) -> None:
        values: tuple[tuple[str, object, int], ...] = (
            ("every", self.every, 1),
            ("first", self.first, 0),
            ("burst", self.burst, 0),
        )
        for name, value, least in values:
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise ConfigError(f"{name}={value!r}: give a whole number of at least {least}")
            if abs(int(value)) > _LARGEST_NUMBER:
                raise ConfigError(f"{name}={shown(value)}: give a whole number of at most {_LARGEST_NUMBER}")
            if int(value) < least:
                raise ConfigError(f"{name}={value!r}: give a whole number of at least {least}")
            # Of NumPy's small integers every hundredth step would be none: 200 % int8(100) is an error.
            object.__setattr__(self, name, int(value))

    def sampled(self, iteration: int) -> bool:
        """Whether the step with this iteration number is sampled."""
        return iteration % self.every == 0 or iteration < self.first


class StepLabels:
    """Labels of closed steps: `start`, +1, … unless the user gives their own, which must grow."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.last: int | None = None
        self._stride = 1  # between the last two labels

    @property
    def current(self) -> int:
        """The label of the last closed step, or the first label where none was closed yet."""
        return self.start if self.last is None else self.last

    @property
    def expected(self) -> int:
        """The label that the step in progress will get if the user goes on as before."""
        return self.start if self.last is None else self.last + self._stride

    def next(self, given: object = None) -> tuple[int, str | None]:
        """The label of the step being closed, and what was wrong with the given one (None if nothing)."""
        free = self.start if self.last is None else self.last + 1
        if given is None:
            label, wrong = free, None
        elif isinstance(given, bool) or not isinstance(given, Integral):
            label, wrong = free, f"step={shown(given)} is not a whole number"
        elif self.last is not None and int(given) <= self.last:
            label, wrong = free, f"step={shown(given)} does not come after {self.last}"
        elif abs(int(given)) > LARGEST_LABEL:
            label, wrong = free, f"step={shown(given)} is too large: labels go up to {LARGEST_LABEL}"
        else:
            label, wrong = int(given), None
        self._stride = 1 if given is None or self.last is None else label - self.last
        self.last = label
        return label, wrong

"""What both ways of summing a tensor share: the sample they take on their way, and when sums can be trusted."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .blocks import coprime_stride
from .piece import SAMPLE_SIZE, Raw

Block = npt.NDArray[Any]

_NOTHING = np.empty(0, dtype=np.float32)

# Sums of d⁴ in float32 are good where the spread of d is in here, and its mean not far outside its spread.
_NARROWEST, _WIDEST, _FARTHEST = 1e-8, 1e7, 1.5
_SMALLEST_REACH = 1e-7  # the spread of nearly all tensors lies within a tenth of their largest element
_LARGEST_EXPONENT = 120  # of a gain in float32
_WIDE, _LARGEST_WIDE_EXPONENT = 180, 1000  # from here on only float64 has numbers, and a gain may be so large


class Sample:
    """Every `step`-th finite element of what is read, as float32."""

    __slots__ = ("_parts", "_seen", "_step")

    def __init__(self, elements: int) -> None:
        self._step = coprime_stride(elements, SAMPLE_SIZE)
        self.start()

    def start(self) -> None:
        """Forget what was taken: the tensor is read once more."""
        self._parts: list[npt.NDArray[np.float32]] = []
        self._seen = 0

    def take(self, block: Block) -> None:
        """Look through the next block."""
        part = block[-self._seen % self._step :: self._step]
        if part.dtype == np.float32:
            self._parts.append(part.copy())
        else:
            with np.errstate(all="ignore"):  # training may run with numpy's warnings turned into errors
                self._parts.append(part.astype(np.float32))
        self._seen += len(block)

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """What was taken."""
        return self._parts[0] if len(self._parts) == 1 else np.concatenate([_NOTHING, *self._parts])


def first_gain(low: float, high: float) -> float:
    """A gain for numbers between these that are so small that their own spread is too narrow: 1 for most."""
    reach = max(-low, high)
    return 1.0 if reach >= _SMALLEST_REACH or reach == 0 else _power_of_two(reach)


def _shift_and_gain(mean: float, std: float) -> tuple[float, float]:
    """The cheapest shift and gain that keep sums of fourth powers accurate; (0, 1) saves a pass."""
    if not (math.isfinite(mean) and math.isfinite(std)):
        return 0.0, 1.0
    shift = mean if abs(mean) > std else 0.0
    return shift, 1.0 if std == 0 or 1e-6 < std < 1e6 else _power_of_two(std)


def _power_of_two(size: float) -> float:
    """About 1 / size, but exact to multiply by."""
    exponent = -math.frexp(size)[1]
    largest = _LARGEST_EXPONENT if abs(exponent) <= _WIDE else _LARGEST_WIDE_EXPONENT
    return math.ldexp(1.0, max(-largest, min(largest, exponent)))


def better_guess(raw: Raw) -> tuple[float, float] | None:
    """A better shift and gain, or None where the sums are good."""
    elements = raw.elements - raw.nan_count - raw.inf_count
    if elements == 0 or raw.minimum == raw.maximum:
        return None
    mean = raw.sum1 / elements
    variance = raw.sum2 / elements - mean * mean
    if not math.isfinite(raw.sum2) or variance <= 0:
        # The extremes are exact, whatever overflowed: with these no power of d can.
        reach = raw.maximum / 2 - raw.minimum / 2
        return raw.minimum + reach, _power_of_two(reach)
    std = math.sqrt(variance)
    if math.isfinite(raw.sum4) and _NARROWEST < std < _WIDEST and abs(mean) <= _FARTHEST * std:
        return None
    return _shift_and_gain(raw.shift + mean / raw.gain, std / raw.gain)

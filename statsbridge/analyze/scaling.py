"""Numbers so large or so small that their squares, or their sums, are no longer numbers of 64 bits.

They are divided by a power of two, which changes no digit of them, and what was computed is multiplied by it.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# Squares of numbers between 2^-400 and 2^400, and sums of many of those, neither overflow nor vanish.
_SAFE = 400


def exponents(values: Floats) -> Integers:
    """The power of two, for each row of `values` [..., points], that brings its largest finite number near 1.

    0 for rows that are safe as they are, so that their numbers stay what they were to the bit.
    """
    sizes = np.where(np.isfinite(values), np.abs(values), 0.0)
    found: Integers = np.frexp(sizes.max(axis=-1, initial=0.0))[1].astype(np.int64)
    return np.where(np.abs(found) > _SAFE, found, 0)


def divided(values: Floats, powers: Integers) -> Floats:
    """`values` [..., points] over two to the `powers` [...]."""
    return values if not powers.any() else np.ldexp(values, -powers[..., np.newaxis])


def times(values: Floats, powers: Integers) -> Floats:
    """`values` [...] times two to the `powers` [...]; infinite where 64 bits hold no such number."""
    if not powers.any():
        return values
    with np.errstate(over="ignore"):
        product: Floats = np.ldexp(values, powers)
    return product


def mean(values: Floats) -> float:
    """The mean of `values` [points], at least one; NaN and infinities are what they are in a sum."""
    powers = exponents(values)
    with np.errstate(invalid="ignore"):  # an infinity and its negative
        return float(times(divided(values, powers).mean(), powers))

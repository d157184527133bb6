"""One derivative, as autograd has it and as central differences have it: right, wrong, or not to be told."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Verdict = Literal["right", "wrong", "undecided"]

#: Relative difference below which a derivative is right, and above which it is wrong (where the measurement is sure).
RIGHT, WRONG = 1e-5, 1e-3

# In units of the parameter, the likeliest to be right first: a central difference of a smooth function is most exact
# near the cube root of the precision, 6e-6; smaller steps jump over fewer kinks, larger ones rise above the rounding.
_STEPS = (1e-5, 1e-6, 1e-4, 1e-7, 1e-3)
_EPSILON = sys.float_info.epsilon
_ROUNDINGS = 64.0  # a loss of many operations is rounded many times
_STABLE = 0.05  # two measurements agree: of the distance between measured and computed derivative


@dataclass(frozen=True, slots=True)
class Comparison:
    """A derivative by autograd and by central differences.

    `difference`: distance over the larger of the two, at the step size that agrees best; None where no step size
    could resolve it, 1 where autograd's is not finite (and wrong for that). `reason`: why it is undecided: `rounding`
    (smaller than what the loss is rounded to), `kink` (the slopes on both sides differ), `flat` (the loss changes in
    jumps), `unstable` (another value at each step size), `small` (a stable difference between the two limits), `not
    finite`.
    """

    autograd: float
    numeric: float | None
    difference: float | None
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Slope:
    """The slopes of a function at one step size, and how far rounding may have moved them."""

    central: float
    ahead: float
    behind: float
    rounding: float
    flat: bool

    def difference(self, autograd: float) -> float:
        largest = max(abs(self.central), abs(autograd))
        return abs(self.central - autograd) / largest if largest > 0 else 0.0

    def resolved(self, autograd: float) -> bool:
        return self.rounding <= WRONG * max(abs(self.central), abs(autograd))


def compare(autograd: float, at: Callable[[float], float], middle: float, unit: float) -> Comparison:
    """Judge the derivative of a function of one variable at 0.

    Args:
        autograd: the derivative to judge.
        at: the function, computed in float64.
        middle: its value at 0.
        unit: the size of what is varied; step sizes are 1e-7 to 1e-3 of it.
    """
    if not math.isfinite(autograd) and math.isfinite(middle):
        # No derivative of anything, and one optimizer step with it spoils the weights: a slope that is steep without
        # end, as that of sqrt at 0, is no excuse.
        central = _slope(at, middle, _STEPS[0] * unit).central
        return Comparison(autograd, central if math.isfinite(central) else None, 1.0, "wrong")
    slopes: dict[float, _Slope] = {}
    for step in _STEPS:
        slope = slopes[step] = _slope(at, middle, step * unit)
        if not math.isfinite(slope.central):
            return Comparison(autograd, None, None, "undecided", "not finite")
        if slope.central == autograd == 0 or (slope.resolved(autograd) and slope.difference(autograd) < RIGHT):
            return Comparison(autograd, slope.central, slope.difference(autograd), "right")
    if all(slope.flat for slope in slopes.values()):
        return _judged_flat(autograd, at, middle, unit)
    resolved = {step: slope for step, slope in sorted(slopes.items()) if slope.resolved(autograd)}
    if not resolved:
        return Comparison(autograd, None, None, "undecided", "rounding")
    best = min(resolved.values(), key=lambda slope: slope.difference(autograd))
    verdict, reason = _judged(autograd, list(resolved.values()), best)
    return Comparison(autograd, best.central, best.difference(autograd), verdict, reason)


def _slope(at: Callable[[float], float], middle: float, step: float) -> _Slope:
    up, down = at(step), at(-step)
    rounding = _ROUNDINGS * _EPSILON * max(abs(up), abs(down), abs(middle)) / step
    return _Slope(
        (up - down) / (2 * step), (up - middle) / step, (middle - down) / step, rounding, up == down == middle
    )


def _judged(autograd: float, slopes: list[_Slope], best: _Slope) -> tuple[Verdict, str]:
    """Wrong only where no step size agrees, and two neighbouring ones agree with each other on something else."""
    for one, other in pairwise(slopes):
        distance = abs(one.central - autograd)
        stable = abs(one.central - other.central) <= _STABLE * distance
        kinked = abs(one.ahead - one.behind) > _STABLE * distance
        if stable and kinked and abs(other.ahead - other.behind) > _STABLE * distance:
            return "undecided", "kink"
        if stable and not kinked and not one.flat:
            return ("wrong", "") if best.difference(autograd) > WRONG else ("undecided", "small")
    return "undecided", "unstable"


def _judged_flat(autograd: float, at: Callable[[float], float], middle: float, unit: float) -> Comparison:
    """The function does not move: its slope is lost in rounding, it moves in jumps further apart, or not at all."""
    if abs(autograd) * _STEPS[-1] * unit <= _ROUNDINGS * _EPSILON * abs(middle):
        return Comparison(autograd, None, None, "undecided", "rounding")
    if any(at(sign * size * unit) != middle for size in (1.0, 10.0, 100.0, 1000.0) for sign in (1, -1)):
        return Comparison(autograd, None, None, "undecided", "flat")
    return Comparison(autograd, 0.0, 1.0, "wrong")

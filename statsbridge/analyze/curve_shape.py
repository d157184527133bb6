"""The shape of a pair of learning curves in a few numbers, and what these say of the training.

The verdict is a rule of thumb over the numbers that it names: read them, and look at the curves.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..wording import counted
from .scaling import divided, exponents, mean, times

Floats = npt.NDArray[np.float64]
Word = Literal[
    "overfitting", "underfitting", "rate too large", "rate too small", "healthy", "not enough data"
]  # fmt: skip

FEWEST = 10
"""Points below which nothing is said of a curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where one verdict ends and the next one begins. Ratios, so that they hold for losses of any size.

    `wiggle`: std of the late differences over the level, and `wiggle_progress`: over all the progress, above which a
    curve jumps about. `significance`: a slope over its own standard error, from which it is one. `gap`: (validation −
    training) over validation, from which a validation that has risen by `rise` of its lowest value means overfitting;
    `gap_wide` from which one that no longer falls does, and `gap_closed` below which there is no gap. `flat`: change
    over the last points relative to the level, below which there is none. `nothing`: the level relative to the first
    value below which a gap does not matter. `progress`: the share of its first value
    that training has to lose to have learned something. `steady`: the slope of the last third over that of the whole,
    from which the curve has not begun to level off.
    """

    wiggle: float = 0.1
    wiggle_progress: float = 0.25
    significance: float = 2.5
    gap: float = 0.2
    gap_wide: float = 0.5
    gap_closed: float = 0.1
    rise: float = 0.05
    flat: float = 0.02
    progress: float = 0.5
    steady: float = 0.5
    nothing: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A pair of curves with one value an epoch (or validation), in numbers. None where there is no such number.

    `lowest`: the place, from 1, of the lowest validation value. `gap`: last validation − last training. `slope`: of a
    line through the last `last` validation values, a point; `late_slope`: of the last third; each with its standard
    error. `wiggle`: the population standard deviation of the differences between neighbouring validation values.
    Without validation these are of the training curve, and `gap` is None. `late_wiggle`: the wiggle of the training
    curve's second half. `level`: mean of the last values, `rise`: by how much that lies above the lowest mean of as
    many neighbours. `below`: the share of points at which validation lies below training. `nonfinite`: values that are
    NaN or infinite.
    """

    points: int
    last: int
    first_train: float | None
    last_train: float | None
    last_validation: float | None
    lowest: int | None
    lowest_validation: float | None
    gap: float | None
    slope: float | None
    slope_error: float | None
    late_slope: float | None
    late_slope_error: float | None
    wiggle: float | None
    late_wiggle: float | None
    level: float | None
    train_level: float | None
    rise: float | None
    whole_slope: float | None
    below: float | None
    nonfinite: int
    ends_nonfinite: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """One word for a shape, and the comparisons of numbers that led to it."""

    word: Word
    reasons: tuple[str, ...]


@np.errstate(over="ignore")  # a difference of two numbers may be larger than any
def shape(train: Floats, validation: Floats | None = None, *, last: int = 10) -> Shape:
    """The numbers of a pair of curves, of the same length [points]; values that are not finite are passed over.

    Args:
        train: training losses, one an epoch.
        validation: validation losses at the same epochs, or None.
        last: how many of the last points the slope is of.
    """
    train = np.asarray(train, np.float64)
    both = [train] if validation is None else [train, np.asarray(validation, np.float64)]
    curve = both[-1]
    seen, trained = curve[np.isfinite(curve)], train[np.isfinite(train)]
    slope, error = line(seen[-last:])
    late_slope, late_error = line(seen[-max(last, len(seen) // 3) :])
    lowest = None if len(seen) == 0 else int(np.nanargmin(np.where(np.isfinite(curve), curve, np.nan)))
    pair = np.isfinite(train) & np.isfinite(curve)
    few = max(1, min(last, len(seen) // 4))
    means = np.convolve(seen, np.full(few, 1 / few), "valid") if len(seen) else seen
    return Shape(
        points=len(seen),
        last=min(last, len(seen)),
        first_train=_at(trained, 0),
        last_train=_at(trained, -1),
        last_validation=None if validation is None else _at(seen, -1),
        lowest=None if lowest is None else lowest + 1,
        lowest_validation=None if lowest is None else float(curve[lowest]),
        gap=None if validation is None or not len(seen) or not len(trained) else float(seen[-1] - trained[-1]),
        slope=slope,
        slope_error=error,
        late_slope=late_slope,
        late_slope_error=late_error,
        wiggle=_wiggle(seen),
        late_wiggle=_wiggle(trained[len(trained) // 2 :]),
        level=_at(means, -1),
        train_level=mean(trained[-few:]) if len(trained) else None,
        rise=float(means[-1] - means.min()) if len(means) else None,
        whole_slope=line(seen)[0],
        below=float((curve[pair] < train[pair]).mean()) if validation is not None and pair.any() else None,
        nonfinite=sum(int((~np.isfinite(one)).sum()) for one in both),
        ends_nonfinite=any(len(one) > 0 and not math.isfinite(one[-1]) for one in both),
    )


def line(values: Floats) -> tuple[float | None, float | None]:
    """The slope of the least-squares line through values at 0, 1, 2, …, and its standard error (None below 3)."""
    count = len(values)
    if count < 2:
        return None, None
    powers = exponents(values)
    values = divided(values, powers)
    place = np.arange(count) - (count - 1) / 2
    squares = float((place**2).sum())
    slope = float((place * (values - values.mean())).sum()) / squares
    if count < 3:
        return float(times(np.array(slope), powers)), None
    rest = values - values.mean() - slope * place
    error = math.sqrt(float((rest**2).sum()) / (count - 2) / squares)
    return float(times(np.array(slope), powers)), float(times(np.array(error), powers))


def judge(found: Shape, limits: Limits | None = None) -> Verdict:
    """What a shape says of its training, the most urgent thing first."""
    limits = limits or Limits()
    if found.ends_nonfinite:
        return Verdict("rate too large", ("the curve ends in a value that is not finite",))
    if found.points < FEWEST:
        return Verdict(
            "not enough data", (f"{counted(found.points, 'point')}, and below {FEWEST} nothing can be said",)
        )
    for verdict in (_too_large(found, limits), _overfitting(found, limits), _too_small(found, limits)):
        if verdict is not None:
            return verdict
    return _underfitting(found, limits) or Verdict("healthy", tuple(_healthy(found)))


def _too_large(found: Shape, limits: Limits) -> Verdict | None:
    first, level, wiggle = found.first_train, found.train_level, found.late_wiggle
    if first is None or level is None or wiggle is None:
        return None
    progress = max(first - level, 0.0)
    if wiggle > limits.wiggle * abs(level) and wiggle > limits.wiggle_progress * progress:
        return Verdict(
            "rate too large",
            (
                f"training jumps by {wiggle:.3g} from point to point in its second half, "
                f"{_percent(wiggle, level)} of its level {level:.3g} (limit {limits.wiggle:.0%})",
                f"and has come down by {progress:.3g} in all",
            ),
        )
    if level > first > 0 and level > (1 + limits.progress) * first:
        return Verdict("rate too large", (f"training went up, from {first:.3g} to {level:.3g}",))
    return None


def _overfitting(found: Shape, limits: Limits) -> Verdict | None:
    level, rise, train = found.level, found.rise, found.train_level
    if found.gap is None or level is None or rise is None or train is None or found.lowest_validation is None:
        return None
    gap = level - train
    if not (level > 0 and gap > limits.gap * level):
        return None
    wide = f"the gap from training {train:.3g} to validation {level:.3g} is {_percent(gap, level)} of validation"
    risen = rise > limits.rise * abs(level - rise) and found.wiggle is not None and rise > found.wiggle
    if risen:
        lowest = f"lowest at point {found.lowest} of {found.points}, {found.lowest_validation:.3g}"
        return Verdict(
            "overfitting",
            (f"validation has risen by {rise:.3g} since it was {lowest}", f"{wide} (limit {limits.gap:.0%})"),
        )
    stands = not _falls(found, limits)
    if stands and gap > limits.gap_wide * level and found.first_train and level > limits.nothing * found.first_train:
        return Verdict(
            "overfitting",
            (
                f"validation no longer falls: slope {found.late_slope or 0:.2g} a point",
                f"{wide} (limit {limits.gap_wide:.0%})",
            ),
        )
    return None


def _too_small(found: Shape, limits: Limits) -> Verdict | None:
    slope, whole = found.late_slope, found.whole_slope
    if slope is None or whole is None or found.first_train is None:
        return None
    learned = found.train_level is not None and found.train_level < (1 - limits.progress) * found.first_train
    if _falls(found, limits) and whole < 0 and slope < limits.steady * whole and not learned:
        return Verdict(
            "rate too small",
            (
                f"the last third still falls by {-slope:.3g} a point, {slope / whole:.0%} of the mean over all "
                f"(limit {limits.steady:.0%}): the curve has not begun to level off",
                f"from {found.first_train:.3g} training has come to {found.train_level:.3g} only; "
                "too few epochs look the same",
            ),
        )
    return None


def _underfitting(found: Shape, limits: Limits) -> Verdict | None:
    first, train, level, slope = found.first_train, found.train_level, found.level, found.late_slope
    if first is None or train is None or level is None or slope is None:
        return None
    closed = found.gap is None or abs(level - train) < limits.gap_closed * abs(level)
    if not _falls(found, limits) and closed and first > 0 and train > (1 - limits.progress) * first:
        return Verdict(
            "underfitting",
            (
                f"training has lost {_percent(first - train, first)} of its first value {first:.3g} "
                f"(limit {limits.progress:.0%}) and is flat at {train:.3g}: slope {slope:.2g} a point",
                *(() if found.gap is None else (f"validation lies {_percent(level - train, level)} from it",)),
            ),
        )
    return None


def _falls(found: Shape, limits: Limits) -> bool:
    """Whether the last third goes down, by more than its noise and by more than nothing."""
    slope, error, level = found.late_slope, found.late_slope_error, found.level
    if slope is None or error is None or level is None:
        return False
    return -slope > limits.significance * error and -slope * found.last > limits.flat * abs(level)


def _healthy(found: Shape) -> Iterator[str]:
    if found.first_train is not None and found.train_level is not None:
        yield f"training went from {found.first_train:.3g} to {found.train_level:.3g}"
    if found.gap is not None and found.level is not None and found.rise is not None:
        yield f"validation ends {found.rise:.3g} above its lowest level, gap {found.gap:.3g}"
    elif found.gap is None:
        yield "without a validation curve overfitting cannot be seen"


def _wiggle(values: Floats) -> float | None:
    if len(values) < 2:
        return None
    powers = exponents(values)
    return float(times(np.diff(divided(values, powers)).std(), powers))


def _at(values: Floats, place: int) -> float | None:
    return float(values[place]) if len(values) else None


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "all"

"""Fewer points for the same picture: of every pixel column the extremes, and whatever is not a number. numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from statsbridge.errors import ConfigError

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

NAN, PLUS_INFINITY, MINUS_INFINITY = "NaN", "+infinity", "−infinity"
NOT_POSITIVE = "0 or below, not on a log axis"


@dataclass(frozen=True, slots=True)
class Curve:
    """What is left of a curve.

    `kept`: int64 [points], the numbers of the points to draw, ascending. `y`: float64 [points], their values, NaN
    where the line has a gap. `marks`: what no line can show, the kind → the numbers of the points to mark, at most one
    a pixel and kind; a kind without points is missing.
    """

    kept: Integers
    y: Floats
    marks: Mapping[str, Integers]

    @property
    def isolated(self) -> Flags:
        """The points between two gaps, which a line does not show."""
        drawn = np.concatenate(([False], np.isfinite(self.y), [False]))
        alone: Flags = drawn[1:-1] & ~drawn[:-2] & ~drawn[2:]
        return alone


def downsample(
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    *,
    pixels: int,
    logarithmic: bool = False,
    missing: npt.ArrayLike | None = None,
    flags: Mapping[str, Flags] | None = None,
) -> Curve:
    """Of each of `pixels` equal columns of the x axis: the first, the lowest, the highest and the last value.

    A line through these covers the same pixels as one through all points (M4: Jugel et al. 2014, VLDB 7(10)). NaN and
    infinite values are gaps, and marked; one gap at each end of those in a column is kept, so that the line breaks
    where it must.

    Args:
        x: where the points are, shape `[points]`, finite and ascending.
        y: their values, of the same shape.
        pixels: how many columns, at least 1.
        logarithmic: whether the y axis is: what is not above 0 is then marked too.
        missing: flags of the same shape, for values that were not recorded; those are gaps without a mark.
        flags: further kinds of marks, each with the points that have it, of the same shape.

    Raises ConfigError where `x` is not ascending or `pixels` is less than 1.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if pixels < 1:
        raise ConfigError(f"width_pixels={pixels}: give 1 or more")
    if (np.diff(x) < 0).any():
        raise ConfigError("the points of a curve must be in the order of x")
    starts, column = _columns(x, pixels)
    absent = np.zeros(len(y), bool) if missing is None else np.asarray(missing, bool)
    marked = {NAN: np.isnan(y), PLUS_INFINITY: y == np.inf, MINUS_INFINITY: y == -np.inf}
    if logarithmic:
        marked[NOT_POSITIVE] = (y <= 0) & (y > -np.inf)
    gap = absent | np.logical_or.reduce(list(marked.values()))
    marked = {kind: where & ~absent for kind, where in marked.items()} | dict(flags or {})
    kept = [*_ends(np.flatnonzero(~gap), column), *_ends(np.flatnonzero(gap), column)]
    if len(starts):
        lowest = np.minimum.reduceat(np.where(gap, np.inf, y), starts)
        highest = np.maximum.reduceat(np.where(gap, -np.inf, y), starts)
        for extreme in (lowest, highest):
            kept.append(_ends(np.flatnonzero(~gap & (y == extreme[column])), column)[0])
    numbers = np.unique(np.concatenate(kept)) if kept else np.zeros(0, np.int64)
    marks = {kind: _ends(np.flatnonzero(where), column)[0] for kind, where in marked.items() if where.any()}
    return Curve(numbers, np.where(gap[numbers], np.nan, y[numbers]), marks)


def _columns(x: Floats, pixels: int) -> tuple[Integers, Integers]:
    """The first point of each column that has any, and for each point the number of its column among those."""
    if len(x) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    width = x[-1] - x[0]
    place = ((x - x[0]) / width * pixels).astype(np.int64) if width > 0 else np.zeros(len(x), np.int64)
    changes = np.concatenate(([True], np.diff(np.minimum(place, pixels - 1)) > 0))
    return np.flatnonzero(changes), np.cumsum(changes) - 1


def _ends(numbers: Integers, column: Integers) -> tuple[Integers, Integers]:
    """Of these points the first and the last one in each column."""
    if len(numbers) == 0:
        return numbers, numbers
    changes = np.diff(column[numbers]) > 0
    return numbers[np.concatenate(([True], changes))], numbers[np.concatenate((changes, [True]))]

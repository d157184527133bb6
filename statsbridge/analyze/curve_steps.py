"""What a smoothed curve hides, and where a curve steps from one level to another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .scaling import divided, exponents, times
from .smoothing import MovingAverage, check_weight

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_NORMAL = 1.4826  # median absolute deviation → standard deviation of a Gaussian
_SPIKE = 6.0  # standard deviations of the noise: one in 10⁹ points of a Gaussian
_WINDOW = 51  # points whose median is the level that a spike stands out of
_AT_ONCE = 1 << 16
_JUMP = 7.0  # standard errors, of some twenty degrees of freedom
_EXPECTED = 3.5  # the same next to a place where a step is expected
_NEAR = 2
_FEWEST = 4
_ROOM = 900  # the power of two below which lines may be drawn on beyond a curve's ends
_SIDE = (12, 100)  # points on either side of a step of the curve, at least and at most


@dataclass(frozen=True, slots=True)
class Smoothed:
    """A curve and its exponential moving average, [points] each: the raw values are there too, always.

    `corrected` is divided by 1 − w^k, `uncorrected` begins near 0. NaN where the raw value is not finite. `spikes`: the
    places of the highest points that stand out of the noise; `hidden`: those of which the corrected average shows less
    than half the height.
    """

    weight: float
    raw: Floats
    corrected: Floats
    uncorrected: Floats
    spikes: Integers
    hidden: Integers


@dataclass(frozen=True, slots=True)
class Jump:
    """From the point `place` on the curve goes on at another level: by `size`, in units of the curve."""

    place: int
    size: float


def smoothed(values: Sequence[float] | Floats, weight: float) -> Smoothed:
    """The moving averages of a curve, and the spikes that they hide. Raises ConfigError unless 0 < weight < 1."""
    raw = np.asarray(values, np.float64)
    average = MovingAverage(check_weight(weight))
    corrected, uncorrected = np.full(len(raw), np.nan), np.full(len(raw), np.nan)
    for place, value in enumerate(raw.tolist()):
        corrected[place] = average.add(value)
        if not np.isnan(corrected[place]):
            uncorrected[place] = average.total
    found = spikes(raw)
    return Smoothed(weight, raw, corrected, uncorrected, found, _hidden(raw, corrected, found))


def spikes(values: Floats) -> Integers:
    """The places of spikes: of each run of points far above or below the running median, the farthest one.

    Far is six standard deviations of the noise, that is of the differences from the running median of 51 points, which
    are estimated by their median, as are the differences between neighbours. A curve without noise, most of whose
    points lie on that median, has none.
    """
    there = np.flatnonzero(np.isfinite(values))
    finite = values[there]
    if len(finite) < _FEWEST:
        return np.zeros(0, np.int64)
    finite = divided(finite, exponents(finite))  # only ratios count
    distance = finite - running_median(finite, _WINDOW)
    # Near the ends the windows are small and follow the noise: neighbours differ by √2 times it.
    noise = _NORMAL * max(float(np.median(np.abs(distance))), float(np.median(np.abs(np.diff(finite)))) / math.sqrt(2))
    far = np.abs(distance) > _SPIKE * noise
    if noise == 0 or not far.any():
        return np.zeros(0, np.int64)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], far.astype(np.int8), [0]))))
    runs = zip(edges[::2], edges[1::2], strict=True)
    farthest = [first + int(np.abs(distance[first:end]).argmax()) for first, end in runs]
    places: Integers = there[np.array(farthest)]
    return places


def running_median(values: Floats, window: int) -> Floats:
    """The median of the `window` points around each one; towards the ends of fewer, as many before as after it."""
    half = min(window // 2, (len(values) - 1) // 2)
    windows = np.lib.stride_tricks.sliding_window_view(values, 2 * half + 1)
    inner = [np.median(windows[at : at + _AT_ONCE], axis=1) for at in range(0, len(windows), _AT_ONCE)]
    starts = [np.median(values[: 2 * place + 1]) for place in range(half)]
    ends = [np.median(values[len(values) - 2 * place - 1 :]) for place in reversed(range(half))]
    return np.concatenate([starts, *inner, ends])


def _hidden(raw: Floats, average: Floats, found: Integers) -> Integers:
    there = np.flatnonzero(np.isfinite(raw))
    if len(found) == 0:
        return found
    powers = exponents(raw)
    raw, average = divided(raw, powers), divided(average, powers)
    levels = np.full(len(raw), np.nan)
    levels[there] = running_median(raw[there], _WINDOW)
    shown = []
    for place in found.tolist():
        height = raw[place] - levels[place]
        near = average[place : place + _WINDOW // 2] - levels[place]
        shown.append(np.nanmax(near * np.sign(height)) >= abs(height) / 2)
    hidden: Integers = found[~np.array(shown)]
    return hidden


def jumps(values: Floats, expected: Sequence[int] = ()) -> tuple[Jump, ...]:
    """Where a curve steps: lines through the points before and after meet a place at different heights.

    By seven standard errors of that difference, or three and a half next to the places `expected`. Of neighbours that
    qualify it is the one with the largest ratio. Spikes and values that are not finite are passed over.
    """
    kept = np.isfinite(values)
    kept[spikes(values)] = False
    there = np.flatnonzero(kept)
    finite = values[there]
    side = min(max(_SIDE[0], min(len(finite) // 50, _SIDE[1])), len(finite) // 2)
    if side < _FEWEST:
        return ()
    room = np.maximum(exponents(finite) - _ROOM, 0)
    finite = divided(finite, room)
    windows = np.lib.stride_tricks.sliding_window_view(finite, side)
    place = np.arange(side) - (side - 1) / 2
    squares = float((place**2).sum())
    # Each window by itself: a curve may come down from numbers next to which its end is nothing.
    powers = exponents(windows) if exponents(finite[:, np.newaxis]).any() else np.zeros(len(windows), np.int64)
    windows = divided(windows, powers)
    means, slopes = windows.mean(axis=1), windows @ place / squares
    rest = np.sqrt((windows.var(axis=1) * side - slopes**2 * squares).clip(0) / (side - 2))
    means, slopes, rest = (times(one, powers) for one in (means, slopes, rest))
    reach = side / 2  # both lines are taken half a point beyond their ends: there they should meet
    left, right = slice(0, len(means) - side), slice(side, None)
    sizes = (means[right] - reach * slopes[right]) - (means[left] + reach * slopes[left])
    error = np.hypot(rest[left], rest[right]) * np.sqrt(1 / side + reach**2 / squares)
    # Between two points of a steep and smooth curve lies a step of its slope.
    steep = np.abs(sizes) <= np.abs(slopes[left]) + np.abs(slopes[right])
    limit = np.full(len(sizes), _JUMP)
    for one in np.searchsorted(there, expected) - side:
        limit[max(0, one - _NEAR) : max(0, one + _NEAR + 1)] = _EXPECTED
    with np.errstate(divide="ignore", invalid="ignore"):  # a loss that has come down to exactly 0 has no noise
        ratio = np.where(steep, 0.0, np.abs(sizes) / np.maximum(error, 1e-9 * np.abs(means[left])) / limit)
    found = []
    while len(ratio) and ratio.max() > 1:
        best = int(ratio.argmax())
        found.append(Jump(int(there[best + side]), float(times(sizes[best], room))))
        ratio[max(0, best - side) : best + side + 1] = 0
    return tuple(sorted(found, key=lambda jump: jump.place))

"""What a curve of loss by learning rate says, and whether it says anything at all. NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# A fall counts where it is this many standard deviations of the noise of one loss: of the 90 falls that a sweep of
# 100 losses offers, each the difference of two medians of ten, pure noise reaches 1.5.
_SIGNIFICANT = 2.5
# The same for the noise just before the lowest loss, where the median of ten is that of a place chosen already.
_SIGNIFICANT_THERE = 1.6
#: The normal distribution's standard deviation in units of its median absolute deviation.
_MAD = 1.4826
_MEANINGFUL = 0.01  # of the loss at the start: less than this is no fall, however quiet the curve
_SMOOTHED_OVER = 5
_FEWEST = 8  # losses before the rise that a suggestion needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Losses (finite but for the last ones) in the order of their growing rates.

    `untrained`: those of the model before any step, for the same batches.
    """

    rates: Floats
    losses: Floats
    untrained: Floats

    def gains(self) -> Floats:
        """The losses without what is owed to their batches: about the median loss of the untrained model."""
        finite = self.untrained[np.isfinite(self.untrained)]
        level = float(np.median(finite)) if len(finite) else 0.0
        with np.errstate(invalid="ignore"):
            # In this order: where all batches are alike the losses stay exact, however small they become.
            gained: Floats = self.losses - (self.untrained - level)
        return gained


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """The measures of a sweep, all without what is owed to the batches (`Sweep.gains`).

    `smoothed`: centred running mean over 5 losses, NaN from where one is not finite. `noise`: standard deviation of
    one loss about the curve. `fall`: from the start to the lowest level, both medians of a tenth of the sweep.
    `needed`: the smallest fall that is told from noise.
    `lowest`: index of the lowest smoothed loss. `steepest`: index of the steepest descent. `rises`: whether the loss
    goes up again after its lowest level. `lowest` and `steepest` are None where the fall is none or could be noise.
    """

    smoothed: Floats
    start: float
    noise: float
    fall: float
    needed: float
    lowest: int | None
    steepest: int | None
    rises: bool

    @property
    def falls(self) -> bool:
        """Whether the loss falls by more than noise would."""
        return self.lowest is not None


def read_curve(sweep: Sweep, *, logarithmic: bool) -> RateCurve:
    """Measure a sweep, whose rates grow by a constant factor where `logarithmic`, else by a constant amount."""
    rates, losses = sweep.rates, sweep.gains()
    whole = int(np.isfinite(losses).cumprod().sum())  # a loss that is not finite ends the sweep
    finite = losses[:whole]
    smoothed = np.full(len(losses), np.nan)
    smoothed[:whole] = running_mean(finite, _SMOOTHED_OVER)
    width = max(3, len(losses) // 10)
    start = float(np.median(finite[:width])) if whole else np.nan
    measured = RateCurve(
        smoothed=smoothed,
        start=start,
        noise=0.0,
        fall=0.0,
        needed=_MEANINGFUL * abs(start),
        lowest=None,
        steepest=None,
        rises=whole < len(losses),
    )
    if whole < _FEWEST:
        return measured
    bottom = int(np.argmin(smoothed[:whole]))
    noise, there = noise_of(finite, bottom, quiet=max(_FEWEST, whole // 4) if logarithmic else 0)
    needed = max(_SIGNIFICANT * noise, _SIGNIFICANT_THERE * there, measured.needed)
    # The lowest level: not more than the part up to the minimum, behind which a steep rise may begin at once.
    level = float(np.median(finite[max(0, bottom - width + 1) : bottom + 1]))
    fall = start - level
    rises = measured.rises or float(np.median(finite[-3:])) - level > max(needed, 0.1 * abs(fall))
    measured = replace(measured, noise=max(noise, there), fall=fall, needed=needed, rises=rises)
    if fall <= needed or bottom < 2:
        return measured
    places = np.log10(rates) if logarithmic else rates
    steepest = _steepest(places[: bottom + 1], finite[: bottom + 1], max(_SMOOTHED_OVER, width))
    return replace(measured, lowest=bottom, steepest=steepest)


def running_mean(values: Floats, width: int) -> Floats:
    """Centred mean over `width` values (odd), at the ends over as many on either side as there are."""
    means = values.copy()
    for reach in range(1, width // 2 + 1):
        if len(values) > 2 * reach:
            means[reach : len(values) - reach] = np.convolve(values, np.full(2 * reach + 1, 1.0), "valid") / (
                2 * reach + 1
            )
    return means


def noise_of(losses: Floats, bottom: int, quiet: int) -> tuple[float, float]:
    """Standard deviation of a loss about the curve up to `bottom`, and just before it; robust against a few outliers.

    From second differences, in which a curve cancels: their variance is 6 times the noise's. The first is at least that
    of the first `quiet` losses about their line, in which what follows the order of the batches does not cancel.
    """
    part = losses[: max(bottom + 1, _FEWEST)]
    second = np.abs(np.diff(part, 2)) * (_MAD / np.sqrt(6.0))
    noise = float(np.median(second))
    if quiet >= _FEWEST:
        first = losses[:quiet]
        places = np.arange(len(first), dtype=np.float64)
        slope, offset = np.polyfit(places, first, 1)
        noise = max(noise, float(np.std(first - slope * places - offset)))
    return noise, float(np.median(second[-max(_FEWEST, len(losses) // 10) :]))


def _steepest(places: Floats, losses: Floats, width: int) -> int | None:
    """The middle of the `width` neighbouring losses whose line falls most; None where none falls."""
    width = min(width, len(losses))
    x = np.lib.stride_tricks.sliding_window_view(places, width)
    y = np.lib.stride_tricks.sliding_window_view(losses, width)
    centred = x - x.mean(axis=1, keepdims=True)
    slopes = (centred * y).sum(axis=1) / (centred**2).sum(axis=1)
    best = int(np.argmin(slopes))
    return best + width // 2 if slopes[best] < 0 else None

"""A good run, or several, as a measure for others: between which limits each number of each module moved.

One good run shows how a number moves in time and not how it differs from seed to seed, so its range is widened: a
statistic that is a size (a norm, a standard deviation) by a factor, one that may lie on either side of zero by that
many times the size of its tensor's elements, a share by a tenth of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..wording import counted
from .profiles import Matrix, check_statistic
from .run_data import RunData

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Identity = tuple[str, int, str]  # module, call, tensor

#: Statistics on either side of zero, widened by the size of the tensor's elements.
_PLACES = ("mean", "min", "max")
#: Numbers without a unit, widened by as much as they moved, and at least by 1.
_FORMS = ("skewness", "kurtosis")
_SHARE = 0.1  # of the factor: widens `zero_fraction`
_NOTHING = 1e-5  # of the median size at a site: below it sizes are alike, such as gradients that are only rounding

#: Sampled steps of a good run below which its ranges say nothing.
FEWEST_STEPS = 5

FACTOR = 5.0
"""By which sizes are widened where there is one good run."""
FACTOR_OF_SEVERAL = 2.5
"""The same of several: what differs from seed to seed shows among them."""


@dataclass(frozen=True, slots=True)
class Band:
    """Limits of one statistic of one site, by identity and by stretch of the training.

    `rows`: (module, call, tensor) → row. `starts` [stretches]: the first step of each stretch, ascending; `end`: the
    last step that there are limits for. `low`, `high` [rows, stretches]: NaN where nothing was measured. A stretch's
    limits are those of steps from half as early to twice as late: runs learn at different speeds. `complete` [rows]:
    whether all good runs have a number at each of their steps.
    """

    rows: Mapping[Identity, int]
    starts: Integers
    end: int
    low: Floats
    high: Floats
    complete: Flags

    def at(self, identities: Sequence[Identity], steps: Integers) -> tuple[Floats, Floats]:
        """The limits [identities, steps]; NaN where there are none."""
        rows = np.array([self.rows.get(identity, -1) for identity in identities], np.int64)
        stretches = np.clip(np.searchsorted(self.starts, steps, side="right") - 1, 0, len(self.starts) - 1)
        unknown = (rows < 0)[:, None] | (steps > self.end)[None, :]
        low, high = (limits[rows][:, stretches] for limits in (self.low, self.high))
        return np.where(unknown, np.nan, low), np.where(unknown, np.nan, high)


class Baseline:
    """The ranges of good runs. Read when first asked for, and kept.

    `factor`: by how much sizes may lie outside of what was seen; the rest is widened as the module says.
    """

    def __init__(self, runs: Sequence[RunData], *, factor: float | None = None) -> None:
        if not runs:
            raise ConfigError("a baseline needs at least one good run")
        if factor is not None and not 1 <= factor < np.inf:
            raise ConfigError(f"factor={factor}: give a number from 1 on, such as 3")
        self.runs = tuple(runs)
        self.factor = factor or (FACTOR if len(runs) == 1 else FACTOR_OF_SEVERAL)
        self._bands: dict[tuple[str, str], Band | None] = {}
        self._limits: dict[tuple[str, str], dict[Identity, tuple[float, float]]] = {}

    def limits(
        self, site: str, statistic: str, modules: Sequence[str], calls: Iterable[int], tensors: Iterable[str | None]
    ) -> tuple[Floats, Floats]:
        """The lowest and the highest usual value over the whole training, [identities] each.

        Args:
            site: what was measured.
            statistic: a column of `stats`.
            modules: the paths of the modules.
            calls: which call of each.
            tensors: which tensor of each; None is `""`.

        NaN where the good runs do not have it. Raises ConfigError for an unknown statistic.
        """
        check_statistic(statistic, site)
        if (site, statistic) not in self._limits:
            band = self.band(site, statistic)
            if band is None:
                self._limits[site, statistic] = {}
            else:
                low, high = np.fmin.reduce(band.low, axis=1), np.fmax.reduce(band.high, axis=1)
                pairs = zip(low.tolist(), high.tolist(), strict=True)
                self._limits[site, statistic] = dict(zip(band.rows, pairs, strict=True))
        known = self._limits[site, statistic]
        nothing = (np.nan, np.nan)
        identities = zip(modules, calls, (tensor or "" for tensor in tensors), strict=True)
        found = np.array([known.get(identity, nothing) for identity in identities], np.float64).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def band(self, site: str, statistic: str) -> Band | None:
        """The limits of a statistic by stretch of the training; None where no good run has the site."""
        if (site, statistic) not in self._bands:
            self._bands[site, statistic] = self._band(site, statistic)
        return self._bands[site, statistic]

    def _band(self, site: str, statistic: str) -> Band | None:
        runs = [run for run in self.runs if site in run.sites]
        if not runs:
            return None
        found = [run.matrix(site, statistic) for run in runs]
        spreads = [run.matrix(site, "std") for run in runs] if statistic in _PLACES else None
        band = band_of(found, spreads, self.factor)
        # Where a good run has nothing of the site, nothing of it is what the good runs always have.
        return band if len(runs) == len(self.runs) else replace(band, complete=np.zeros_like(band.complete))


def baseline(*runs: RunData, factor: float | None = None) -> Baseline:
    """The ranges of one good run, or of several of the same model.

    Raises ConfigError where a run has no statistics, or fewer sampled steps than `FEWEST_STEPS`.
    """
    for run in runs:
        if not run.sites:
            raise ConfigError(f"run {run.id} has no statistics: a baseline needs a run with sampled steps")
        steps = len(run.select(columns=("step",))["step"].unique())
        if steps < FEWEST_STEPS:
            raise ConfigError(
                f"run {run.id} has {counted(steps, 'sampled step')}, too few to say what is usual: a baseline needs "
                f"at least {FEWEST_STEPS}"
            )
    return Baseline(runs, factor=factor)


def band_of(found: Sequence[Matrix], spreads: Sequence[Matrix] | None, factor: float) -> Band:
    """The limits that several matrices of the same site and statistic give, `spreads` their standard deviations."""
    statistic = found[0].statistic
    identities = list(dict.fromkeys(identity for one in found for identity in identities_of(one)))
    rows = {identity: row for row, identity in enumerate(identities)}
    longest = max(found, key=lambda one: len(one.steps)).steps
    stretches = list(_stretches(len(longest)))
    having = np.zeros(len(rows), np.int64)  # good runs that have a number at each of their steps
    low, high, spread = (np.full((len(rows), len(stretches)), np.nan) for _ in range(3))
    for number, one in enumerate(found):
        mine = np.array([rows[identity] for identity in identities_of(one)], np.int64)
        having[mine] += ~np.isnan(one.values).any(axis=1)
        for column, (first, last) in enumerate(stretches):
            here = _window(one.steps, longest, first, last)
            low[mine, column] = np.fmin(low[mine, column], np.fmin.reduce(one.values[:, here], axis=1))
            high[mine, column] = np.fmax(high[mine, column], np.fmax.reduce(one.values[:, here], axis=1))
            if spreads is not None:
                wide = np.fmax.reduce(spreads[number].values[:, here], axis=1)
                spread[mine, column] = np.fmax(spread[mine, column], wide)
    ends = max(int(one.steps[-1]) for one in found)
    starts = longest[[first for first, _ in stretches]]
    return Band(rows, starts, ends, *_widened(statistic, low, high, spread, factor), having == len(found))


def identities_of(found: Matrix) -> list[Identity]:
    """(module, call, tensor) of each row."""
    columns = (found.rows[name].to_pylist() for name in ("module", "call", "tensor"))
    return list(zip(*columns, strict=True))


def _stretches(count: int) -> Iterable[tuple[int, int]]:
    """First and last sampled step of each stretch: single ones at first, then longer and longer."""
    first = 0
    while first < count:
        last = min(first + first // 3, count - 1)
        yield first, last
        first = last + 1


def _window(steps: Integers, longest: Integers, first: int, last: int) -> slice:
    """The steps from half as early to twice as late, in a matrix that may be sampled otherwise; never none."""
    begin = longest[max(0, first // 2 - 2)]
    end = longest[min(len(longest) - 1, 2 * last + 4)]
    start, stop = int(np.searchsorted(steps, begin)), int(np.searchsorted(steps, end, side="right"))
    return slice(start, stop) if start < stop else slice(max(0, min(start, len(steps)) - 1), start + 1)


def _widened(statistic: str, low: Floats, high: Floats, spread: Floats, factor: float) -> tuple[Floats, Floats]:
    if statistic == "zero_fraction":
        return np.clip(low - _SHARE * factor, 0, 1), np.clip(high + _SHARE * factor, 0, 1)
    if statistic in ("nan_count", "inf_count"):
        return low, high
    if statistic in _PLACES:
        reach = factor * np.hypot(spread, np.fmax(np.abs(low), np.abs(high)))
        return low - reach, high + reach
    if statistic in _FORMS:
        wide = np.maximum(high - low, 1.0)
        return low - wide, high + wide
    sizes = high[high > 0]
    nothing = _NOTHING * float(np.median(sizes)) if len(sizes) else 0.0
    lowest = np.where(low <= nothing, np.where(np.isnan(low), np.nan, 0.0), low / factor)
    return lowest, np.fmax(high, np.where(np.isnan(high), np.nan, nothing)) * factor

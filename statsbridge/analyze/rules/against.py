"""A training against the ranges of a good run: what lies inside them is no finding, what stays outside is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..thresholds import Thresholds
from .known import Floats, Integers
from .memory import Memory, Streak
from .step import Hits, Rows, Say, Step, match, shown

if TYPE_CHECKING:
    from ..baseline import Baseline

#: What is compared at each site, in the order of a training step.
_COMPARED: Mapping[str, tuple[str, ...]] = {
    "parameter": ("l2",),
    "activation": ("std", "abs_mean", "zero_fraction"),
    "activation_grad": ("l2", "zero_fraction"),
    "parameter_grad": ("l2", "zero_fraction"),
    "update": ("update_ratio",),
}
_BACKWARD = ("activation_grad", "parameter_grad")
_CLOSE = 2.0
#: Kinds that judge by the size of one number, and which it is.
_JUDGED: Mapping[str, str] = {
    "dead_units": "zero_fraction",
    "exploding_activation": "abs_mean",
    "collapsed_activation": "std",
    "saturated": "abs_mean",
    "exploding_gradient": "abs_mean",
    "vanishing_gradient": "abs_mean",
    "zero_gradient": "l2",
    "update_too_large": "update_ratio",
    "update_too_small": "update_ratio",
}


class Against:
    """Judges rows by the ranges of good runs."""

    def __init__(self, limits: Thresholds, baseline: Baseline) -> None:
        from ..baseline import Baseline

        self._persistence = limits.persistence
        # What stays outside must be far outside, and what excuses a finding close to what the good run had.
        self._wide, self._close = baseline, Baseline(baseline.runs, factor=_CLOSE)
        self._ranges: dict[tuple[bool, str, str], tuple[Memory, Memory, Memory]] = {}
        self._outside: dict[tuple[str, str], Streak] = {}

    def usual(self, found: Hits, step: Step) -> Hits:
        """The hits without those whose number a good run has had too."""
        statistic = _JUDGED.get(found.kind)
        if statistic is None or not len(found.ids):
            return found
        if statistic == "update_ratio":  # a rule of updates judges a step once its loss has shown what became of it
            values = found.values
        elif step.rows is None:
            return found
        else:
            values = step.rows.where(match(found.ids, step.rows.ids))[statistic]
        sites = [step.known.site_name(identity) for identity in found.ids.tolist()]
        unusual = np.ones(len(found.ids), bool)
        for site in set(sites) if statistic != "update_ratio" else {"update"}:
            here = np.array([one == site for one in sites])
            low, high = self._range(self._close, site, statistic, found.ids, step)
            unusual &= ~(here & (values >= low) & (values <= high))
        return replace(found, ids=found.ids[unusual], values=found.values[unusual], since=found.since[unusual])

    def look(self, step: Step) -> Iterator[Hits]:
        if step.rows is None:
            return
        for site, statistics in _COMPARED.items():
            rows = step.site(site)
            rows = rows.where(rows.measured)
            for statistic in statistics:
                yield from self._outside_of(rows, site, statistic, step)

    def _outside_of(self, rows: Rows, site: str, statistic: str, step: Step) -> Iterator[Hits]:
        values = rows[statistic]
        low, high = self._range(self._wide, site, statistic, rows.ids, step)
        streak = self._outside.setdefault((site, statistic), Streak())
        found = streak.update(rows.ids, (values < low) | (values > high), step.step, self._persistence)
        if not found.any():
            return
        ids, values, low, high = rows.ids[found], values[found], low[found], high[found]
        nearest = np.where(values < low, low, high)
        usual = dict(zip(ids.tolist(), zip(low.tolist(), high.tolist(), strict=True), strict=True))
        first = int(step.known.places(ids, backward=site in _BACKWARD)[0])
        yield Hits(
            "outside_baseline",
            "warning",
            ids,
            values,
            streak.since(ids),
            float(nearest[first]),
            _sentence(step, statistic, usual),
            backward=site in _BACKWARD,
        )

    def _range(self, baseline: Baseline, site: str, statistic: str, ids: Integers, step: Step) -> tuple[Floats, Floats]:
        low, high, asked = self._ranges.setdefault(
            (baseline is self._wide, site, statistic), (Memory(np.nan), Memory(np.nan), Memory(False, np.bool_))
        )
        new = ids[~asked[ids]]
        if len(new):
            known, numbers = step.known, new.tolist()
            lowest, highest = baseline.limits(
                site,
                statistic,
                [known.module_name(identity) for identity in numbers],
                known.call[new].tolist(),
                [known.tensor_name(identity) for identity in numbers],
            )
            low.set(new, lowest)
            high.set(new, highest)
            asked.set(new, True)
        return low[ids], high[ids]


def _sentence(step: Step, statistic: str, usual: Mapping[int, tuple[float, float]]) -> Say:
    known = step.known

    def say(name: str, identity: int, value: float) -> str:
        low, high = usual[identity]
        tensor = known.tensor_name(identity)
        what = f"{known.site_name(identity)} {tensor}" if tensor else known.site_name(identity)
        return (
            f"{statistic} of {what} of {shown(name)} is {value:.3g}; in the good run it is {low:.3g} to {high:.3g}, "
            "with a margin"
        )

    return say

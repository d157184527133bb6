"""What of a run goes to a tracker: a chosen set of curves within a budget, because dashboards die of thousands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any

from ..analyze.choices import unknown_choice
from ..analyze.smoothing import check_weight
from ..errors import ConfigError
from ..log.schema import SITES
from ..moments import COUNTS, STATISTICS

Patterns = str | Iterable[str]

SEVERITIES = ("info", "warning", "critical")

ALL_STATISTICS = (*COUNTS, *STATISTICS, "update_ratio", "histogram")
"""The columns of `stats` that can become curves (or, the last one, histograms)."""

USUAL = (
    ("tensor", "std"),
    ("tensor", "mean"),
    ("tensor_grad", "abs_mean"),
    ("activation", "std"),
    ("update", "update_ratio"),
    ("parameter_grad", "l2"),
    ("activation_grad", "abs_mean"),
    ("parameter", "l2"),
    ("optimizer_state", "std"),
    ("tensor", "histogram"),
    ("activation", "histogram"),
    ("parameter", "histogram"),
    ("parameter_grad", "histogram"),
    ("activation_grad", "histogram"),
    ("activation", "mean"),
    ("activation", "zero_fraction"),
    ("parameter_grad", "abs_mean"),
    ("activation_grad", "l2"),
    ("parameter", "std"),
    ("activation", "kl_unit_gaussian"),
    ("tensor_grad", "l2"),
    ("optimizer_state", "l2"),
    ("tensor", "zero_fraction"),
)
"""(site, statistic) in the order in which the budget is spent: what people look at, most telling first.

Every site has its first statistic before any has a second. What a user logs by hand comes before all. std of
activations shows collapse and explosion, the update ratio a wrong learning rate; the l2 norm of a gradient is
what clipping sees, and its mean size compares layers of different width: so each gradient site begins with the
one its usual thresholds are about. Skewness, kurtosis, extremes and counts stay in the record.
"""

_RANK = {pair: number for number, pair in enumerate(USUAL)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is mirrored; the record on disk always has everything.

    Args:
        max_series: the most curves (and histograms) one mirror makes. Scalars come first, then aggregates, then
            the statistics of modules; a tenth of it (50 at most) is kept for scalars that begin later.
        modules: paths of the modules (globs), as in `init`. Where the policy hashes names, the hashed ones.
        sites: names of sites (globs).
        statistics: names of statistics (globs); None for the usual ones of each site. `histogram` among them.
        aggregates: one pooled curve for each (type, site, tensor, statistic): the exact statistic of all
            elements in modules of that type, not a mean of standard deviations.
        smoothing: weight of the bias-corrected moving average that goes beside each scalar of `run.step` as
            `<name>/smoothed` (learning rates excepted); None for none. Where a value is NaN or infinite the
            average has no point, and goes on after it.
        histograms: mirror them, where the run records them (`init(histograms=True)`).
        figures: a depth × step heat map of each site, whenever there are `figure_growth` times as many
            sampled steps as in the last one, and at the end.
        figure_growth: see `figures`; above 1.
        alerts: least severity of the events that become alerts: `"info"`, `"warning"`, `"critical"`; None
            for no alerts.
        artifact: copy the run's folder of Parquet files to the tracker at the end.

    Raises ConfigError for an argument that is none of these.
    """

    max_series: int = 500
    modules: Patterns = "*"
    sites: Patterns = "*"
    statistics: Patterns | None = None
    aggregates: bool = True
    smoothing: float | None = 0.9
    histograms: bool = True
    figures: bool = True
    figure_growth: float = 2.0
    alerts: str | None = "warning"
    artifact: bool = False

    def __post_init__(self) -> None:
        for name in ("aggregates", "histograms", "figures", "artifact"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: give True or False")
        most: object = self.max_series
        if isinstance(most, bool) or not isinstance(most, Integral) or int(most) < 1:
            raise ConfigError(f"max_series={most!r}: give a whole number of at least 1")
        growth = self.figure_growth
        if isinstance(growth, bool) or not isinstance(growth, int | float) or not 1 < growth < float("inf"):
            raise ConfigError(f"figure_growth={growth!r}: give a number above 1, such as 2")
        if self.alerts is not None and self.alerts not in SEVERITIES:
            raise unknown_choice("severity", self.alerts, SEVERITIES)
        self._set("max_series", int(self.max_series))
        self._set("figure_growth", float(growth))
        self._set("smoothing", None if self.smoothing is None else check_weight(self.smoothing))
        self._set("modules", _as_patterns("modules", self.modules))
        self._set("sites", _as_patterns("sites", self.sites, SITES))
        if self.statistics is not None:
            self._set("statistics", _as_patterns("statistics", self.statistics, ALL_STATISTICS))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def ranks(self, site: str) -> dict[str, int]:
        """The chosen statistics of a site, each with its place in the order in which the budget is spent."""
        if not any(fnmatchcase(site, pattern) for pattern in self.sites):
            return {}
        if self.statistics is None:
            chosen = {name: rank for (of, name), rank in _RANK.items() if of == site}
        else:
            names = [name for name in ALL_STATISTICS if any(fnmatchcase(name, pattern) for pattern in self.statistics)]
            # Statistics that are not usual come after those that are, each for all sites before the next one.
            chosen = {
                name: _RANK.get((site, name), len(_RANK) + place)
                for place, name in enumerate(names)
                if name != "update_ratio" or site == "update"
            }
        if not self.histograms:
            chosen.pop("histogram", None)
        return chosen

    def module(self, name: str) -> bool:
        """Whether the module with this path is chosen."""
        return any(fnmatchcase(name, pattern) for pattern in self.modules)

    def alerting(self, severity: str) -> bool:
        """Whether an event of this severity becomes an alert."""
        return self.alerts is not None and severity in SEVERITIES[SEVERITIES.index(self.alerts) :]

    def to_json(self) -> dict[str, Any]:
        """The arguments, as JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, arguments: Mapping[str, Any]) -> Selection:
        """What `to_json` gave, again. Raises ConfigError for an unknown or a wrong argument."""
        known = [field.name for field in fields(cls)]
        for name in arguments:
            if name not in known:
                raise unknown_choice("argument of Selection", name, known)
        return cls(**arguments)


def _as_patterns(argument: str, value: Patterns, choices: Sequence[str] | None = None) -> tuple[str, ...]:
    """One pattern or several as a tuple; ConfigError where it is neither, or where one fits none of `choices`."""
    try:
        patterns = (value,) if isinstance(value, str) else tuple(value)
    except TypeError:
        patterns = ()
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"{argument}={value!r}: give a name, a glob pattern such as 'conv*', or a list of them")
    for pattern in patterns:
        if choices and not any(fnmatchcase(choice, pattern) for choice in choices):
            raise unknown_choice(argument, pattern, choices, shown=len(choices))
    return patterns

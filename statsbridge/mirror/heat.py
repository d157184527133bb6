"""What the heat maps show: one statistic of every module over the sampled steps, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from .identities import Floats, Identities, Identity, Integers, StatsRows
from .selection import Selection

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_COLUMNS = 400
_FIRST_FIGURE = 8  # sampled steps
# What the usual thresholds of each site are about: see `Selection` and analyze.marks.
_STATISTIC = {
    "activation": "std",
    "activation_grad": "abs_mean",
    "parameter": "l2",
    "parameter_grad": "abs_mean",
    "update": "update_ratio",
    "optimizer_state": "l2",
    "tensor": "std",
    "tensor_grad": "abs_mean",
}


@dataclass(slots=True)
class HeatMap:
    """One statistic of one site, a row a tensor and a column for each `stride` sampled steps.

    Of several steps in one column the lowest and the highest value are kept, and whether any element was NaN
    or infinite. When there are MOST_COLUMNS, each two become one.
    """

    site: str
    statistic: str
    members: list[Identity] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # first step of each column
    last_step: int = 0
    sampled: int = 0
    stride: int = 1
    low: Floats = field(default_factory=lambda: np.full((0, MOST_COLUMNS), np.nan))
    high: Floats = field(default_factory=lambda: np.full((0, MOST_COLUMNS), np.nan))
    nonfinite: np.ndarray = field(default_factory=lambda: np.zeros((0, MOST_COLUMNS), bool))
    due_at: int = _FIRST_FIGURE
    drawn: int = 0
    _row_of: Integers = field(default_factory=lambda: np.zeros(0, np.int64))  # −1: an identity without a row
    _filled: int = 0
    _attempt: int = 0

    def add(
        self, attempt: int, step: int, numbers: Integers, identities: Identities, values: Floats, nonfinite: np.ndarray
    ) -> None:
        """Take one sampled step: the identities `numbers`, their values (NaN: null) and flags."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._forget_from(step)
        rows = self._rows(numbers, identities)
        column = self._column(step)
        self.low[rows, column] = np.fmin(self.low[rows, column], values)
        self.high[rows, column] = np.fmax(self.high[rows, column], values)
        self.nonfinite[rows, column] |= nonfinite

    def _rows(self, numbers: Integers, identities: Identities) -> Integers:
        if len(self._row_of) < len(identities.all):
            more = np.full(len(identities.all) - len(self._row_of), -1)
            self._row_of = np.concatenate((self._row_of, more))
        missing = numbers[self._row_of[numbers] < 0]
        if len(missing):
            self._row_of[missing] = np.arange(len(self.members), len(self.members) + len(missing))
            self.members += [identities.all[number] for number in missing.tolist()]
            nothing = np.full((len(missing), MOST_COLUMNS), np.nan)
            self.low, self.high = np.concatenate((self.low, nothing)), np.concatenate((self.high, nothing))
            self.nonfinite = np.concatenate((self.nonfinite, np.zeros((len(missing), MOST_COLUMNS), bool)))
        return self._row_of[numbers]

    def _column(self, step: int) -> int:
        self.last_step = step
        self.sampled += 1
        if self.starts and self._filled < self.stride:
            self._filled += 1
            return len(self.starts) - 1
        if len(self.starts) == MOST_COLUMNS:
            self._halve()
        self.starts.append(step)
        self._filled = 1
        return len(self.starts) - 1

    def _halve(self) -> None:
        half = MOST_COLUMNS // 2
        self.starts = self.starts[::2]
        low, high = np.fmin(self.low[:, ::2], self.low[:, 1::2]), np.fmax(self.high[:, ::2], self.high[:, 1::2])
        flags = self.nonfinite[:, ::2] | self.nonfinite[:, 1::2]
        self.low[:, :half], self.low[:, half:] = low, np.nan
        self.high[:, :half], self.high[:, half:] = high, np.nan
        self.nonfinite[:, :half], self.nonfinite[:, half:] = flags, False
        self.stride *= 2

    def _forget_from(self, step: int) -> None:
        """A resumed run supersedes what an earlier attempt recorded from its first step on."""
        kept = int(np.searchsorted(self.starts, step))
        del self.starts[kept:]
        self.low[:, kept:] = self.high[:, kept:] = np.nan
        self.nonfinite[:, kept:] = False
        self._filled = self.stride

    def figure(self) -> go.Figure | None:
        """The picture; None where there is nothing to show."""
        from ..view.heatmap import HeatMapRow, heat_map

        columns = len(self.starts)
        low, high, nonfinite = self.low[:, :columns], self.high[:, :columns], self.nonfinite[:, :columns]
        shown = np.flatnonzero((~np.isnan(low) | nonfinite).any(axis=1))
        if not len(shown):
            return None
        order = sorted(shown.tolist(), key=lambda row: _place(self.members[row]))
        rows = [_row(self.members[row]) for row in order]
        return heat_map(
            self.site,
            self.statistic,
            rows=[HeatMapRow(*row) for row in rows],
            starts=self.starts,
            last_step=self.last_step,
            low=low[order],
            high=high[order],
            nonfinite=nonfinite[order],
        )


def _place(one: Identity) -> tuple[bool, int, bool, int, str, int, str]:
    return (one.depth is None, one.depth or 0, one.order is None, one.order or 0, one.module, one.call, one.tensor)


def _row(one: Identity) -> tuple[str, int | None]:
    name = one.tensor if one.site in {"tensor", "tensor_grad"} else one.module or "(model)"
    if one.tensor and name != one.tensor:
        name += f".{one.tensor}"
    return (f"{name} call {one.call}" if one.call else name, one.depth)


class HeatMaps:
    """The heat map of each site that has data."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._maps: dict[str, HeatMap] = {}

    def add(self, rows: StatsRows, identities: Identities, attempt: Integers) -> None:
        """Take the rows of a chunk."""
        if not self._selection.figures or not len(rows.identity):
            return
        site_of = np.array([identity.site for identity in identities.all])[rows.identity]
        broken = rows.count("nan_count") + rows.count("inf_count") > 0
        for site in np.unique(site_of).tolist():
            heat = self._maps.get(site) or self._new(site)
            if heat is None:
                continue
            values = rows.column(heat.statistic)
            own = np.flatnonzero(site_of == site)
            own = own[np.argsort(rows.moment[own], kind="stable")]
            for step in np.split(own, np.flatnonzero(np.diff(rows.moment[own])) + 1):
                first = int(step[0])
                heat.add(
                    int(attempt[first]),
                    int(rows.step[first]),
                    rows.identity[step],
                    identities,
                    values[step],
                    broken[step],
                )

    def _new(self, site: str) -> HeatMap | None:
        statistics = [name for name in self._selection.ranks(site) if name != "histogram"]
        if not statistics:
            return None
        usual = _STATISTIC.get(site, "")
        heat = HeatMap(site, usual if usual in statistics else statistics[0])
        return self._maps.setdefault(site, heat)

    def figures(self, final: bool) -> list[tuple[str, go.Figure, int]]:
        """Those that are due, as (name, figure, last step); none where plotly is not installed."""
        due = [
            heat for heat in self._maps.values() if heat.sampled >= heat.due_at or (final and heat.sampled > heat.drawn)
        ]
        if not due or find_spec("plotly") is None:
            return []
        found = []
        for heat in due:
            heat.drawn = heat.sampled
            heat.due_at = max(heat.sampled + 1, round(heat.sampled * self._selection.figure_growth))
            figure = heat.figure()
            if figure is not None:
                found.append((f"heatmap/{heat.site}", figure, heat.last_step))
        return found

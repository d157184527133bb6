"""All modules at once: the heat map over the steps, and a small plot for each."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from .downsample import Integers, downsample
from .figures_parts import TENSOR_BROKEN, add_marks_at
from .heatmap import HeatMapRow
from .heatmap import heat_map as draw_heat_map
from .style import (
    Floats,
    colours,
    column,
    empty_figure,
    escape,
    fill,
    is_logarithmic,
    label,
    module_name,
    new_figure,
    thin,
    title_of,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ..analyze.profiles import Matrix
    from ..analyze.run_data import RunData

MOST_SMALL_PLOTS = 400
_COLUMN = 4  # pixels of a column of the heat map, at the least
_SMALL_COLUMN = 3  # and of those of a small plot whose extremes are kept: hundreds of plots must stay a small file
# Heights in pixels: of a line of small plots, and of what is above and below all.
_LINE, _MARGINS = 126, 120
# Of its place in the one pair of axes a small plot takes so much; the rest is for the texts.
_WIDTH, _HEIGHT = 0.72, 0.76
_LEAST_RANGE = 0.01


def heat_map(
    data: RunData, site: str, statistic: str, *, modules: str = "*", dark: bool = False, width_pixels: int = 1200
) -> go.Figure:
    """One statistic of every module over the sampled steps, from the input of the model down to its output.

    Where a column stands for several steps, it shows the value farthest from the row's median. See
    `statsbridge.view.heatmap.heat_map`.

    Raises ConfigError for a site or statistic that is not there.
    """
    found = data.matrix(site, statistic, modules=modules)
    starts = _column_starts(len(found.steps), max(1, width_pixels // _COLUMN))
    missing = np.isnan(found.values)
    low = np.minimum.reduceat(np.where(missing, np.inf, found.values), starts, axis=1)
    high = np.maximum.reduceat(np.where(missing, -np.inf, found.values), starts, axis=1)
    nothing = np.logical_and.reduceat(missing, starts, axis=1)
    rows = [
        HeatMapRow(module_name(row["module"], row["tensor"], row["call"]), row["depth"])
        for row in found.rows.to_pylist()
    ]
    return draw_heat_map(
        site,
        statistic,
        rows=rows,
        starts=found.steps[starts].tolist(),
        last_step=int(found.steps[-1]),
        low=np.where(nothing, np.nan, low),
        high=np.where(nothing, np.nan, high),
        nonfinite=np.logical_or.reduceat(found.nonfinite, starts, axis=1),
        dark=dark,
    )


def grid(
    data: RunData,
    site: str,
    statistic: str,
    *,
    modules: str = "*",
    columns: int = 6,
    dark: bool = False,
    width_pixels: int = 1200,
) -> go.Figure:
    """A small plot over the steps for each module call and tensor, in the order of the data flow.

    Each is titled by its type and its place in the order of execution, such as `GroupNorm #81`; pointing at the curve
    tells the whole name. All have the steps in common, and each a range of values of its own. They lie in one pair of
    axes, because a browser takes long to lay out hundreds: `customdata` of a curve has its steps and values. At most
    400 are drawn; the title says how many there are.

    Raises ConfigError for a site or statistic that is not there, and where `columns` is less than 1.
    """
    if columns < 1:
        raise ConfigError(f"columns={columns}: give 1 or more")
    found = data.matrix(site, statistic, modules=modules)
    rows = found.rows.to_pylist()
    title = title_of(site, statistic)
    if len(rows) > MOST_SMALL_PLOTS:
        title += f", first {MOST_SMALL_PLOTS} of {len(rows)} modules: choose by modules="
        rows = rows[:MOST_SMALL_PLOTS]
    if not rows:
        return empty_figure(title, "nothing measured", dark=dark)
    lines = -(-len(rows) // columns)
    log = is_logarithmic(statistic) and bool((np.isfinite(found.values) & (found.values > 0)).any())
    scale = ", log scale" if log else ""
    title += f"<br><sub>step {found.steps[0]} to {found.steps[-1]}; each between the two values beside it{scale}</sub>"
    figure = new_figure(title, dark=dark, height=_MARGINS + lines * _LINE)
    _lay_out(figure, columns, lines)
    cells = [_cell(found, number, columns, log) for number in range(len(rows))]
    _draw_frames(figure, cells, colours(dark).grid)
    _draw_texts(figure, cells, rows)
    pixels = max(1, round(_WIDTH * width_pixels / columns / _SMALL_COLUMN))
    for number, (cell, row) in enumerate(zip(cells, rows, strict=True)):
        _draw_small(figure, cell, found, number, row, pixels, colours(dark).lines[0])
    return figure


def _column_starts(steps: int, most: int) -> Integers:
    """The first of the steps that share a column, for each column: all columns but the last of as many steps."""
    return np.arange(0, steps, -(-steps // most))


@dataclass(frozen=True, slots=True)
class _Cell:
    """Where one small plot lies in the one pair of axes, and the values at its bottom and top."""

    left: float
    bottom: float
    low: float
    high: float
    logarithmic: bool

    def across(self, steps: npt.NDArray[np.int64], all_steps: npt.NDArray[np.int64]) -> Floats:
        span = max(1, int(all_steps[-1] - all_steps[0]))
        where: Floats = self.left + (steps - all_steps[0]) / span * _WIDTH
        return where

    def upwards(self, values: Floats) -> Floats:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, values = math.log(low), math.log(high), np.log(values)
        if math.isinf(high - low):  # halves of the smallest numbers would be 0, so only here
            low, high, values = low / 2, high / 2, values / 2
        where: Floats = self.bottom + (values - low) / (high - low) * _HEIGHT
        return where


def _cell(found: Matrix, number: int, columns: int, log: bool) -> _Cell:
    line, place = divmod(number, columns)
    values = found.values[number]
    values = values[np.isfinite(values)]
    # A module whose values are all 0 is a line at 0, not a row of marks.
    log = log and bool((values > 0).any())
    shown = values[values > 0] if log else values
    low, high = _bounds(float(shown.min()), float(shown.max()), log) if len(shown) else (0.0, 1.0)
    return _Cell(place + 1 - _WIDTH, -(line + 1.0), low, high, log)


def _bounds(low: float, high: float, log: bool) -> tuple[float, float]:
    """The values at the bottom and the top of a small plot: finite, apart, and for a logarithm above 0."""
    least, most = (sys.float_info.min * sys.float_info.epsilon if log else -sys.float_info.max), sys.float_info.max
    # What moves by less than a hundredth of itself is not blown up to the whole height.
    margin = max(abs(low), abs(high)) * _LEAST_RANGE
    if high / 2 - low / 2 <= margin / 2:
        low, high = max(low - margin, least), min(high + margin, most)
    if low == high:  # 0, or so near to it that a hundredth is nothing
        low, high = (low, 2 * high) if log else (low - 1, high + 1)
    return low, high


def _lay_out(figure: go.Figure, columns: int, lines: int) -> None:
    legend = {"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "xanchor": "right", "x": 1}
    figure.update_layout(hovermode="closest", margin={"t": _MARGINS - 30, "b": 30, "l": 10, "r": 10}, legend=legend)
    figure.update_xaxes(range=[0, columns + 0.02], visible=False)
    figure.update_yaxes(range=[-lines - 0.04, 0.02], visible=False)


def _draw_frames(figure: go.Figure, cells: Sequence[_Cell], colour: str) -> None:
    across: list[float | None] = []
    upwards: list[float | None] = []
    for cell in cells:
        right, top = cell.left + _WIDTH, cell.bottom + _HEIGHT
        across += [cell.left, cell.left, right, right, cell.left, None]
        upwards += [cell.bottom, top, top, cell.bottom, cell.bottom, None]
    line = {"color": colour, "width": 1}
    figure.add_scatter(x=across, y=upwards, mode="lines", line=line, hoverinfo="skip", showlegend=False)


def _draw_texts(figure: go.Figure, cells: Sequence[_Cell], rows: Sequence[Mapping[str, Any]]) -> None:
    titles = {
        "x": [cell.left for cell in cells],
        "y": [cell.bottom + _HEIGHT for cell in cells],
        "text": [_small_title(row) for row in rows],
        "textposition": "top right",
        "textfont": {"size": 11},
        "hovertext": [escape(module_name(row["module"], row["tensor"], row["call"])) for row in rows],
    }
    low, high = (
        [f"{bound:.3g} " for bound in bounds] for bounds in zip(*((c.low, c.high) for c in cells), strict=True)
    )
    for texts in (
        titles,
        {"x": titles["x"], "y": [cell.bottom for cell in cells], "text": low, "textposition": "top left"},
        {"x": titles["x"], "y": titles["y"], "text": high, "textposition": "bottom left"},
    ):
        settings = {"textfont": {"size": 9}, "hoverinfo": "skip"} if "hovertext" not in texts else {"hoverinfo": "text"}
        figure.add_scatter(mode="text", showlegend=False, cliponaxis=False, **{**settings, **texts})


def _small_title(row: Mapping[str, Any]) -> str:
    place = "" if row["order"] is None else f" #{row['order']}"
    tensor = f" {label(row['tensor'], 14)}" if row["tensor"] else ""
    return f"{label(row['type'] or 'unknown', 20)}{place}{tensor}"


def _draw_small(
    figure: go.Figure, cell: _Cell, found: Matrix, number: int, row: Mapping[str, Any], pixels: int, colour: str
) -> None:
    values = found.values[number]
    name = escape(module_name(row["module"], row["tensor"], row["call"]))
    curve = downsample(
        found.steps,
        values,
        pixels=pixels,
        logarithmic=cell.logarithmic,
        missing=np.isnan(values),
        flags={TENSOR_BROKEN: found.nonfinite[number]},
    )
    dots = np.where(curve.isolated, 4, 0)
    steps = found.steps[curve.kept]
    figure.add_scatter(
        mode="lines+markers" if dots.any() else "lines",
        line={"color": colour, "width": 1.2},
        marker={"size": dots.tolist(), "color": colour} if dots.any() else None,
        name=name,
        showlegend=False,
        hovertemplate=f"{name}<br>step %{{customdata[0]}}: %{{customdata[1]:.6g}}<extra></extra>",
    )
    fill(
        figure,
        x=column(thin(np.round(cell.across(steps, found.steps), 4))),
        y=column(thin(np.round(cell.upwards(curve.y), 4))),
        customdata=column(list(zip(steps.tolist(), thin(curve.y), strict=True))),
    )
    for kind, points in curve.marks.items():
        marked = found.steps[points]
        where = thin(cell.across(marked, found.steps))
        add_marks_at(figure, kind, where, cell.bottom, _HEIGHT, marked.tolist(), name, size=5)

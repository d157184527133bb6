"""A heat map of one statistic of every module over the training. A leaf: numpy, and plotly when it draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .style import Flags, Floats, colours, column, escape, fill, label, new_figure, thin, title_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Viridis without its darkest end: even in lightness, the same to colour-blind readers, and never near black.
SEQUENTIAL = ("#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
# Blue to orange through white: the two that nearly everyone tells apart.
DIVERGING = ("#0072b2", "#7fb8d8", "#f7f7f7", "#f3c07f", "#d55e00")
# The same from a dark middle.
DIVERGING_DARK = ("#7cc4f5", "#2f6f9c", "#20242b", "#9c5a26", "#ffa45c")
NONFINITE, ZERO = "#000000", "#ffffff"  # in the dark theme the other way round

# One outlier must not press all else into one colour: decades on either side of the median.
_DECADES = 6.0
_OUTLYING = 10.0  # and on a linear scale, times what nine of ten do not exceed
_MOST_LABELS = 110


class HeatMapRow(NamedTuple):
    """One row: what it is called, and how deep in the data flow it lies."""

    name: str
    depth: int | None


def heat_map(
    site: str,
    statistic: str,
    *,
    rows: Sequence[HeatMapRow],
    starts: Sequence[int],
    last_step: int,
    low: Floats,
    high: Floats,
    nonfinite: Flags,
    dark: bool = False,
) -> go.Figure:
    """Draw one statistic, rows from the input of the model (top) to its output, columns by step.

    Args:
        site: what was measured.
        statistic: of which statistic.
        rows: the names of the rows, in the order to draw them.
        starts: the first step of each column, ascending.
        last_step: the last step of all.
        low: the lowest value in each cell, shape `[rows, columns]`, NaN where there is none.
        high: the highest value in each cell, of the same shape.
        nonfinite: whether any element behind the cell was NaN or infinite; same shape.
        dark: the theme.

    Where a cell stands for several steps it shows the value farther from the row's median, so that no spike
    and no collapse is lost. Numbers that are never negative are coloured by their logarithm. NaN and infinity
    are black, an exact zero (which has no logarithm) is white (in the dark theme the other way round), and what was
    not measured is grey.

    Raises ConfigError where plotly is not installed.
    """
    logarithmic = not (low < 0).any()
    value = _farthest(low, high, logarithmic)
    zero = (value == 0) & ~nonfinite if logarithmic else np.zeros_like(nonfinite)
    shown = np.where(nonfinite | zero, np.nan, value)
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.log10(shown) if logarithmic else shown
    labels = _labels(rows)
    axes = {"x": _edges(starts, last_step), "y": labels}
    figure = new_figure(title_of(site, statistic), dark=dark, height=min(1800, max(320, 170 + 16 * len(labels))))
    figure.add_heatmap(**axes, **_colours(shown, statistic, logarithmic, dark), name=statistic)
    fill(figure, z=_thinned(shown, logarithmic))
    black, white = (ZERO, NONFINITE) if dark else (NONFINITE, ZERO)
    for flags, colour, meaning in ((nonfinite, black, "NaN or infinite"), (zero, white, "exactly 0")):
        if flags.any():
            marks = np.where(flags, 1.0, np.nan)
            scale = [[0, colour], [1, colour]]
            hover = f"%{{y}}<br>step %{{x}}<br>{meaning}<extra></extra>"
            figure.add_heatmap(**axes, colorscale=scale, showscale=False, hovertemplate=hover)
            fill(figure, z=_thinned(marks, True))
            _add_to_legend(figure, colour, meaning)
    if (np.isnan(value) & ~nonfinite).any():
        _add_to_legend(figure, colours(dark).missing, "not measured")
    _lay_out(figure, rows, labels, colours(dark).missing)
    return figure


def _farthest(low: Floats, high: Floats, logarithmic: bool) -> Floats:
    """Of the two values of each cell the one farther from the median of its row, by ratio where logarithmic."""
    if logarithmic:
        with np.errstate(divide="ignore"):
            near, far = np.log(low), np.log(high)
    else:
        near, far = low / 2, high / 2  # halves: the difference of two finite numbers may overflow
    middle = np.array([_median(row) for row in np.stack((near, far), axis=1).reshape(len(low), -1)])[:, None]
    with np.errstate(invalid="ignore"):
        return np.where(middle - near > far - middle, low, high)


def _median(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else 0.0


def _colours(shown: Floats, statistic: str, logarithmic: bool, dark: bool) -> dict[str, Any]:
    finite = shown[np.isfinite(shown)]
    if not logarithmic:
        size = np.abs(finite)
        largest = min(float(size.max()), _OUTLYING * float(np.quantile(size, 0.9))) or float(size.max()) or 1.0
        return {
            "colorscale": list(DIVERGING_DARK if dark else DIVERGING),
            "zmin": -largest,
            "zmax": largest,
            "colorbar": {"title": {"text": statistic}, "exponentformat": "e"},
            "hovertemplate": f"%{{y}}<br>step %{{x}}<br>{statistic} %{{z:.3g}}<extra></extra>",
        }
    middle = float(np.median(finite)) if len(finite) else 0.0
    bottom = max(float(finite.min()), middle - _DECADES) if len(finite) else 0.0
    top = min(float(finite.max()), middle + _DECADES) if len(finite) else 1.0
    if top - bottom < 1:  # a constant is one colour, not the noise in its last digit
        bottom, top = (bottom + top - 1) / 2, (bottom + top + 1) / 2
    powers = np.arange(np.ceil(bottom), np.floor(top) + 1)
    ticks = powers[:: max(1, len(powers) // 8)]
    return {
        "colorscale": list(SEQUENTIAL),
        "zmin": bottom,
        "zmax": top,
        "colorbar": {
            "title": {"text": f"{statistic}<br>(log)"},
            "tickvals": ticks.tolist(),
            "ticktext": [f"1e{int(power)}" for power in ticks],
        },
        "hovertemplate": f"%{{y}}<br>step %{{x}}<br>{statistic} 10^%{{z:.2f}}<extra></extra>",
    }


def _edges(starts: Sequence[int], last_step: int) -> list[float]:
    """The left edge of each column, and the right one of the last: as far again as the columns lie apart."""
    gap = float(np.median(np.diff(starts))) if len(starts) > 1 else 1.0
    return [*map(float, starts), max(last_step + 1.0, starts[-1] + gap)]


def _labels(rows: Sequence[HeatMapRow]) -> list[str]:
    """One text a row, each different and escaped: plotly draws rows of one name over each other."""
    labels: list[str] = []
    seen: dict[str, int] = {}
    for row in rows:
        text = escape(_placed(row))
        seen[text] = seen.get(text, 0) + 1
        labels.append(text if seen[text] == 1 else f"{text} ({seen[text]})")
    return labels


def _placed(row: HeatMapRow) -> str:
    return row.name if row.depth is None else f"{row.depth} · {row.name}"


def _thinned(values: Floats, logarithmic: bool) -> npt.NDArray[np.object_]:
    """Rounded, and without NaN: a picture of 1,000 × 400 cells stays small."""
    return column([thin(row) for row in (np.round(values, 3) if logarithmic else values)])


def _add_to_legend(figure: go.Figure, colour: str, meaning: str) -> None:
    marker = {"symbol": "square", "size": 12, "color": colour, "line": {"width": 1, "color": "#808080"}}
    figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=meaning, showlegend=True)


def _lay_out(figure: go.Figure, rows: Sequence[HeatMapRow], labels: Sequence[str], missing: str) -> None:
    every = -(-len(labels) // _MOST_LABELS)
    figure.update_layout(
        plot_bgcolor=missing,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "xanchor": "right", "x": 1.0},
    )
    figure.update_xaxes(title="step", showgrid=False, zeroline=False)
    figure.update_yaxes(
        title="depth · module, from the input down",
        type="category",
        autorange="reversed",
        categoryorder="array",
        categoryarray=list(labels),
        tickmode="array",
        tickvals=list(labels[::every]),
        ticktext=[label(_placed(row)) for row in rows[::every]],
        showgrid=False,
        automargin=True,
    )

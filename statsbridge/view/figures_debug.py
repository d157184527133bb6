"""Pictures of what the debugging toolkit measured: plain numbers in, a Plotly figure out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .style import colours, empty_figure, escape, faded, label, new_figure, plotly_graphs, thin

if TYPE_CHECKING:
    import plotly.graph_objects as go

_OUTCOMES = {True: "passed", False: "failed", None: "undecided"}


def title_of_test(name: str, passed: bool | None) -> str:
    """The name of a test and its outcome, as a Plotly text."""
    return f"{escape(name)}: {_OUTCOMES[passed]}"


def numbers_figure(
    name: str, passed: bool | None, numbers: Mapping[str, float | int | str | None], *, dark: bool = False
) -> go.Figure:
    """The numbers of a test as a table; a dash for what could not be measured."""
    theme = colours(dark)
    figure = new_figure(title_of_test(name, passed), dark=dark, height=150 + 26 * len(numbers))
    names = [escape(key.replace("_", " ")) for key in numbers]
    values = [_shown(value) for value in numbers.values()]
    cells = {"align": "left", "height": 26, "fill": {"color": theme.paper}, "line": {"color": theme.grid}}
    figure.add_table(
        header={"values": ["", ""], "height": 2, "fill": {"color": theme.grid}, "line": {"color": theme.grid}},
        cells={"values": [names, values], **cells},
    )
    return figure


def losses_figure(
    title: str, losses: Sequence[float | None], threshold: float | None, *, dark: bool = False
) -> go.Figure:
    """The loss by step, with the threshold it had to come under.

    Logarithmic where all losses are above 0. A loss that is not finite is marked on the lower edge.
    """
    theme = colours(dark)
    figure = new_figure(title, dark=dark, height=420)
    values = np.array([math.nan if loss is None else loss for loss in losses], np.float64)
    finite = np.isfinite(values)
    steps = np.arange(len(values))
    figure.add_scatter(
        x=steps.tolist(),
        y=thin(np.where(finite, values, np.nan)),
        mode="lines",
        name="loss",
        hovertemplate="step %{x}<br>loss %{y:.4g}<extra></extra>",
    )
    _mark_nonfinite(figure, steps[~finite].tolist(), theme.severity["critical"])
    positive = bool(finite.any()) and bool((values[finite] > 0).all()) and (threshold is None or threshold > 0)
    if threshold is not None:
        text = f"threshold {threshold:g}"
        _line_across(figure, threshold, text, theme.severity["info"], logarithmic=positive)
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="loss", type="log" if positive else "linear")
    return figure


def rate_range_figure(
    title: str,
    table: Mapping[str, Sequence[Any]],
    marks: Mapping[str, float | None],
    *,
    logarithmic: bool,
    dark: bool = False,
) -> go.Figure:
    """Loss by learning rate, raw and smoothed (columns `rate`, `loss`, `smoothed`), with a line at every mark.

    The axis ends a little above the losses up to the lowest one, since a diverging loss would flatten all else;
    what lies above is cut off and says so where the pointer is.
    """
    theme = colours(dark)
    figure = new_figure(title, dark=dark, height=460)
    rates = np.array(table["rate"], np.float64)
    raw = np.array([math.nan if value is None else value for value in table["loss"]], np.float64)
    smoothed = np.array([math.nan if value is None else value for value in table["smoothed"]], np.float64)
    hover = "rate %{x:.3g}<br>%{fullData.name} %{y:.4g}<extra></extra>"
    shown = np.where(np.isfinite(raw), raw, np.nan)
    faint = faded(theme.lines[0], 0.45)
    figure.add_scatter(
        x=thin(rates), y=thin(shown), mode="lines", name="loss", line={"color": faint}, hovertemplate=hover
    )
    figure.add_scatter(
        x=thin(rates),
        y=thin(np.where(np.isfinite(smoothed), smoothed, np.nan)),
        mode="lines",
        name="smoothed",
        line={"color": theme.lines[0], "width": 2.5},
        hovertemplate=hover,
    )
    _mark_nonfinite(figure, rates[~np.isfinite(raw)].tolist(), theme.severity["critical"])
    for number, (name, rate) in enumerate(marks.items()):
        if rate is not None:
            figure.add_vline(x=rate, line={"color": theme.lines[number + 1], "dash": "dash"})
            text = f"{escape(name)}<br>{rate:.3g}"
            place = math.log10(rate) if logarithmic else rate
            figure.add_annotation(
                x=place,
                y=1.0 - 0.11 * number,
                yref="paper",
                yanchor="top",
                xanchor="left",
                align="left",
                showarrow=False,
                text=text,
                font={"color": theme.lines[number + 1]},
                bgcolor=faded(theme.paper, 0.8),
            )
    bounds = _bounds(shown)
    figure.update_xaxes(title="learning rate", type="log" if logarithmic else "linear")
    figure.update_yaxes(title="loss of the batch", range=bounds)
    return figure


def gradients_figure(
    title: str,
    names: Sequence[str],
    differences: Sequence[float | None],
    verdicts: Sequence[str],
    limits: tuple[float, float],
    *,
    dark: bool = False,
) -> go.Figure:
    """The relative difference of each check of a gradient, by parameter in the order of the model.

    `limits`: right below the first, wrong above the second. An exact agreement stands at 1e-16, float64's precision.
    """
    theme = colours(dark)
    rows = list(dict.fromkeys(names))
    if all(difference is None for difference in differences):
        return empty_figure(title, "no derivative could be measured", dark=dark)
    figure = new_figure(title, dark=dark, height=min(1600, 190 + 22 * len(rows)))
    meant = (("right", theme.lines[2]), ("undecided", theme.severity["info"]), ("wrong", theme.severity["critical"]))
    for verdict, colour in meant:
        chosen = [
            (max(difference, 1e-16), name)
            for name, difference, judged in zip(names, differences, verdicts, strict=True)
            if judged == verdict and difference is not None
        ]
        if chosen:
            figure.add_scatter(
                x=thin([difference for difference, _ in chosen]),
                y=[rows.index(name) for _, name in chosen],
                mode="markers",
                marker={"color": colour, "size": 9, "symbol": "x" if verdict == "wrong" else "circle"},
                text=[escape(name) for _, name in chosen],
                name=verdict,
                hovertemplate="%{text}<br>relative difference %{x:.2g}<extra></extra>",
            )
    for limit in limits:
        figure.add_vline(x=limit, line={"color": theme.severity["info"], "dash": "dot"})
    every = -(-len(rows) // 60)
    figure.update_xaxes(title="relative difference between autograd and central differences", type="log")
    figure.update_yaxes(
        autorange="reversed",
        tickmode="array",
        tickvals=list(range(0, len(rows), every)),
        ticktext=[label(name) for name in rows[::every]],
    )
    return figure


def expected_figure(
    title: str, losses: Sequence[float], expected: float | None, band: tuple[float, float] | None, *, dark: bool = False
) -> go.Figure:
    """The loss of each batch beside the expected one and the band in which it passes."""
    theme = colours(dark)
    figure = new_figure(title, dark=dark, height=380)
    values = np.array(losses, np.float64)
    finite = np.isfinite(values)
    figure.add_scatter(
        x=list(range(len(losses))),
        y=thin(np.where(finite, values, np.nan)),
        mode="markers",
        marker={"size": 9},
        name="loss",
        hovertemplate="batch %{x}<br>loss %{y:.4g}<extra></extra>",
    )
    _mark_nonfinite(figure, np.flatnonzero(~finite).tolist(), theme.severity["critical"])
    if band is not None:
        figure.add_hrect(*band, fillcolor=theme.lines[2], opacity=0.12, line_width=0)
    if expected is not None:
        _line_across(figure, expected, f"expected {expected:.4g}", theme.severity["info"])
    figure.update_xaxes(title="batch", dtick=1 if len(losses) <= 20 else None)
    figure.update_yaxes(title="loss", rangemode="tozero")
    return figure


def _line_across(figure: go.Figure, value: float, text: str, colour: str, *, logarithmic: bool = False) -> None:
    figure.add_hline(y=value, line={"color": colour, "dash": "dash"})
    figure.add_annotation(
        text=text,
        font={"color": colour},
        x=1,
        xref="paper",
        xanchor="right",
        y=math.log10(value) if logarithmic else value,
        yanchor="bottom",
        showarrow=False,
    )


def _mark_nonfinite(figure: go.Figure, places: Sequence[float], colour: str) -> None:
    if not places:
        return
    shapes = [
        plotly_graphs().layout.Shape(
            type="line", x0=place, x1=place, y0=0, y1=0.06, yref="paper", line={"color": colour, "width": 3}
        )
        for place in places[:200]
    ]
    figure.update_layout(shapes=[*figure.layout.shapes, *shapes])
    marker = {"symbol": "line-ns-open", "size": 12, "color": colour}
    figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name="NaN or infinite")


def _bounds(losses: np.ndarray[Any, np.dtype[np.float64]]) -> list[float] | None:
    finite = losses[np.isfinite(losses)]
    if not len(finite):
        return None
    lowest = float(finite.min())
    before = losses[: int(np.nanargmin(losses)) + 1]
    highest = float(np.nanmax(before))
    margin = (highest - lowest) or abs(lowest) or 1.0
    return [lowest - 0.1 * margin, highest + 0.5 * margin]


def _shown(value: float | int | str | None) -> str:
    if value is None:
        return "–"
    return f"{value:.5g}" if isinstance(value, float) else escape(value)

"""The axis of modules, in the order of the data flow, and what is drawn along it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .downsample import NOT_POSITIVE
from .figures_parts import Panel, add_marks, is_dark
from .style import Floats, colours, escape, faded, label, module_name, thin

if TYPE_CHECKING:
    import plotly.graph_objects as go

Key = tuple[str, int, str]

# One tick label needs so many pixels, turned on its side.
_TICK = 20
LONGEST_TICK = 38
# Karpathy, "A Recipe for Training Neural Networks": an update near 1e-3 of the parameter; statsbridge.analyze.marks.
_USUAL, _SUSPICIOUS, _DIVERGING = (10**-3.5, 10**-2.5), 0.1, 1.0


def key_of(row: Mapping[str, Any]) -> Key:
    """What tells the rows of one site and step apart: module, call, tensor."""
    return (row["module"], row["call"], row["tensor"] or "")


def places_of(rows: Sequence[Mapping[str, Any]]) -> dict[Key, int]:
    """Each module call and tensor → its place on the axis, in the order of the data flow."""

    def order(row: Mapping[str, Any]) -> tuple[float, ...]:
        known = (row["depth"], row.get("order", row["position"]))
        return tuple(math.inf if number is None else number for number in (*known, row["position"]))

    # What was never called has no place in the flow.
    placed = (row for row in rows if row["depth"] is not None or _has_number(row))
    keys = dict.fromkeys(key_of(row) for row in sorted(placed, key=order))
    return {key: place for place, key in enumerate(keys)}


def _has_number(row: Mapping[str, Any]) -> bool:
    return any(row.get(name) is not None for name in ("low", "gradient_norm"))


def module_axis(places: Mapping[Key, int], width_pixels: int) -> dict[str, Any]:
    """The settings of the x axis: as many names as there is room for, shortened."""
    every = max(1, -(-len(places) * _TICK // max(1, width_pixels)))
    shown = [key for key, place in places.items() if place % every == 0]
    return {
        "title": {"text": "module, in the order of the data flow"},
        "tickvals": [places[key] for key in shown],
        "ticktext": [label(module_name(module, tensor, call), LONGEST_TICK) for module, call, tensor in shown],
        "tickangle": -90 if len(shown) > 12 else -35,
        "range": [-0.6, max(len(places), 1) - 0.4],
        "showgrid": False,
        "zeroline": False,
    }


def draw_points(
    figure: go.Figure,
    panel: Panel,
    x: np.ndarray,
    value: Floats,
    rows: Sequence[Mapping[str, Any]],
    name: str,
    colour: str,
    *,
    bounds: bool,
) -> None:
    """One value a module, joined by a line; a gap where there is none, a mark where a log axis has no place for it."""
    hidden = (value <= 0) if panel.logarithmic else np.zeros(len(value), bool)
    by_place = dict(zip(x.tolist(), range(len(x)), strict=True))
    # A module that has no row here is a gap in the line too.
    axis = np.arange(x[0], x[-1] + 1) if len(x) else x
    numbers = [by_place.get(place) for place in axis.tolist()]
    shown = np.where(hidden, np.nan, value)
    told = "<br>from %{customdata[3]:.6g} to %{customdata[4]:.6g} over all steps" if bounds else ""
    figure.add_scatter(
        x=axis.tolist(),
        y=thin([math.nan if number is None else float(shown[number]) for number in numbers]),
        mode="lines+markers",
        line={"color": colour, "width": 1.4},
        marker={"size": 5, "color": colour},
        name=name,
        customdata=[None if number is None else _about(rows[number], bounds) for number in numbers],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}, depth %{customdata[2]}<br>"
        f"{name} %{{y:.6g}}{told}<extra></extra>",
        **panel.axes,
    )
    if hidden.any():
        add_marks(figure, panel, NOT_POSITIVE, x[hidden].tolist(), name)


def _about(row: Mapping[str, Any], bounds: bool) -> list[Any]:
    name = escape(module_name(row["module"], row["tensor"] or "", row["call"]))
    depth = "unknown" if row["depth"] is None else row["depth"]
    return [
        name,
        escape(row["type"] or ""),
        depth,
        *(thin([row["low"] or math.nan, row["high"] or math.nan]) if bounds else ()),
    ]


def add_limits(figure: go.Figure, panel: Panel) -> None:
    """The band in which update ratios usually lie, and the two limits above it."""
    theme = colours(is_dark(figure))
    axes = {"xref": f"{panel.axes['xaxis']} domain", "yref": panel.axes["yaxis"], "x0": 0, "x1": 1, "layer": "below"}
    usual = faded(theme.lines[2], 0.14)
    figure.add_shape(type="rect", y0=_USUAL[0], y1=_USUAL[1], fillcolor=usual, line={"width": 0}, **axes)
    limits = ((_SUSPICIOUS, "warning", "0.1 suspicious"), (_DIVERGING, "critical", "1 diverging"))
    for height, severity, _ in limits:
        line = {"color": theme.severity[severity], "width": 1.4, "dash": "dash"}
        figure.add_shape(type="line", y0=height, y1=height, line=line, **axes | {"layer": "above"})
    texts = [
        (1e-3, theme.lines[2], "1e-3 usual"),
        *((height, theme.severity[one], text) for height, one, text in limits),
    ]
    for height, colour, text in texts:
        figure.add_annotation(
            text=text,
            xref=axes["xref"],
            yref=axes["yref"],
            x=1,
            y=math.log10(height) if panel.logarithmic else height,
            xanchor="right",
            yanchor="bottom",
            showarrow=False,
            font={"size": 11, "color": colour},
        )


def say(figure: go.Figure, panel: Panel, message: str) -> None:
    """Write a message into an empty panel."""
    axes = {"xref": f"{panel.axes['xaxis']} domain", "yref": f"{panel.axes['yaxis']} domain"}
    figure.add_annotation(text=label(message, 120), x=0.5, y=0.5, showarrow=False, **axes)


def finished(figure: go.Figure) -> go.Figure:
    """Put the legend above the panels, and the title above it, clear of a second line of the legend."""
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.0, "xanchor": "right", "x": 1.0}
    title = {"yref": "container", "y": 1, "yanchor": "top", "pad": {"t": 12}}
    figure.update_layout(showlegend=True, legend=legend, title=title, margin={"t": 96})
    return figure

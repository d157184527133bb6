"""What the figures are put together from: panels, curves with their marks, and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..analyze.smoothing import smooth
from .downsample import MINUS_INFINITY, NAN, NOT_POSITIVE, PLUS_INFINITY, downsample
from .style import Flags, colours, column, escape, faded, fill, label, thin

if TYPE_CHECKING:
    import plotly.graph_objects as go

TENSOR_BROKEN = "NaN or infinity in the tensor"

_FEW = 60  # points up to which each of them is worth a dot
_SMOOTH = 3  # pixels of a column of the smoothed curve, which has no spikes to keep
_MOST_LINES = 40  # vertical lines of events of one severity
_MOST_TOLD = 6  # events that one mark tells of
_LONGEST_MESSAGE = 160
_MARKS_AXIS = 1000  # y axis 1000 + n lies over that of panel n, from 0 to 1, so that zooming hides no mark
# Kind → symbol, height in the panel, severity.
_MARKS = {
    NAN: ("x", 0.05, "critical"),
    PLUS_INFINITY: ("triangle-up", 0.96, "critical"),
    MINUS_INFINITY: ("triangle-down", 0.04, "critical"),
    NOT_POSITIVE: ("triangle-down-open", 0.02, "info"),
    TENSOR_BROKEN: ("x", 0.05, "critical"),
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes of a figure, numbered from 1."""

    number: int
    logarithmic: bool = False

    @property
    def axes(self) -> dict[str, str]:
        """The axes as a trace names them."""
        suffix = "" if self.number == 1 else str(self.number)
        return {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}


def add_panel(
    figure: go.Figure,
    panel: Panel,
    *,
    across: tuple[float, float] = (0.0, 1.0),
    upwards: tuple[float, float] = (0.0, 1.0),
    x: Mapping[str, Any] | None = None,
    y: Mapping[str, Any] | None = None,
) -> Panel:
    """Lay the axes of `panel` into this part of the figure; `x` and `y`: their settings."""
    suffix = "" if panel.number == 1 else str(panel.number)
    scale = {"type": "log", "tickformat": "~g", "nticks": 6} if panel.logarithmic else {}
    own = {"domain": list(across), "anchor": panel.axes["yaxis"]} | dict(x or {})
    figure.layout[f"xaxis{suffix}"] = own
    figure.layout[f"yaxis{suffix}"] = {"domain": list(upwards), "anchor": panel.axes["xaxis"]} | scale | dict(y or {})
    return panel


def stack(
    figure: go.Figure, titles: Sequence[str], logarithmic: Sequence[bool], *, x: Mapping[str, Any], gap: float = 0.05
) -> list[Panel]:
    """Panels one above the other, the first on top, with one x axis for all. `titles`: of the y axes."""
    height = (1 + gap) / len(titles) - gap
    panels = []
    for number, (title, log) in enumerate(zip(titles, logarithmic, strict=True), start=1):
        top = 1 - (number - 1) * (height + gap)
        last = number == len(titles)
        settings = dict(x) if last else {"showticklabels": False} | {k: v for k, v in x.items() if k != "title"}
        if not last:
            settings["matches"] = Panel(len(titles)).axes["xaxis"]
        upwards = (max(0.0, top - height), top)
        y: dict[str, Any] = {"title": {"text": title, "font": {"size": 11}}}
        if log and len(titles) > 1:
            y["nticks"] = 3  # the ten digits of a decade would lie on each other
        panels.append(add_panel(figure, Panel(number, log), upwards=upwards, x=settings, y=y))
    return panels


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """How one curve is drawn.

    `name`: not escaped. `pixels`: how wide its panel is. `brief`: one entry in the legend for raw and smoothed values,
    and raw values that stay in the background.
    """

    name: str
    colour: str
    dash: str = "solid"
    pixels: int
    smoothing: float | None = None
    brief: bool = False


def add_curve(
    figure: go.Figure,
    panel: Panel,
    x: npt.NDArray[Any],
    y: npt.NDArray[np.float64],
    line: Line,
    *,
    missing: Flags | None = None,
    flags: Mapping[str, Flags] | None = None,
) -> None:
    """Draw the raw curve, and the smoothed one over it; mark what a line cannot show. See `downsample`."""
    log = panel.logarithmic
    curve = downsample(x, y, pixels=line.pixels, logarithmic=log, missing=missing, flags=flags)
    dots = np.where(curve.isolated | (len(curve.kept) <= _FEW), 5, 0)
    smoothed = line.smoothing is not None and len(y) > 1
    drawn = {
        "line": {"color": line.colour, "width": 1 if smoothed else 1.6, "dash": line.dash},
        "opacity": (0.25 if line.brief else 0.55) if smoothed else 1.0,
        "legendgroup": escape(line.name),
        **panel.axes,
    }
    figure.add_scatter(
        mode="lines+markers" if dots.any() else "lines",
        marker={"size": 5 if dots.all() else dots.tolist(), "color": line.colour} if dots.any() else None,
        name=escape(line.name),
        showlegend=not (line.brief and smoothed),
        hovertemplate=f"step %{{x}}<br>{escape(line.name)} %{{y:.6g}}<extra></extra>",
        **drawn,
    )
    fill(figure, x=column(x[curve.kept].tolist()), y=column(thin(curve.y)))
    for kind, points in curve.marks.items():
        add_marks(figure, panel, kind, x[points].tolist(), line.name)
    if smoothed and line.smoothing is not None:
        _add_smoothed(figure, panel, x, y, line, missing, drawn)


def _add_smoothed(
    figure: go.Figure,
    panel: Panel,
    x: npt.NDArray[Any],
    y: npt.NDArray[np.float64],
    line: Line,
    missing: Flags | None,
    drawn: Mapping[str, Any],
) -> None:
    assert line.smoothing is not None
    known = y if missing is None else np.where(missing, np.nan, y)
    average = np.array(smooth(known.tolist(), line.smoothing))
    pixels = max(1, line.pixels // _SMOOTH)
    curve = downsample(x, average, pixels=pixels, logarithmic=panel.logarithmic, missing=np.isnan(average))
    name = escape(line.name) + ("" if line.brief else f", smoothed ({line.smoothing:g})")
    figure.add_scatter(
        mode="lines",
        name=name,
        hovertemplate=f"step %{{x}}<br>{name} %{{y:.6g}}<extra></extra>",
        **{**drawn, "line": {"color": line.colour, "width": 2.2, "dash": line.dash}, "opacity": 1.0},
    )
    fill(figure, x=column(x[curve.kept].tolist()), y=column(thin(curve.y)))


def add_marks(figure: go.Figure, panel: Panel, kind: str, x: Sequence[Any], name: str) -> None:
    """Mark these places as having a value of that kind, which no line can show."""
    above = _marks_axis(figure, panel)
    add_marks_at(figure, kind, x, 0.0, 1.0, x, escape(name), xaxis=panel.axes["xaxis"], yaxis=above)


def add_marks_at(
    figure: go.Figure,
    kind: str,
    x: Sequence[Any],
    bottom: float,
    height: float,
    steps: Sequence[Any],
    name: str,
    size: int = 8,
    **axes: str,
) -> None:
    """Marks between `bottom` and `bottom + height` of the y axis; `name` has been escaped."""
    symbol, place, severity = _MARKS[kind]
    figure.add_scatter(
        x=column(x),
        y=column([bottom + place * height] * len(x)),
        customdata=column(steps),
        mode="markers",
        marker={"symbol": symbol, "size": size, "color": colours(is_dark(figure)).severity[severity]},
        name=kind,
        legendgroup=kind,
        showlegend=all(trace.legendgroup != kind for trace in figure.data),
        hovertemplate=f"%{{customdata}}<br>{name}: {kind}<extra></extra>",
        cliponaxis=False,
        **axes,
    )


def _marks_axis(figure: go.Figure, panel: Panel) -> str:
    number = _MARKS_AXIS + panel.number
    figure.layout[f"yaxis{number}"] = {
        "overlaying": panel.axes["yaxis"],
        "anchor": panel.axes["xaxis"],
        "range": [0, 1],
        "fixedrange": True,
        "visible": False,
    }
    return f"y{number}"


def is_dark(figure: go.Figure) -> bool:
    """Whether the figure is drawn in the dark theme."""
    return bool(figure.layout.template.layout.paper_bgcolor == colours(True).paper)


def add_events(figure: go.Figure, panel: Panel, events: pa.Table, *, pixels: int) -> None:
    """Mark events at the top of `panel`, with a line through the whole figure; those at one pixel are one mark.

    `events`: rows of the table `events`. Those without a step have no place on the axis and are left out.
    """
    rows = [row for row in events.to_pylist() if row["step"] is not None]
    if not rows:
        return
    rows.sort(key=lambda row: row["step"])
    first, last = rows[0]["step"], rows[-1]["step"]
    theme = colours(is_dark(figure))
    for severity in ("info", "warning", "critical"):  # the worst on top
        places: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            if row["severity"] == severity:
                places.setdefault((row["step"] - first) * pixels // max(1, last - first), []).append(row)
        if not places:
            continue
        colour = theme.severity[severity]
        steps = [together[0]["step"] for together in places.values()]
        figure.add_scatter(
            x=steps,
            y=[1.0] * len(steps),
            mode="markers",
            marker={"symbol": "triangle-down", "size": 11, "color": colour},
            name=f"event: {severity}",
            legendgroup=f"event: {severity}",
            hovertext=[_told(together) for together in places.values()],
            hovertemplate="%{hovertext}<extra></extra>",
            cliponaxis=False,
            xaxis=panel.axes["xaxis"],
            yaxis=_marks_axis(figure, panel),
        )
        for step in steps[:_MOST_LINES]:
            figure.add_shape(
                type="line",
                xref=panel.axes["xaxis"],
                yref="paper",
                x0=step,
                x1=step,
                y0=0,
                y1=1,
                layer="below",
                line={"color": faded(colour, 0.5), "width": 1, "dash": "dot"},
            )


def _told(events: Sequence[Mapping[str, Any]]) -> str:
    told = []
    for event in events[:_MOST_TOLD]:
        where = f" {event['module']}" if event["module"] else ""
        message = " ".join(str(event["message"]).split())
        if len(message) > _LONGEST_MESSAGE:
            message = f"{message[:_LONGEST_MESSAGE]}…"
        told.append(f"step {event['step']}, {label(event['kind'] + where, 120)}: {escape(message)}")
    if len(events) > _MOST_TOLD:
        told.append(f"and {len(events) - _MOST_TOLD} more")
    return "<br>".join(_wrapped(line) for line in told)


def _wrapped(text: str, width: int = 90) -> str:
    """Plotly breaks no line of a hover text by itself."""
    lines, current = [], ""
    for word in text.split(" "):
        if current and len(current) + len(word) >= width:
            lines.append(current)
            current = ""
        current = f"{current} {word}" if current else word
    return "<br>".join([*lines, current])


def panel_width(width_pixels: int) -> int:
    """How wide the panels of a figure are that has its legend beside them."""
    return max(1, round(0.78 * width_pixels))


def side_legend(figure: go.Figure) -> go.Figure:
    """Put the legend beside the panels."""
    figure.update_layout(
        hovermode="closest", showlegend=True, legend={"yanchor": "top", "y": 1.0, "x": 1.01, "xanchor": "left"}
    )
    return figure

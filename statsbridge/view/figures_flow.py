"""How gradients and updates compare with their parameters, and bars by type of module."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow.compute as pc

from ..analyze.choices import unknown_choice
from .downsample import NOT_POSITIVE
from .figures_modules import LONGEST_TICK, Key, add_limits, draw_points, finished, key_of, module_axis, places_of, say
from .figures_parts import TENSOR_BROKEN, Panel, add_marks, stack
from .style import (
    colours,
    empty_figure,
    escape,
    is_logarithmic,
    label,
    line_style,
    module_name,
    new_figure,
    thin,
    title_of,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ..analyze.run_data import RunData


def gradient_flow(
    data: RunData,
    *,
    step: int | None = None,
    by: Literal["depth", "type"] = "depth",
    dark: bool = False,
    width_pixels: int = 1200,
) -> go.Figure:
    """Gradient and update of each parameter relative to the parameter: ‖g‖ / ‖θ‖ and ‖Δθ‖ / ‖θ‖.

    `by`: `"depth"` in the order of the data flow, or `"type"`, one box for each type of module with a dot for each
    parameter. `step`: None for the last sampled one. A parameter whose gradient or update held a NaN or an infinity is
    marked.

    Raises ConfigError where no parameter gradients were recorded, and for a step that was not sampled.
    """
    if by not in ("depth", "type"):
        raise unknown_choice("by", by, ("depth", "type"))
    rows = data.gradient_flow(step=step).to_pylist()
    parts = (
        ("parameter_grad", "gradient_to_parameter", "‖g‖ / ‖θ‖"),
        ("update", "update_to_parameter", "‖Δθ‖ / ‖θ‖"),
    )
    at = _last_step(data, rows) if step is None else step
    broken = _nonfinite(data, at)
    figure = new_figure(f"Gradient flow, step {at}", dark=dark, height=720)
    names = [
        "parameter_grad / parameter: l2<br>[loss per squared unit]",
        title_of("update", "update_ratio", True),
    ]
    logs = [any((row["gradient_to_parameter"] or 0) > 0 for row in rows), True]
    places = places_of(rows)
    axis = module_axis(places, width_pixels) if by == "depth" else {"title": {"text": "type of module"}}
    panels = stack(figure, names, logs, x=axis, gap=0.04)
    for panel, (site, column, said), colour in zip(panels, parts, colours(dark).lines, strict=False):
        if by == "depth":
            _draw_ratios(figure, panel, rows, column, said, places, colour)
        else:
            _draw_boxes(figure, panel, rows, column, said, colour)
        if all(row[column] is None for row in rows):
            say(figure, panel, "no finite number at this step")
        marked = [row for row in rows if (site, row["module"], row["tensor"]) in broken]
        where = [places[key_of(row)] if by == "depth" else _type_label(row) for row in marked]
        if where:
            add_marks(figure, panel, TENSOR_BROKEN, list(dict.fromkeys(where)), said)
    add_limits(figure, panels[1])
    return finished(figure)


def _last_step(data: RunData, rows: Sequence[Mapping[str, Any]]) -> int:
    """The step of the rows: the last one of any of their modules."""
    steps = data.select(modules=glob.escape(rows[0]["module"]), sites="parameter_grad", columns=["step"])["step"]
    return int(pc.max(steps).as_py())


def _nonfinite(data: RunData, step: int) -> set[tuple[str, str, str]]:
    """Site, module and tensor of the gradients and updates at a step that were not finite throughout."""
    columns = ["site", "module", "tensor", "nan_count", "inf_count"]
    rows = data.select(sites=["parameter_grad", "update"], steps=(step, step), columns=columns).to_pylist()
    return {(row["site"], row["module"], row["tensor"] or "") for row in rows if row["nan_count"] or row["inf_count"]}


def types(
    data: RunData, site: str, statistic: str, *, step: int | None = None, dark: bool = False, width_pixels: int = 1200
) -> go.Figure:
    """A bar for each type of module: the median of its members at one step, with the lowest and the highest.

    Raises ConfigError for a site or statistic that is not there, and for a step that was not sampled.
    """
    rows = [row for row in data.by_type(site, statistic, step=step).to_pylist() if row["value"] is not None]
    title = title_of(site, statistic)
    heading = f"By type of module, {title}{'' if step is None else f', step {step}'}"
    if not rows:
        return empty_figure(heading, "nothing measured", dark=dark)
    values, low, high = (np.array([row[name] for row in rows], np.float64) for name in ("value", "low", "high"))
    log = is_logarithmic(statistic) and bool((values > 0).any())
    figure = new_figure(heading, dark=dark, height=max(300, 130 + 26 * len(rows)))
    figure.add_bar(
        y=list(range(len(rows))),
        x=thin(values),
        orientation="h",
        marker={"color": [line_style(number, dark)["color"] for number in range(len(rows))]},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": thin(high - values),
            "arrayminus": thin(values - low),
            "color": colours(dark).text,
            "thickness": 1.2,
        },
        customdata=[[escape(row["type"]), row["members"], *thin([row["low"], row["high"]])] for row in rows],
        hovertemplate="%{customdata[0]}: median %{x:.6g}<br>%{customdata[1]} members, "
        "%{customdata[2]:.6g} to %{customdata[3]:.6g}<extra></extra>",
        showlegend=False,
    )
    # On a logarithmic axis a 0 has no bar.
    names = [f"{_type_label(row)} ({row['members']}){' at 0' if log and row['value'] == 0 else ''}" for row in rows]
    figure.update_yaxes(tickvals=list(range(len(rows))), ticktext=names, autorange="reversed", showgrid=False)
    figure.update_xaxes(title={"text": title}, **({"type": "log", "tickformat": "~g", "nticks": 6} if log else {}))
    return figure


def _draw_ratios(
    figure: go.Figure,
    panel: Panel,
    rows: Sequence[Mapping[str, Any]],
    column: str,
    said: str,
    places: Mapping[Key, int],
    colour: str,
) -> None:
    rows = sorted((row for row in rows if key_of(row) in places), key=lambda row: places[key_of(row)])
    x = np.array([places[key_of(row)] for row in rows], np.int64)
    draw_points(figure, panel, x, np.array([row[column] for row in rows], np.float64), rows, said, colour, bounds=False)


def _draw_boxes(
    figure: go.Figure, panel: Panel, rows: Sequence[Mapping[str, Any]], column: str, said: str, colour: str
) -> None:
    known = [row for row in rows if row[column] is not None and (row[column] > 0 or not panel.logarithmic)]
    known.sort(key=lambda row: str(row["type"]))
    figure.add_box(
        x=[_type_label(row) for row in known],
        y=thin([row[column] for row in known]),
        boxpoints="all",
        jitter=0.4,
        pointpos=0,
        marker={"size": 4, "color": colour},
        line={"color": colour, "width": 1.2},
        name=said,
        customdata=[escape(module_name(row["module"], row["tensor"] or "", row["call"])) for row in known],
        hovertemplate=f"%{{customdata}}<br>{said} %{{y:.6g}}<extra></extra>",
        **panel.axes,
    )
    zeros = [_type_label(row) for row in rows if panel.logarithmic and row[column] == 0]
    if zeros:
        add_marks(figure, panel, NOT_POSITIVE, list(dict.fromkeys(zeros)), said)


def _type_label(row: Mapping[str, Any]) -> str:
    return label(row["type"] or "unknown", LONGEST_TICK)

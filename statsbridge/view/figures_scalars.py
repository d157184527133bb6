"""Figures of scalars over the steps: the training as a whole, chosen scalars, several runs, learning curves."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..analyze.choices import unknown_choice
from ..errors import ConfigError
from .figures_parts import Line, add_curve, add_events, panel_width, side_legend, stack
from .style import Floats, colours, empty_figure, escape, label, line_style, new_figure, shortened, thin

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ..analyze.curves import Curves
    from ..analyze.run_data import RunData

_Points = tuple[np.ndarray, Floats]  # steps and values

MOST_PANELS = 12
# Written by statsbridge itself for every step; all else are the user's own names.
_OWN_SCALARS = ("lr", "lr/*", "grad_norm*", "param_norm*", "update_ratio", "step_time", "samples_per_second", "shard/*")
_SCALAR_UNITS = {"step_time": "seconds", "samples_per_second": "samples / s"}
_LOGARITHMIC_SCALARS = ("lr", "grad_norm", "grad_norm_applied", "param_norm", "update_ratio", "step_time")
# A user's curve that never is 0 or below and spans so much is drawn on a logarithmic scale.
_WIDE = 100.0
_AXIS = {"title": {"text": "step"}}


def scalars(
    data: RunData,
    names: str | Sequence[str] | None = None,
    *,
    smoothing: float | None = 0.9,
    events: bool = False,
    dark: bool = False,
    width_pixels: int = 1200,
) -> go.Figure:
    """Scalars over the steps, raw and smoothed; those with the same last part of the name share a panel.

    `names`: names or globs such as `"val/*"`; None for all that the user has logged. At most 12 panels are drawn, and
    the title says how many there are. Of several ranks the lowest one's values are drawn.

    Raises ConfigError for a name that is not there.
    """
    table = data.merged("scalars")
    there = _names(table)
    patterns = [names] if isinstance(names, str) else names
    chosen = (
        _matching(there, patterns) if patterns is not None else [name for name in there if not _is_own(name)] or there
    )
    groups: dict[str, list[str]] = {}
    for name in chosen:
        groups.setdefault(_panel_of(name), []).append(name)
    title = f"Scalars of {label(data.info['name'] or data.id)}"
    if len(groups) > MOST_PANELS:
        title += f", {MOST_PANELS} of {len(groups)} panels: choose by names="
    shown = dict(list(groups.items())[:MOST_PANELS])
    return _draw_scalars(data, table, shown, title, smoothing, events, dark, width_pixels)


def training(
    data: RunData, *, smoothing: float | None = 0.9, events: bool = True, dark: bool = False, width_pixels: int = 1200
) -> go.Figure:
    """Losses, learning rates and gradient norms over the steps, one panel each, with the events of the run."""
    table = data.merged("scalars")
    there = _names(table)
    losses = [name for name in there if "loss" in name.lower()]
    rates = [name for name in there if name == "lr" or name.startswith("lr/")]
    norms = [name for name in ("grad_norm", "grad_norm_applied") if name in there]
    if len(norms) == 2 and _same(_longest(table, norms[0]), _longest(table, norms[1])):
        norms.pop()
    groups: dict[str, Sequence[str]] = {"loss": losses, "learning rate": rates, "gradient norm (L2)": norms}
    title = f"Training of {label(data.info['name'] or data.id)}"
    shown = {name: members for name, members in groups.items() if members}
    return _draw_scalars(data, table, shown, title, smoothing, events, dark, width_pixels)


def overlay(
    runs: Sequence[RunData] | Mapping[str, RunData],
    name: str,
    *,
    smoothing: float | None = 0.9,
    dark: bool = False,
    width_pixels: int = 1200,
) -> go.Figure:
    """One scalar of several runs over each other: smoothed lines, with the raw values behind them.

    `runs`: the runs, or the label of each → the run. Runs without this scalar are named in the title.

    Raises ConfigError where no run has it.
    """
    labels = dict(runs) if isinstance(runs, Mapping) else _labelled(runs)
    curves = {said: _longest(run.merged("scalars"), name) for said, run in labels.items()}
    having = {said: curve for said, curve in curves.items() if len(curve[0])}
    if not having:
        there = dict.fromkeys(one for run in labels.values() for one in _names(run.merged("scalars")))
        if not there:
            raise ConfigError("no runs, or none with scalars: a step is written once it is closed")
        raise unknown_choice("scalar", name, there)
    title = f"{label(name)} of {len(having)} run{'s' if len(having) > 1 else ''}"
    if smoothing:
        title += f", smoothed ({smoothing:g}), raw values behind"
    if len(having) < len(curves):
        lacking = ", ".join(shortened(said, 24) for said in curves if said not in having)
        title += f"<br><sub>not in {label(lacking, 150)}</sub>"
    log = _drawn_on_log(name, [values for _, values in having.values()])
    figure = new_figure(title, dark=dark, height=max(560, 130 + 20 * len(having)))
    (panel,) = stack(figure, [_titled(name)], [log], x=_AXIS)
    for number, (said, (steps, values)) in enumerate(having.items()):
        style = line_style(number, dark)
        line = Line(
            name=shortened(said, 40),
            colour=style["color"],
            dash=style["dash"],
            pixels=panel_width(width_pixels),
            smoothing=smoothing or None,
            brief=True,
        )
        add_curve(figure, panel, steps, values, line)
    return side_legend(figure)


def learning_curves(found: Curves, *, dark: bool = False, width_pixels: int = 1200) -> go.Figure:
    """What `statsbridge.analyze.curves` found: training raw and smoothed, validation, and what is notable on them.

    Marked are the step where validation is lowest, steps of the curve to another level (with the learning rate that
    changed there), and the spikes that the smoothed curve hides. The title says the verdict.
    """
    train, validation = found.train, found.validation
    name = train.name if validation is None else f"{train.name} and {validation.name}"
    title = f"{label(name, 90)}: {escape(found.verdict.word)}"
    figure = new_figure(title, dark=dark, height=520)
    values = [train.values] if validation is None else [train.values, validation.values]
    (panel,) = stack(figure, [_titled(train.name)], [_drawn_on_log(train.name, values)], x=_AXIS)
    for number, (one, weight) in enumerate(((train, found.smoothed.weight), (validation, None))):
        if one is not None:
            said = f"{one.name} ({one.kind})" if one.kind else one.name
            colour = line_style(number, dark)["color"]
            line = Line(name=said, colour=colour, pixels=panel_width(width_pixels), smoothing=weight)
            add_curve(figure, panel, one.steps, one.values, line)
    hidden = found.smoothed.hidden
    if len(hidden):
        figure.add_scatter(
            x=train.steps[hidden].tolist(),
            y=thin(train.values[hidden]),
            mode="markers",
            marker={"symbol": "circle-open", "size": 11, "color": colours(dark).severity["warning"]},
            name="spikes that smoothing hides",
            hovertemplate="step %{x}<br>hidden spike %{y:.6g}<extra></extra>",
            **panel.axes,
        )
    if found.best_step is not None:
        _add_note(figure, found.best_step, "lowest validation", dark)
    for change in found.level_changes:
        cause = "" if change.cause is None else f", {label(change.cause, 30)} {change.before:g} to {change.after:g}"
        _add_note(figure, change.step, f"{change.size:+.3g}{cause}", dark)
    return side_legend(figure)


def _add_note(figure: go.Figure, step: int, text: str, dark: bool) -> None:
    colour = colours(dark).severity["info"]
    figure.add_vline(x=step, line={"color": colour, "width": 1, "dash": "dot"})
    place = {"x": step, "y": 1, "yref": "paper", "yanchor": "top", "xanchor": "left"}
    figure.add_annotation(text=text, **place, showarrow=False, textangle=90, font={"size": 11})


def _draw_scalars(
    data: RunData,
    table: pa.Table,
    groups: Mapping[str, Sequence[str]],
    title: str,
    smoothing: float | None,
    events: bool,
    dark: bool,
    width_pixels: int,
) -> go.Figure:
    if not groups:
        return empty_figure(title, "no scalars recorded yet", dark=dark)
    figure = new_figure(title, dark=dark, height=130 + 200 * len(groups))
    curves = [[(name, _curves(table, name)) for name in members] for members in groups.values()]
    logs = [_drawn_on_log(own[0][0], [values for _, kinds in own for _, values in kinds.values()]) for own in curves]
    panels = stack(figure, [_titled(name) for name in groups], logs, x=_AXIS, gap=0.04)
    number = 0
    for panel, own in zip(panels, curves, strict=True):
        for name, kinds in own:
            smoothed = None if _is_own(name) and not name.startswith("grad_norm") else smoothing or None
            for said, points in kinds.items():
                style = line_style(number, dark)
                number += 1
                line = Line(
                    name=shortened(said, 40),
                    colour=style["color"],
                    dash=style["dash"],
                    pixels=panel_width(width_pixels),
                    smoothing=smoothed,
                )
                add_curve(figure, panel, *points, line)
    if events:
        add_events(figure, panels[0], data.events, pixels=panel_width(width_pixels))
    return side_legend(figure)


def _names(table: pa.Table) -> list[str]:
    return [name for name in pc.unique(table["name"].cast(pa.string())).to_pylist() if name is not None]


def _matching(there: Sequence[str], patterns: Sequence[str]) -> list[str]:
    chosen: dict[str, None] = {}
    for pattern in patterns:
        found = [name for name in there if name == pattern or fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise unknown_choice("scalar", pattern, there)
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def _is_own(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _OWN_SCALARS)


def _panel_of(name: str) -> str:
    return "learning rate" if name == "lr" or name.startswith("lr/") else name.rsplit("/", 1)[-1]


def _curves(table: pa.Table, name: str) -> dict[str, _Points]:
    """Steps and values of one scalar, of the lowest rank that has it: name → curve, or name and kind where several."""
    rows = table.filter(pc.equal(table["name"].cast(pa.string()), name))
    if rows.num_rows == 0:
        return {}
    rows = rows.filter(pc.equal(rows["rank"], pc.min(rows["rank"])))
    kinds = pc.fill_null(rows["kind"].cast(pa.string()), "")
    there = pc.unique(kinds).to_pylist()
    curves = {}
    for kind in there:
        own = rows.filter(pc.equal(kinds, kind))
        steps = own["step"].to_numpy()
        order = np.argsort(steps, kind="stable")
        said = name if len(there) == 1 else f"{name} ({kind or 'no kind given'})"
        curves[said] = (steps[order], own["value"].to_numpy()[order])
    return curves


def _longest(table: pa.Table, name: str) -> _Points:
    """Of the kinds of a scalar the one with the most values."""
    curves = _curves(table, name).values()
    return max(curves, key=lambda points: len(points[0]), default=(np.zeros(0, np.int64), np.zeros(0)))


def _same(one: _Points, other: _Points) -> bool:
    return np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1], equal_nan=True)


def _drawn_on_log(name: str, curves: Sequence[Floats]) -> bool:
    finite = np.concatenate([values[np.isfinite(values)] for values in curves]) if curves else np.zeros(0)
    if not (finite > 0).any():
        return False
    if name in _LOGARITHMIC_SCALARS or name.startswith("lr/"):
        return True
    # A constant too: on a linear axis Plotly would put 0.001 between −1 and 1.
    low, high = finite.min(), finite.max()
    return bool(low > 0 and (low == high or high / low >= _WIDE))


def _titled(name: str) -> str:
    unit = _SCALAR_UNITS.get(name)
    return label(name, 30) + (f" [{unit}]" if unit else "")


def _labelled(runs: Sequence[RunData]) -> dict[str, RunData]:
    names = [str(run.info["name"] or run.id) for run in runs]
    labels: dict[str, RunData] = {}
    for name, run in zip(names, runs, strict=True):
        said = name if names.count(name) == 1 else f"{name} ({run.id})"
        labels[said if said not in labels else f"{said} #{len(labels)}"] = run
    return labels

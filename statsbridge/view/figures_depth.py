"""Figures along the modules at one step: the depth profile and the update ratio, with the range over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError
from .figures_modules import Key, add_limits, draw_points, finished, key_of, module_axis, places_of, say
from .figures_parts import TENSOR_BROKEN, Panel, add_marks, add_panel, stack
from .style import Floats, colours, faded, is_logarithmic, new_figure, thin, title_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ..analyze.run_data import RunData


@dataclass(frozen=True, slots=True)
class _Profile:
    """One statistic along the modules at one step: the rows of `RunData.depth_profile`, and what was not finite."""

    site: str
    statistic: str
    step: int
    rows: tuple[Mapping[str, Any], ...]
    nonfinite: frozenset[Key]


def depth_profile(
    data: RunData,
    *,
    step: int | None = None,
    forward: tuple[str, str] = ("activation", "std"),
    backward: tuple[str, str] = ("activation_grad", "l2"),
    modules: str = "*",
    dark: bool = False,
    width_pixels: int = 1200,
) -> go.Figure:
    """Forward statistics above, backward ones below, over one axis of modules in the order of the data flow.

    The line is the values at `step` (None: the last sampled one); the band is the lowest to the highest value over
    all steps. `forward` and `backward`: site and statistic. A module whose tensor held a NaN or an infinity at `step`
    is marked. Of the two sites one may be missing from the run; its panel says so.

    Raises ConfigError where neither is there, and for a step that was not sampled.
    """
    above = _read(data, *forward, step, modules)
    below = _read(data, *backward, step, modules)
    if isinstance(above, ConfigError) and isinstance(below, ConfigError):
        raise above
    known = [one for one in (above, below) if not isinstance(one, ConfigError)]
    places = places_of([row for profile in known for row in profile.rows])
    steps = ", ".join(dict.fromkeys(f"step {one.step}" for one in known))
    figure = new_figure(f"Depth profile, {steps}", dark=dark, height=720)
    names = [title_of(*forward, broken=True), title_of(*backward, broken=True)]
    logs = [_drawn_on_log(one) for one in (above, below)]
    panels = stack(figure, names, logs, x=module_axis(places, width_pixels), gap=0.04)
    for number, (panel, profile) in enumerate(zip(panels, (above, below), strict=True)):
        if isinstance(profile, ConfigError):
            say(figure, panel, str(profile))
        else:
            _draw_profile(figure, panel, profile, places, colours(dark).lines[number])
    return finished(figure)


def update_ratio(
    data: RunData, *, step: int | None = None, modules: str = "*", dark: bool = False, width_pixels: int = 1200
) -> go.Figure:
    """‖Δθ‖ / ‖θ‖ of each parameter in the order of the data flow, with the usual band, and the range over steps.

    Near 1e-3 is usual, above 0.1 suspicious, above 1 diverging. `step`: None for the last sampled one.

    Raises ConfigError where no updates were recorded, and for a step that was not sampled.
    """
    profile = _read(data, "update", "update_ratio", step, modules)
    if isinstance(profile, ConfigError):
        raise profile
    places = places_of(profile.rows)
    figure = new_figure(f"Update ratio, step {profile.step}", dark=dark, height=580)
    panel = Panel(1, logarithmic=True)  # its limits are decades apart
    title = {"title": {"text": title_of("update", "update_ratio")}}
    add_panel(figure, panel, x=module_axis(places, width_pixels), y=title)
    _draw_profile(figure, panel, profile, places, colours(dark).lines[0])
    add_limits(figure, panel)
    return finished(figure)


def _read(data: RunData, site: str, statistic: str, step: int | None, modules: str) -> _Profile | ConfigError:
    try:
        found = data.matrix(site, statistic, modules=modules)
        rows = tuple(data.depth_profile(site, statistic, step=step, modules=modules).to_pylist())
    except ConfigError as error:
        return error
    at = found.column(step)
    broken = frozenset(key_of(row) for row, flag in zip(rows, found.nonfinite[:, at].tolist(), strict=True) if flag)
    return _Profile(site, statistic, int(found.steps[at]), rows, broken)


def _drawn_on_log(profile: _Profile | ConfigError) -> bool:
    if isinstance(profile, ConfigError) or not is_logarithmic(profile.statistic):
        return False
    return any((row["high"] or 0) > 0 for row in profile.rows)


def _draw_profile(figure: go.Figure, panel: Panel, profile: _Profile, places: Mapping[Key, int], colour: str) -> None:
    rows = sorted((row for row in profile.rows if key_of(row) in places), key=lambda row: places[key_of(row)])
    x = np.array([places[key_of(row)] for row in rows])
    value, low, high = (np.array([row[name] for row in rows], np.float64) for name in ("value", "low", "high"))
    name = f"{profile.site} {profile.statistic}"
    _draw_band(figure, panel, x, low, high, name, colour)
    draw_points(figure, panel, x, value, rows, name, colour, bounds=True)
    if profile.nonfinite:
        add_marks(figure, panel, TENSOR_BROKEN, sorted(places[key] for key in profile.nonfinite if key in places), name)


def _draw_band(
    figure: go.Figure, panel: Panel, x: np.ndarray, low: Floats, high: Floats, name: str, colour: str
) -> None:
    """The range over the steps: a box as wide as its place for each module, neighbours joined."""
    if panel.logarithmic:
        positive = np.concatenate((low, high))
        floor = positive[positive > 0].min(initial=np.inf)
        low, high = (np.where(bound > 0, bound, floor) for bound in (low, high))
    across: list[float | None] = []
    upwards: list[float | None] = []
    known = np.flatnonzero(np.isfinite(low) & np.isfinite(high))
    for run in np.split(known, np.flatnonzero((np.diff(x[known]) > 1) | (np.diff(known) > 1)) + 1):
        edges = np.repeat(x[run], 2) + np.tile((-0.5, 0.5), len(run))
        across += [*edges.tolist(), *edges[::-1].tolist(), None]
        upwards += [*thin(np.repeat(high[run], 2)), *thin(np.repeat(low[run], 2)[::-1]), None]
    figure.add_scatter(
        x=across,
        y=upwards,
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=faded(colour, 0.22),
        name=f"{name}, range over steps",
        hoverinfo="skip",
        **panel.axes,
    )

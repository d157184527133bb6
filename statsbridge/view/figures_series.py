"""Figures over the steps: one module, scalars, the training as a whole, several runs, learning curves."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..analyze.choices import unknown_choice
from ..analyze.overview import SITE_STATISTICS
from ..analyze.profiles import check_statistic
from ..errors import ConfigError
from ..log.schema import SITES
from .figures_parts import TENSOR_BROKEN, Line, Panel, add_curve, add_events, panel_width, side_legend, stack
from .style import (
    Floats,
    escape,
    is_logarithmic,
    label,
    line_style,
    module_name,
    new_figure,
    title_of,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ..analyze.run_data import RunData

_AXIS = {"title": {"text": "step"}}
_COLUMNS = ("step", "site", "type", "call", "tensor", "nan_count", "inf_count")


def module_series(
    data: RunData,
    module: str,
    *,
    sites: Sequence[str] | None = None,
    statistic: str | None = None,
    call: int = 0,
    smoothing: float | None = 0.9,
    events: bool = True,
    dark: bool = False,
    width_pixels: int = 1200,
) -> go.Figure:
    """One module over the steps: a panel for each site, a line for each tensor.

    The raw values are always drawn, the smoothed ones over them (`smoothing`: the weight of the bias-corrected moving
    average, None for none). `sites`: None for all that were recorded. `statistic`: None for the usual one of each
    site. `events`: mark those of this module and those of no module.

    Raises ConfigError for a module, site, call or statistic that was not recorded.
    """
    if statistic is not None:
        check_statistic(statistic, "update")
    usual = {site: statistic or SITE_STATISTICS[site][1] for site in data.sites}
    numbers = [name for one in usual.values() for name in (("min", "max") if one == "abs_max" else (one,))]
    rows = data.select(modules=glob.escape(module), columns=list(dict.fromkeys((*_COLUMNS, *numbers)))).sort_by("step")
    wanted = _wanted_sites(rows, module, sites, statistic)
    calls = sorted(set(rows["call"].to_pylist()))
    if call not in calls:
        raise unknown_choice("call", call, calls)
    rows = rows.filter(pc.equal(rows["call"], call))
    statistics = [usual[site] for site in wanted]
    kind = rows["type"][0].as_py()
    name = module_name(module, call=call)
    figure = new_figure(
        f"{label(name, 90)}{f' ({escape(kind)})' if kind else ''}", dark=dark, height=120 + 215 * len(wanted)
    )
    curves = [_of_site(rows, site) for site in wanted]
    logs = [
        is_logarithmic(one) and bool((_values(table, one) > 0).any())
        for one, table in zip(statistics, curves, strict=True)
    ]
    titles = [title_of(site, one, broken=True) for site, one in zip(wanted, statistics, strict=True)]
    panels = stack(figure, titles, logs, x=_AXIS, gap=0.04)
    tensors = list(dict.fromkeys(rows["tensor"].cast(pa.string()).fill_null("").to_pylist()))
    for panel, site, one, table in zip(panels, wanted, statistics, curves, strict=True):
        for tensor in dict.fromkeys(table["tensor"].to_pylist()):
            own = table.filter(pc.equal(table["tensor"], tensor))
            style = line_style(tensors.index(tensor), dark)
            said = f"{site} {tensor}".strip()
            line = Line(name=said, colour=style["color"], pixels=panel_width(width_pixels), smoothing=smoothing or None)
            _add_statistic(figure, panel, own, one, line)
    if events:
        table = data.events
        mine = pc.or_(_is(table, module), pc.is_null(table["module"]))
        add_events(figure, panels[0], table.filter(mine), pixels=panel_width(width_pixels))
    return side_legend(figure)


def _wanted_sites(rows: pa.Table, module: str, sites: Sequence[str] | None, statistic: str | None) -> list[str]:
    there = set(pc.unique(rows["site"].cast(pa.string())).to_pylist())
    if not there:
        raise ConfigError(f"no statistics of module {module!r} yet: a sampled step is written once it is closed")
    if sites is None:
        chosen = [site for site in SITES if site in there and (statistic != "update_ratio" or site == "update")]
    else:
        chosen = [sites] if isinstance(sites, str) else list(sites)
        for site in chosen:
            if site not in there:
                raise unknown_choice("site", site, sorted(there))
    if not chosen:
        raise ConfigError(f"module {module!r} has no {statistic}: sites recorded are {', '.join(sorted(there))}")
    for site in chosen:
        if statistic is not None:
            check_statistic(statistic, site)
    return chosen


def _is(table: pa.Table, module: str) -> pa.ChunkedArray:
    return pc.fill_null(pc.equal(table["module"].cast(pa.string()), module), False)


def _of_site(rows: pa.Table, site: str) -> pa.Table:
    own = rows.filter(pc.equal(rows["site"].cast(pa.string()), site))
    tensors = pc.fill_null(own["tensor"].cast(pa.string()), "")
    return own.set_column(own.schema.get_field_index("tensor"), "tensor", tensors)


def _values(rows: pa.Table, statistic: str) -> Floats:
    if statistic == "abs_max":
        extremes: Floats = np.maximum(np.abs(_values(rows, "min")), np.abs(_values(rows, "max")))
        return extremes
    values: Floats = rows[statistic].cast(pa.float64()).to_numpy()
    return values


def _add_statistic(figure: go.Figure, panel: Panel, rows: pa.Table, statistic: str, line: Line) -> None:
    values = _values(rows, statistic)
    broken = (pc.fill_null(rows["nan_count"], 0).to_numpy() + pc.fill_null(rows["inf_count"], 0).to_numpy()) > 0
    flags = {TENSOR_BROKEN: broken}
    add_curve(figure, panel, rows["step"].to_numpy(), values, line, missing=np.isnan(values), flags=flags)

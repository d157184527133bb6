"""Histograms of magnitudes over the steps, beside what narrow number formats can hold."""

from __future__ import annotations

import glob
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..analyze.choices import unknown_choice
from ..errors import ConfigError
from ..moments import HIGHEST_EXPONENT, HISTOGRAM_BINS, LOWEST_EXPONENT, ZERO_BIN
from .figures_parts import TENSOR_BROKEN, Line, Panel, add_curve, add_marks, add_panel
from .heatmap import SEQUENTIAL
from .style import Floats, colours, column, faded, label, mixed, module_name, new_figure, thin

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ..analyze.run_data import RunData

Integers = np.ndarray[Any, np.dtype[np.int64]]

EXPONENTS = np.arange(LOWEST_EXPONENT - 1, HIGHEST_EXPONENT + 2)
"""Of the bins of magnitudes: 2^e ≤ |x| < 2^(e+1). The first is all below, the last all above."""

_RIDGES, _RIDGE = 12, 1.6  # how many, and how high the highest is, in steps of the axis
_COLUMN = 4  # pixels of a column of the heat map, at the least
_LEAST_SHARE = 1e-7  # of the colours: one of ten million elements
_LOW_EXPONENT, _HIGH_EXPONENT = -26, 17  # always shown: what float16 can hold


class Format(NamedTuple):
    """A number format: the smallest denormal, the smallest normal and the largest number, as exponents of 2.

    Beyond `largest` lies only infinity (or, in E4M3, NaN).
    """

    name: str
    denormal: float
    normal: float
    largest: float


FORMATS = (
    Format("float16", -24, -14, math.log2(65504)),
    Format("bfloat16", -133, -126, 128),
    Format("float8 E5M2", -16, -14, math.log2(57344)),
    Format("float8 E4M3", -9, -6, math.log2(448)),
)


@dataclass(frozen=True, slots=True)
class _Counts:
    """`steps` [steps]; `zeros` [steps]: exact zeros; `bins` [steps, len(EXPONENTS)]: the rest by magnitude."""

    steps: Integers
    zeros: Integers
    bins: Integers
    nonfinite: np.ndarray[Any, np.dtype[np.bool_]]

    @property
    def total(self) -> Integers:
        """The finite elements of each step."""
        everything: Integers = self.zeros + self.bins.sum(axis=1)
        return everything


def histograms(
    data: RunData,
    module: str,
    site: str,
    *,
    tensor: str | None = None,
    call: int = 0,
    kind: Literal["heat", "ridge"] = "heat",
    dark: bool = False,
    width_pixels: int = 1200,
) -> go.Figure:
    """How the magnitudes |x| of one tensor are spread, by power of two, over the steps.

    Beside them the ranges of float16, bfloat16 and both float8 formats: pale where a number is denormal and loses
    digits, nothing below, where it becomes 0, and nothing above, where it overflows. `kind`: `"heat"`, a column of
    colours a step (the share of the finite elements that are not 0, on a logarithmic scale; where a column stands for
    several steps, the largest share of each bin), with the shares of zeros and of what float16 would lose below it; or
    `"ridge"`, at most 12 steps one above the other.

    Raises ConfigError where the run has no histograms of it (`init(histograms=True)` records them), and for a
    module, site, tensor or call that was not recorded.
    """
    if kind not in ("heat", "ridge"):
        raise unknown_choice("kind", kind, ("heat", "ridge"))
    counts, name = _read(data, module, site, tensor, call)
    title = f"Magnitudes of {label(name, 60)}, {site}"
    if kind == "ridge":
        return _ridges(counts, title, dark)
    return _heat(counts, title, dark, width_pixels)


def _read(data: RunData, module: str, site: str, tensor: str | None, call: int) -> tuple[_Counts, str]:
    columns = ["step", "call", "tensor", "histogram", "nan_count", "inf_count"]
    rows = data.select(modules=glob.escape(module), sites=site, columns=columns)
    if rows.num_rows == 0:
        raise ConfigError(f"module {module!r} has no site {site!r}")
    rows = rows.set_column(2, "tensor", pc.fill_null(rows["tensor"].cast(pa.string()), ""))
    for part, wanted in (("call", call), ("tensor", tensor)):
        there = rows[part].unique().to_pylist()
        if part == "tensor" and tensor is None and len(there) > 1:
            raise ConfigError(f"several tensors, give tensor=…: {', '.join(map(repr, there))}")
        if wanted is not None and wanted not in there:
            raise unknown_choice(part, wanted, there)
        if wanted is not None:
            rows = rows.filter(pc.equal(rows[part], wanted))
    name = module_name(module, rows["tensor"][0].as_py(), call)
    rows = rows.filter(pc.is_valid(rows["histogram"])).sort_by("step")
    if rows.num_rows == 0:
        raise ConfigError(f"no histograms of {name}, {site}: record them by init(histograms=True)")
    counted = rows["histogram"].combine_chunks().flatten().to_numpy().reshape(rows.num_rows, HISTOGRAM_BINS)
    # Outwards from zero both halves have the bins in the same order.
    magnitudes = counted[:, ZERO_BIN + 1 :] + counted[:, ZERO_BIN - 1 :: -1]
    broken = (pc.fill_null(rows["nan_count"], 0).to_numpy() + pc.fill_null(rows["inf_count"], 0).to_numpy()) > 0
    return _Counts(rows["step"].to_numpy(), counted[:, ZERO_BIN], magnitudes, broken), name


def _shares(counts: Integers, total: Integers) -> Floats:
    """Of each step's elements; NaN where it has none."""
    with np.errstate(invalid="ignore", divide="ignore"):
        shares: Floats = np.where(total > 0, counts / total, np.nan)
    return shares


def _shown(counts: _Counts) -> slice:
    """The bins to show: all that hold anything, and those that float16 can hold."""
    used = EXPONENTS[counts.bins.any(axis=0)]
    low, high = min([_LOW_EXPONENT, *used.tolist()]), max([_HIGH_EXPONENT, *used.tolist()])
    return slice(int(low - EXPONENTS[0]), int(high - EXPONENTS[0]) + 1)


def _heat(counts: _Counts, title: str, dark: bool, width_pixels: int) -> go.Figure:
    theme = colours(dark)
    figure = new_figure(title, dark=dark, height=680)
    starts = np.arange(0, len(counts.steps), -(-len(counts.steps) // max(1, width_pixels // _COLUMN)))
    shown = _shown(counts)
    shares = np.maximum.reduceat(np.nan_to_num(_shares(counts.bins[:, shown], counts.total[:, None])), starts, axis=0)
    with np.errstate(divide="ignore"):
        z = np.where(shares > 0, np.log10(np.maximum(shares, _LEAST_SHARE)), np.nan)
    exponents = EXPONENTS[shown]
    heat = add_panel(
        figure,
        Panel(1),
        across=(0, 0.84),
        upwards=(0.36, 1),
        x={"showticklabels": False, "matches": "x2", "showgrid": False, "zeroline": False},
        y=_exponent_axis(exponents, "|x| [unit of the tensor]"),
    )
    steps = counts.steps[starts].astype(np.float64)
    gap = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    figure.add_heatmap(
        z=column([thin(row) for row in z.T]),
        x=[*steps.tolist(), max(steps[-1] + gap, float(counts.steps[-1]) + 1)],
        y=[*exponents.tolist(), int(exponents[-1]) + 1],
        customdata=column([thin(row) for row in shares.T]),
        colorscale=list(SEQUENTIAL),
        zmin=max(math.log10(_LEAST_SHARE), min(-2.0, float(np.nanmin(z, initial=0.0)))),
        zmax=0,
        colorbar={
            "title": {"text": "share"},
            "tickvals": list(range(-7, 1)),
            "ticktext": [f"1e{power}" for power in range(-7, 0)] + ["1"],
            "len": 0.64,
            "y": 1,
            "yanchor": "top",
        },
        hovertemplate="step %{x}<br>2^%{y}: %{customdata:.3g} of the elements<extra></extra>",
        name="share of the elements",
        **heat.axes,
    )
    broken = counts.steps[counts.nonfinite]
    if len(broken):
        add_marks(figure, heat, TENSOR_BROKEN, broken.tolist(), "histogram")
    _draw_formats(figure, Panel(3), exponents, dark, across=(0.855, 0.99), upwards=(0.36, 1), along="y")
    below = add_panel(
        figure,
        Panel(2, True),
        across=(0, 0.84),
        upwards=(0, 0.29),
        x={"title": {"text": "step"}},
        y={"title": {"text": "share of the<br>finite elements"}},
    )
    total = counts.total
    for number, (said, lost) in enumerate(_lost(counts)):
        line = Line(name=said, colour=theme.lines[number], pixels=width_pixels)
        values = _shares(lost, total)
        # On a logarithmic axis a share of 0 has no place, and is the good news: no mark for each.
        add_curve(figure, below, counts.steps, values, line, missing=np.isnan(values) | (values == 0))
    figure.update_layout(legend={"orientation": "h", "yanchor": "top", "y": 0.345, "x": 0})
    return figure


def _lost(counts: _Counts) -> list[tuple[str, Integers]]:
    """What a float16 would not hold, and the zeros that are there already."""
    below, above = EXPONENTS < -24, EXPONENTS >= 16
    return [
        ("exactly 0", counts.zeros),
        ("below 2⁻²⁴, 0 in float16", counts.bins[:, below].sum(axis=1)),
        ("2¹⁶ and above, infinite in float16", counts.bins[:, above].sum(axis=1)),
    ]


def _exponent_axis(exponents: Integers, title: str) -> dict[str, Any]:
    low, high = int(exponents[0]), int(exponents[-1]) + 1
    every = 4 if high - low <= 64 else 8
    ticks = [power for power in range(low, high + 1) if power % every == 0]
    texts = [f"2<sup>{power}</sup>".replace("-", "−") for power in ticks]
    return {
        "title": {"text": title},
        "range": [low, high],
        "tickvals": ticks,
        "ticktext": texts,
        "showgrid": False,
        "zeroline": False,
    }


def _draw_formats(
    figure: go.Figure,
    panel: Panel,
    exponents: Integers,
    dark: bool,
    *,
    across: tuple[float, float],
    upwards: tuple[float, float],
    along: Literal["x", "y"],
) -> None:
    """A bar a format beside the exponents of axis `along`, pale where it is denormal."""
    low, high = int(exponents[0]), int(exponents[-1]) + 1
    plain = {"showgrid": False, "zeroline": False, "ticks": ""}
    places = {"tickvals": list(range(len(FORMATS))), "range": [-0.6, len(FORMATS) - 0.4], **plain}
    powers = {"range": [low, high], "showticklabels": False, "matches": along, **plain}
    if along == "y":
        places |= {"ticktext": [one.name.replace(" ", "<br>") for one in FORMATS], "tickangle": -90}
        add_panel(figure, panel, across=across, upwards=upwards, x=places, y=powers)
    else:
        places["ticktext"] = [one.name for one in FORMATS]
        add_panel(figure, panel, across=across, upwards=upwards, x=powers, y=places)
    for number, one in enumerate(FORMATS):
        colour = colours(dark).lines[number]
        for start, end, opacity in ((one.denormal, one.normal, 0.3), (one.normal, one.largest, 0.85)):
            bottom, top = max(start, low), min(end, high)
            if bottom < top:
                thick, long = (number - 0.3, number + 0.3), (bottom, top)
                (x0, x1), (y0, y1) = (thick, long) if along == "y" else (long, thick)
                figure.add_shape(
                    type="rect",
                    xref=panel.axes["xaxis"],
                    yref=panel.axes["yaxis"],
                    x0=x0,
                    x1=x1,
                    y0=y0,
                    y1=y1,
                    fillcolor=faded(colour, opacity),
                    line={"width": 0},
                )


def _ridges(counts: _Counts, title: str, dark: bool) -> go.Figure:
    theme = colours(dark)
    chosen = np.unique(np.linspace(0, len(counts.steps) - 1, _RIDGES).round().astype(int))
    shown = _shown(counts)
    exponents = EXPONENTS[shown]
    shares = np.nan_to_num(_shares(counts.bins[:, shown], counts.total[:, None]))
    figure = new_figure(title, dark=dark, height=300 + 46 * len(chosen))
    panel = Panel(1)
    steps = counts.steps[chosen].tolist()
    axis = {"title": {"text": "step"}, "tickvals": list(range(len(chosen))), "ticktext": list(map(str, steps))}
    axis["range"] = [-0.3, len(chosen) - 1 + 1.1 * _RIDGE]
    x = _exponent_axis(exponents, "|x| [unit of the tensor]")
    add_panel(figure, panel, upwards=(0, 0.8), x=x, y=axis | {"showgrid": False, "zeroline": False})
    tallest = max(float(shares[chosen].max()), 1e-300)
    across = np.repeat(np.arange(exponents[0], exponents[-1] + 2), 2)
    for place in range(len(chosen) - 1, -1, -1):
        share = shares[chosen[place]]
        heights = np.concatenate(([0], np.repeat(share / tallest * _RIDGE, 2), [0])) + place
        figure.add_scatter(
            x=across.tolist(),
            y=thin(heights),
            customdata=thin(np.concatenate(([0], np.repeat(share, 2), [0]))),
            mode="lines",
            line={"color": theme.lines[0], "width": 1.2},
            fill="toself",
            fillcolor=mixed(theme.lines[0], theme.paper, 0.4),
            name=f"step {steps[place]}",
            showlegend=False,
            hovertemplate=f"step {steps[place]}<br>2^%{{x}}: %{{customdata:.3g}} of the elements<extra></extra>",
            **panel.axes,
        )
    _draw_formats(figure, Panel(2), exponents, dark, across=(0, 1), upwards=(0.84, 1), along="x")
    return figure

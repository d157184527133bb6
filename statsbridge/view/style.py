"""How every figure looks: colours, words, scales and numbers. A leaf: numpy, and plotly when it draws."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from statsbridge.errors import ConfigError

if TYPE_CHECKING:
    import plotly.graph_objects as go

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

LONGEST_LABEL = 44
DIGITS = 7

_UNITS = {
    "activation": "unit of the activation",
    "activation_grad": "loss per unit of the activation",
    "parameter": "unit of the parameter",
    "parameter_grad": "loss per unit of the parameter",
    "update": "unit of the parameter",
    "tensor": "unit of the tensor",
    "tensor_grad": "loss per unit of the tensor",
}
_WITHOUT_UNIT = {"update_ratio", "zero_fraction", "skewness", "kurtosis", "count", "nan_count", "inf_count"}
# What is never negative and spans decades; all else is drawn on a linear scale.
_LOGARITHMIC = {"std", "abs_mean", "abs_max", "l2", "kl_unit_gaussian", "update_ratio"}


@dataclass(frozen=True, slots=True)
class Colours:
    """The colours of one theme. Those of lines differ to eyes without red- or green-sensitive cones too (tested)."""

    paper: str
    text: str
    grid: str
    missing: str
    lines: tuple[str, ...]
    severity: dict[str, str]


# Okabe and Ito 2008, "Color Universal Design".
_OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LIGHT = Colours(
    paper="#ffffff",
    text="#24292f",
    grid="#e4e7eb",
    missing="#d0d0d0",
    lines=(*_OKABE_ITO, "#5b5b5b", "#332288"),
    severity={"critical": "#b3261e", "warning": "#b05c00", "info": "#6b7280"},
)
# Near the same hues, lighter where they would drown in the dark.
DARK = Colours(
    paper="#14171c",
    text="#e3e6ea",
    grid="#2c323a",
    missing="#3d434c",
    lines=("#37a6e3", "#d79024", "#2fc386", "#cb84ab", "#ffca2d", "#7ae1fb", "#bbfcae", "#e7f17e"),
    severity={"critical": "#ff8a80", "warning": "#ffb454", "info": "#9aa4b1"},
)
_DASHES = ("solid", "dash", "dot", "dashdot")


def colours(dark: bool) -> Colours:
    """The theme's colours."""
    return DARK if dark else LIGHT


def line_style(number: int, dark: bool) -> dict[str, str]:
    """The colour and dash of the n-th line: 32 differ, by colour first."""
    lines = colours(dark).lines
    return {"color": lines[number % len(lines)], "dash": _DASHES[number // len(lines) % len(_DASHES)]}


def mixed(colour: str, ground: str, share: float) -> str:
    """Two `#rrggbb` colours mixed; `share`: how much of the first."""
    pairs = ((int(colour[place : place + 2], 16), int(ground[place : place + 2], 16)) for place in (1, 3, 5))
    return "#" + "".join(f"{round(share * one + (1 - share) * other):02x}" for one, other in pairs)


def faded(colour: str, opacity: float) -> str:
    """`#rrggbb` as an rgba() colour."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def escape(text: object) -> str:
    """Any text as text for Plotly, which reads a subset of HTML, `%{…}` in hover texts, and TeX between two `$`."""
    named = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return named.replace("%{", "&#37;{").replace("$", "&#36;")


def shortened(text: str, longest: int = LONGEST_LABEL) -> str:
    """`text` without its middle where it is too long, not escaped: of a path, both ends say most."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[: half - 1]}…{text[-half:]}"


def label(text: object, longest: int = LONGEST_LABEL) -> str:
    """Shortened, then escaped."""
    return escape(shortened(str(text), longest))


def module_name(module: str, tensor: str = "", call: int = 0) -> str:
    """What one module call or tensor is called in the figures, not escaped."""
    name = module or ("" if tensor else "(model)")
    name = ".".join(part for part in (name, tensor) if part)
    return f"{name} call {call}" if call else name


def unit(site: str, statistic: str) -> str:
    """The unit of a statistic; "no unit" where it has none."""
    if statistic == "kl_unit_gaussian":
        return "nats"
    return "no unit" if statistic in _WITHOUT_UNIT else _UNITS.get(site, "unit of the tensor")


def title_of(site: str, statistic: str, broken: bool = False) -> str:
    """`site: statistic [unit]`; `broken` puts the unit on a line of its own, for narrow panels."""
    return f"{escape(site)}: {escape(statistic)}{'<br>' if broken else ' '}[{unit(site, statistic)}]"


def is_logarithmic(statistic: str) -> bool:
    """Whether the field draws this statistic on a logarithmic scale."""
    return statistic in _LOGARITHMIC


def thin(values: npt.ArrayLike) -> list[float | None]:
    """Numbers for a figure: rounded to 7 significant digits, which is float32's precision; NaN as None.

    Half the size in JSON of all 17, and lists are read by every Plotly that a tracker ships. Infinities, which
    JSON has no word for, must have been taken out.
    """
    exact = np.asarray(values, np.float64)
    size = np.abs(exact)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        shift = DIGITS - 1 - np.nan_to_num(np.floor(np.log10(size)), neginf=0.0).astype(np.int64)
        up, down = _POWERS[np.clip(shift, 0, 300)], _POWERS[np.clip(-shift, 0, 300)]
        rounded = np.rint(exact * up / down) / up * down
    # Beyond the powers of ten that a float holds, a number stays as it is.
    rounded = np.where(np.abs(shift) > 290, exact, rounded)
    listed: list[float | None] = rounded.tolist()
    if np.isnan(exact).any():
        return [None if gap else number for number, gap in zip(listed, np.isnan(exact).tolist(), strict=True)]
    return listed


def column(values: Sequence[Any]) -> npt.NDArray[np.object_]:
    """A long list, or one of lists, for a trace: Plotly checks a list element by element, and such an array not at all.

    It is written as a list still: as numbers it would be in a base64 that not every tracker's Plotly can read.
    """
    return np.array(values, dtype=object)


def fill(figure: go.Figure, **columns: npt.NDArray[np.object_]) -> None:
    """Give the trace that was added last its long columns: with the rest, Plotly would copy them number by number."""
    trace = figure.data[-1]
    for name, values in columns.items():
        trace[name] = values


_POWERS = np.array([float(f"1e{power}") for power in range(301)])


def plotly_graphs() -> Any:
    """`plotly.graph_objects`. Raises ConfigError that names the extra where Plotly is not installed."""
    with suppress(ImportError):
        # pyarrow may be importing it in a run's background thread right now, and Plotly would use it half imported.
        import_module("pandas")
    try:
        import plotly.graph_objects as graphs
    except ImportError as error:
        raise ConfigError("figures need Plotly: pip install 'statsbridge[figures]'") from error
    return graphs


@lru_cache
def template(dark: bool) -> go.layout.Template:
    """The theme as a Plotly template."""
    theme = colours(dark)
    axis = {
        "gridcolor": theme.grid,
        "linecolor": theme.grid,
        "zerolinecolor": theme.grid,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": theme.grid,
        "automargin": True,
        "exponentformat": "e",
        "title": {"standoff": 8},
    }
    return plotly_graphs().layout.Template(
        layout={
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": theme.text},
            "title": {"font": {"size": 16}, "x": 0, "xref": "paper", "xanchor": "left"},
            "paper_bgcolor": theme.paper,
            "plot_bgcolor": theme.paper,
            "colorway": list(theme.lines),
            "hoverlabel": {"align": "left", "namelength": -1},
            "legend": {"bgcolor": faded(theme.paper, 0.6)},
            "margin": {"l": 70, "r": 20, "t": 70, "b": 50},
            "xaxis": axis,
            "yaxis": axis,
        }
    )


def new_figure(title: str, *, dark: bool, height: int) -> go.Figure:
    """An empty figure in the theme. `title` is a Plotly text: what is not ours in it has been escaped."""
    figure = plotly_graphs().Figure()
    figure.update_layout(template=template(dark), title={"text": title}, height=height)
    return figure


def empty_figure(title: str, message: str, *, dark: bool) -> go.Figure:
    """A figure that says why there is nothing to see."""
    figure = new_figure(title, dark=dark, height=240)
    figure.add_annotation(text=message, xref="paper", yref="paper", x=0.5, y=0.5, showarrow=False, font={"size": 14})
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure

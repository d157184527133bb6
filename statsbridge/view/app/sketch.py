"""A figure of lines and marks as a plain SVG: what a browser can show while it has yet to read 5 MB of Plotly.

Every point of the figure is in it, so no spike is missing; it has no hover texts, and zooming is for Plotly.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from ..style import Floats, colours, shortened

if TYPE_CHECKING:
    import plotly.graph_objects as go

_LEFT, _RIGHT, _TOP, _BOTTOM, _LEGEND = 70, 20, 70, 50, 200  # pixels
_MOST_NAMES = 24
_LONGEST_NAME = 26
_MOST_TICKS = 5
_PADDING = 0.06
_NOT_IN_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_DASHES = {"dash": "9,5", "dot": "2,4", "dashdot": "9,4,2,4"}


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis on the paper: `ends` of it in pixels, `low` and `high` there, as their logarithm where logarithmic."""

    ends: tuple[float, float]
    low: float
    high: float
    logarithmic: bool

    def place(self, values: Floats) -> Floats:
        """Where values lie, in pixels; NaN where they have no place."""
        with np.errstate(divide="ignore", invalid="ignore"):
            known = np.log10(values) if self.logarithmic else values
        shares = (known - self.low) / ((self.high - self.low) or 1.0)
        places: Floats = np.where(np.isfinite(known), self.ends[0] + shares * (self.ends[1] - self.ends[0]), np.nan)
        return places

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Places and texts of some round values."""
        rough = max((self.high - self.low) / _MOST_TICKS, 1e-300)
        power = 10.0 ** np.floor(np.log10(rough))
        step = next(power * size for size in (1, 2, 5, 10) if power * size >= rough * 0.999)
        step = max(1.0, step) if self.logarithmic and self.high - self.low > 1 else step
        for number in np.arange(np.ceil(self.low / step), np.floor(self.high / step) + 1) * step:
            value = 10.0**number if self.logarithmic else number
            yield float(self.place(np.array([value]))[0]), f"{value:.3g}"


def sketch(figure: go.Figure, *, width: int, dark: bool) -> str | None:
    """The figure as an SVG of `width` pixels, as high as the figure; None where it holds more than lines and marks."""
    drawn = figure.to_dict()
    layout = drawn["layout"]
    try:
        traces = [(_numbers(one["x"]), _numbers(one["y"]), one) for one in drawn["data"] if one["type"] == "scatter"]
    except (KeyError, TypeError, ValueError):  # names of modules along an axis, say
        return None
    if not traces or len(traces) < len(drawn["data"]):
        return None
    theme = colours(dark)
    height = int(layout.get("height") or 450)
    style = {"width": str(width), "height": str(height), "viewBox": f"0 0 {width} {height}", "fill": theme.text}
    root = ElementTree.Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "font-family": "system-ui, sans-serif", "font-size": "12", **style},
    )
    ElementTree.SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": theme.paper})
    _write(root, _LEFT, 32, _plain(layout.get("title", {}).get("text", "")), {"font-size": "16"})
    right = width - (_LEGEND if layout.get("showlegend") else _RIGHT)
    across, upwards = (_LEFT, right), (height - _BOTTOM, _TOP)
    x = _axis(layout, "x", np.concatenate([steps for steps, _, _ in traces]), across, 0.0)
    axes: dict[str, _Axis] = {}
    for name in dict.fromkeys(one.get("yaxis") or "y" for _, _, one in traces):
        own = [numbers for _, numbers, one in traces if (one.get("yaxis") or "y") == name]
        axes[name] = _axis(layout, name, np.concatenate(own), upwards, _PADDING)
        if not np.isfinite(axes[name].high - axes[name].low):  # too far apart for a float
            return None
        if not _settings(layout, name).get("overlaying"):
            _frame(root, axes[name], x, layout, name, theme.grid)
    for steps, values, one in traces:
        _draw(root, x.place(steps), axes[one.get("yaxis") or "y"].place(values), one)
    if layout.get("showlegend"):
        _legend(root, [one for _, _, one in traces if one.get("showlegend", True)], right + 14)
    return ElementTree.tostring(root, encoding="unicode")


def _numbers(values: Sequence[Any]) -> Floats:
    numbers: Floats = np.array([np.nan if value is None else value for value in values], np.float64)
    return numbers


def _settings(layout: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Those of the axis that a trace calls `x`, `y2`, …"""
    found: Mapping[str, Any] = layout.get(f"{name[0]}axis{name[1:]}") or {}
    return found


def _axis(layout: Mapping[str, Any], name: str, values: Floats, ends: tuple[float, float], padding: float) -> _Axis:
    own = _settings(layout, name)
    logarithmic = own.get("type") == "log"
    with np.errstate(divide="ignore", invalid="ignore"):
        known = np.log10(values) if logarithmic else values
    finite = known[np.isfinite(known)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    extra = padding * (high - low)
    low, high = own.get("range") or (low - extra, high + extra)
    if high == low:
        extra = max(0.5, abs(high) / 1e9)  # beside a large number a half is nothing
        low, high = low - extra, high + extra
    domain = _settings(layout, own.get("overlaying") or name).get("domain") or (0.0, 1.0)
    first, last = (ends[0] + share * (ends[1] - ends[0]) for share in domain)
    return _Axis((first, last), low, high, logarithmic)


def _frame(root: ElementTree.Element, y: _Axis, x: _Axis, layout: Mapping[str, Any], name: str, colour: str) -> None:
    """Lines and numbers of one panel, and what it shows."""
    (left, right), (bottom, top) = x.ends, y.ends
    lowest = (_settings(layout, name).get("domain") or (0.0, 1.0))[0] < 1e-6
    for place, text in y.ticks():
        _line(root, [(left, place), (right, place)], {"stroke": colour})
        _write(root, left - 8, place + 4, text, {"text-anchor": "end"})
    for place, text in x.ticks():
        _line(root, [(place, bottom), (place, top)], {"stroke": colour})
        if lowest:
            _write(root, place, bottom + 18, text, {"text-anchor": "middle"})
    title = _settings(layout, name).get("title", {}).get("text", "")
    _write(root, left, top - 4, _plain(title), {"font-size": "11"})


def _draw(root: ElementTree.Element, x: Floats, y: Floats, trace: Mapping[str, Any]) -> None:
    mode = trace.get("mode") or "lines"
    line, marker = trace.get("line") or {}, trace.get("marker") or {}
    shown = {"opacity": f"{trace.get('opacity', 1):g}"}
    there = np.isfinite(x) & np.isfinite(y)
    if "lines" in mode:
        style = {"stroke": line.get("color", "gray"), "stroke-width": f"{line.get('width', 1.6):g}", **shown}
        if line.get("dash") in _DASHES:
            style["stroke-dasharray"] = _DASHES[line["dash"]]
        ends = np.flatnonzero(np.diff(np.concatenate(([False], there, [False])).astype(np.int8)))
        for begin, end in zip(ends[::2], ends[1::2], strict=True):
            _line(root, list(zip(x[begin:end], y[begin:end], strict=True)), style)
    if "markers" in mode:
        sizes = np.broadcast_to(np.asarray(marker.get("size", 6), np.float64), x.shape)
        for at in np.flatnonzero(there & (sizes > 0)):
            spot = {"cx": f"{x[at]:.1f}", "cy": f"{y[at]:.1f}", "r": f"{sizes[at] / 2:g}", **shown}
            ElementTree.SubElement(root, "circle", {**spot, "fill": marker.get("color", "gray")})


def _line(root: ElementTree.Element, points: Sequence[tuple[float, float]], style: Mapping[str, str]) -> None:
    told = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    ElementTree.SubElement(root, "polyline", {"points": told, "fill": "none", "stroke-linejoin": "round", **style})


def _legend(root: ElementTree.Element, traces: Sequence[Mapping[str, Any]], left: float) -> None:
    for number, trace in enumerate(traces[:_MOST_NAMES]):
        place = _TOP + 10 + 19 * number
        colour = (trace.get("line") or {}).get("color") or (trace.get("marker") or {}).get("color") or "gray"
        _line(root, [(left, place), (left + 22, place)], {"stroke": colour, "stroke-width": "2"})
        _write(root, left + 28, place + 4, shortened(_plain(trace.get("name") or ""), _LONGEST_NAME), {})


def _write(root: ElementTree.Element, x: float, y: float, text: str, style: Mapping[str, str]) -> None:
    ElementTree.SubElement(root, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", **style}).text = text


def _plain(text: str) -> str:
    """A text of Plotly's in one line: the markup in it is ours, and names in it were escaped."""
    return _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", html.unescape(re.sub(r"<[^>]*>", " ", text)))

"""The server's own picture of a figure: all its points, its marks, its names as text."""

from xml.etree import ElementTree

import numpy as np
import plotly.graph_objects as go
import pytest
from app_helpers import MARKUP

from statsbridge.view.app.sketch import sketch
from statsbridge.view.figures_parts import Line, Panel, add_curve, add_panel, side_legend
from statsbridge.view.style import escape, new_figure

SVG = "{http://www.w3.org/2000/svg}"


def drawn(figure: go.Figure) -> ElementTree.Element:
    made = sketch(figure, width=1000, dark=False)
    assert made is not None
    return ElementTree.fromstring(made)


def curves(svg: ElementTree.Element, colour: str) -> list[np.ndarray]:
    """The lines of that colour, each [points, 2] in pixels, without the short ones of the legend."""
    found = [one for one in svg.iter(f"{SVG}polyline") if one.get("stroke") == colour]
    points = [np.array([place.split(",") for place in one.get("points", "").split()], float) for one in found]
    return [one for one in points if one[:, 0].max() < 801]


def one_curve(values: np.ndarray, *, logarithmic: bool = False, pixels: int = 600) -> go.Figure:
    figure = new_figure("one", dark=False, height=400)
    panel = add_panel(figure, Panel(1, logarithmic))
    line = Line(name="loss", colour="#0072b2", pixels=pixels)
    add_curve(figure, panel, np.arange(len(values)), values, line)
    return side_legend(figure)


@pytest.mark.parametrize("logarithmic", [False, True])
def test_points_lie_where_their_values_say(logarithmic: bool) -> None:
    values = np.array([1.0, 10.0, 100.0, 1000.0, 10.0])
    (line,) = curves(drawn(one_curve(values, logarithmic=logarithmic)), "#0072b2")
    known = np.log10(values) if logarithmic else values
    # Steps and values are evenly spread over the panel, whatever its pixels are; up is less.
    np.testing.assert_allclose(np.diff(line[:, 0]), np.full(4, line[1, 0] - line[0, 0]), atol=0.2)
    slope, start = np.polyfit(known, line[:, 1], 1)
    assert slope < 0
    np.testing.assert_allclose(line[:, 1], start + slope * known, atol=0.2)


def test_a_spike_among_many_is_there_and_a_nan_is_marked_and_breaks_the_line() -> None:
    values = np.sin(np.arange(20_000) / 900)
    values[12_345] = 50.0
    values[5_000] = np.nan
    svg = drawn(one_curve(values))
    lines = curves(svg, "#0072b2")
    assert len(lines) == 2
    spike = min(line[:, 1].min() for line in lines)
    others = np.sort(np.concatenate([line[:, 1] for line in lines]))[1]
    assert others - spike > 200  # of 280 pixels
    (place,) = [line[line[:, 1].argmin(), 0] for line in lines if line[:, 1].min() == spike]
    left, right = lines[0][0, 0], lines[1][-1, 0]
    assert (place - left) / (right - left) == pytest.approx(12_345 / 19_999, abs=1e-3)
    marks = [one for one in svg.iter(f"{SVG}circle") if one.get("fill") == "#b3261e"]
    assert [(float(one.get("cx", 0)) - left) / (right - left) for one in marks] == [pytest.approx(0.25, abs=1e-3)]


def test_a_constant_and_nothing_at_all_are_drawn() -> None:
    (line,) = curves(drawn(one_curve(np.full(9, 3.0))), "#0072b2")
    assert len(set(line[:, 1])) == 1
    assert curves(drawn(one_curve(np.full(9, np.nan))), "#0072b2") == []


@pytest.mark.parametrize("value", [1e16, -1e20, 1e300])
def test_a_large_constant_is_drawn_in_the_middle(value: float) -> None:
    ordinary, large = (curves(drawn(one_curve(np.full(9, one))), "#0072b2")[0] for one in (3.0, value))
    np.testing.assert_allclose(large, ordinary, atol=0.2)


def test_ends_too_far_apart_for_a_float_are_left_to_plotly() -> None:
    assert sketch(go.Figure(go.Scatter(x=[0, 1], y=[1e308, -1e308])), width=1000, dark=False) is None


@pytest.mark.parametrize("letter", ["\x00", "\x1b", "\ud800", "\ufffe"])
def test_letters_that_xml_has_not_are_replaced(letter: str) -> None:
    figure = one_curve(np.arange(3.0))
    figure.data[0].name = f"a{letter}b"
    assert "a\N{REPLACEMENT CHARACTER}b" in [one.text for one in drawn(figure).iter(f"{SVG}text")]
    (sketch(figure, width=1000, dark=False) or "").encode()


def test_names_are_text() -> None:
    figure = one_curve(np.arange(3.0))
    figure.update_layout(title={"text": f"{escape(MARKUP)}<br>below"})
    figure.data[0].name = escape(MARKUP)
    svg = drawn(figure)
    texts = [one.text for one in svg.iter(f"{SVG}text")]
    assert f"{MARKUP} below" in texts
    assert any(text and text.startswith("<img src=x") for text in texts[1:])
    assert {one.tag.removeprefix(SVG) for one in svg.iter()} <= {"svg", "rect", "polyline", "circle", "text"}


def test_what_is_no_line_is_left_to_plotly() -> None:
    assert sketch(go.Figure(go.Heatmap(z=[[1, 2]])), width=1000, dark=False) is None
    assert sketch(go.Figure(go.Scatter(x=["a", "b"], y=[1, 2])), width=1000, dark=False) is None
    assert sketch(go.Figure(), width=1000, dark=False) is None

"""The pictures of the toolkit: right values, nothing invented, no markup from names."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from statsbridge.view import figures_debug
from statsbridge.view.figures_debug import (
    gradients_figure,
    losses_figure,
    numbers_figure,
    rate_range_figure,
)


def test_losses_that_are_not_finite_are_gaps_with_a_mark() -> None:
    figure = losses_figure("t", [2.0, 1.0, math.nan, None, math.inf], 0.1)
    assert list(figure.data[0].y) == [2.0, 1.0, None, None, None]
    assert figure.data[1].name == "NaN or infinite"
    marks = [shape.x0 for shape in figure.layout.shapes if shape.yref == "paper"]
    assert marks == [2, 3, 4]
    assert "NaN" not in figure.to_json().replace("NaN or infinite", "")


@pytest.mark.parametrize(
    ("losses", "threshold", "kind"), [([2.0, 1.0], 0.1, "log"), ([2.0, -1.0], 0.1, "linear"), ([2.0], -1.0, "linear")]
)
def test_the_axis_is_logarithmic_where_it_can_be(losses: list[float], threshold: float, kind: str) -> None:
    figure = losses_figure("t", losses, threshold)
    assert figure.layout.yaxis.type == kind
    # Plotly takes the place of a text on a logarithmic axis as its logarithm, that of a line as it is.
    assert figure.layout.annotations[0].y == (math.log10(threshold) if kind == "log" else threshold)
    assert figure.layout.shapes[0].y0 == threshold


def rates(**changes: Any) -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = {"rate": [1e-3, 1e-2, 1e-1, 1.0], "loss": [2.0, 1.0, 1.5, 900.0]}
    table["smoothed"] = [2.0, 1.5, 1.2, math.nan]
    return {**table, **changes}


def test_a_loss_that_diverges_does_not_flatten_the_curve() -> None:
    figure = rate_range_figure("t", rates(), {"steepest": 1e-2, "minimum": None}, logarithmic=True)
    low, high = figure.layout.yaxis.range
    assert low < 1.0
    assert 2.0 < high < 3.0
    assert list(figure.data[0].y) == [2.0, 1.0, 1.5, 900.0]
    assert list(figure.data[1].y) == [2.0, 1.5, 1.2, None]


def test_each_mark_has_a_line_at_its_rate_and_none_where_there_is_none() -> None:
    for logarithmic, place in ((True, -2.0), (False, 0.01)):
        marks = {"steepest": 1e-2, "minimum": None}
        figure = rate_range_figure("t", rates(), marks, logarithmic=logarithmic)
        assert [shape.x0 for shape in figure.layout.shapes] == [0.01]
        assert [(note.x, note.text) for note in figure.layout.annotations] == [(place, "steepest<br>0.01")]
        assert figure.layout.xaxis.type == ("log" if logarithmic else "linear")


def test_a_sweep_without_a_finite_loss_can_be_drawn() -> None:
    table = rates(loss=[math.nan] * 4, smoothed=[None] * 4)
    figure = rate_range_figure("t", table, {"steepest": None}, logarithmic=True)
    assert figure.layout.yaxis.range is None
    assert list(figure.data[0].y) == [None] * 4


def test_names_are_text_and_never_markup() -> None:
    name = "<b>a</b> & %{x} $b$"
    figure = gradients_figure("t", [name, name], [1e-7, 0.5], ["right", "wrong"], (1e-5, 1e-3))
    drawn = json.loads(figure.to_json())
    texts = [*drawn["layout"]["yaxis"]["ticktext"], *(text for trace in drawn["data"] for text in trace["text"])]
    assert len(texts) == 3
    assert all(not set("<>$") & set(text) and "%{" not in text for text in texts)
    table = numbers_figure(name, True, {"<i>": "<u>"})
    assert "<b>" not in table.layout.title.text
    assert table.data[0].cells.values == (["&lt;i&gt;"], ["&lt;u&gt;"])


def test_many_parameters_have_every_other_label() -> None:
    names = [f"layer.{number}" for number in range(200)]
    figure = gradients_figure("t", names, [1e-9] * 200, ["right"] * 200, (1e-5, 1e-3))
    assert len(figure.layout.yaxis.ticktext) == 50
    assert figure.layout.height <= 1600
    assert list(figure.data[0].y) == list(range(200))


def test_exact_agreement_stands_at_the_precision_of_float64() -> None:
    figure = gradients_figure("t", ["a", "a"], [0.0, None], ["right", "undecided"], (1e-5, 1e-3))
    assert list(figure.data[0].x) == [1e-16]
    assert len(figure.data) == 1


@pytest.mark.parametrize("dark", [False, True])
def test_both_themes(dark: bool) -> None:
    paper = figures_debug.colours(dark).paper
    assert losses_figure("t", [1.0], 0.1, dark=dark).layout.template.layout.paper_bgcolor == paper

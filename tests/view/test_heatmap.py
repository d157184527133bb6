"""What the heat map shows, read back from the figure."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from statsbridge.view.heatmap import HeatMapRow, heat_map
from statsbridge.view.style import unit


def draw(low: Any, high: Any = None, nonfinite: Any = None, **arguments: Any) -> go.Figure:
    low = np.array(low, np.float64)
    rows = [HeatMapRow(f"m{n}", n) for n in range(len(low))]
    arguments = {
        "site": "activation",
        "statistic": "std",
        "rows": rows,
        "starts": list(range(low.shape[1])),
    } | arguments
    return heat_map(
        arguments.pop("site"),
        arguments.pop("statistic"),
        low=low,
        high=low if high is None else np.array(high, np.float64),
        nonfinite=np.zeros(low.shape, bool) if nonfinite is None else np.array(nonfinite, bool),
        last_step=arguments["starts"][-1],
        **arguments,
    )


def heatmaps(figure: go.Figure) -> list[list[list[float | None]]]:
    """The cells of each layer: the colours, then the marks."""
    return [[list(row) for row in trace.z] for trace in figure.data if trace.type == "heatmap"]


def legend(figure: go.Figure) -> list[str]:
    return [trace.name for trace in figure.data if trace.type == "scatter"]


def test_colour_is_the_logarithm_and_the_scale_says_so() -> None:
    figure = draw([[0.01, 1.0, 100.0]])
    assert heatmaps(figure) == [[[-2.0, 0.0, 2.0]]]
    bar = figure.data[0].colorbar
    assert list(bar.tickvals) == [-2, -1, 0, 1, 2]
    assert list(bar.ticktext) == ["1e-2", "1e-1", "1e0", "1e1", "1e2"]
    assert (figure.data[0].zmin, figure.data[0].zmax) == (-2, 2)


def test_signed_numbers_are_not_logarithmic_and_zero_is_in_the_middle() -> None:
    figure = draw([[-1.0, 0.0, 3.0]], statistic="mean")
    assert heatmaps(figure) == [[[-1.0, 0.0, 3.0]]]
    assert (figure.data[0].zmin, figure.data[0].zmax) == (-3, 3)


def test_gaps_zeros_and_what_is_not_finite_are_told_apart() -> None:
    nan = math.nan
    figure = draw([[1.0, nan, 0.0, 10.0]], nonfinite=[[False, False, False, True]])
    values, broken, zeros = heatmaps(figure)
    assert values == [[0.0, None, None, None]]
    assert broken == [[None, None, None, 1.0]]
    assert zeros == [[None, None, 1.0, None]]
    assert legend(figure) == ["NaN or infinite", "exactly 0", "not measured"]
    colours = {trace.marker.color for trace in figure.data if trace.type == "scatter"}
    assert len(colours | {colour for _, colour in figure.data[0].colorscale}) == 3 + 8
    assert figure.layout.plot_bgcolor in colours


def test_nothing_unusual_needs_no_legend() -> None:
    assert legend(draw([[1.0, 2.0]])) == []


def test_a_cell_of_several_steps_shows_the_value_farthest_from_usual() -> None:
    low = [[1.0, 1.0, 1e-5, 1.0], [1.0] * 4]
    high = [[1.0, 1e3, 1.0, 1.0], [1.0] * 4]
    assert heatmaps(draw(low, high))[0][0] == [0.0, 3.0, -5.0, 0.0]


def test_an_outlier_does_not_press_all_else_into_one_colour() -> None:
    figure = draw([[1.0, 2.0, 1e-30, 1e30]])
    assert figure.data[0].zmax - figure.data[0].zmin <= 12
    assert heatmaps(figure)[0][0][2:] == [-30.0, 30.0]


def test_a_constant_is_one_colour() -> None:
    figure = draw([[1.0, 1.0 + 1e-12]])
    assert figure.data[0].zmax - figure.data[0].zmin >= 1


def test_columns_stand_at_their_steps() -> None:
    figure = draw([[1.0, 2.0, 3.0]], starts=[0, 1, 10])
    assert list(figure.data[0].x) == [0.0, 1.0, 10.0, 15.0]


def test_rows_are_labelled_once_each_from_the_input_down() -> None:
    rows = [HeatMapRow("stem", 1), HeatMapRow("stem", 1), HeatMapRow("x" * 400, None)]
    figure = draw([[1.0]] * 3, rows=rows)
    assert list(figure.data[0].y) == ["1 · stem", "1 · stem (2)", "x" * 400]
    assert figure.layout.yaxis.autorange == "reversed"
    assert max(map(len, figure.layout.yaxis.ticktext)) < 50


def test_the_title_has_the_unit() -> None:
    assert draw([[1.0]]).layout.title.text == "activation: std [unit of the activation]"
    assert unit("update", "update_ratio") == "no unit"
    assert unit("activation", "kl_unit_gaussian") == "nats"
    assert unit("parameter_grad", "l2") == "loss per unit of the parameter"


@pytest.mark.parametrize("cells", [[[math.nan]], [[0.0, 0.0]], [[5e-324, 1e308]]])
def test_extremes_make_valid_json(cells: list[list[float]]) -> None:
    figure = draw(cells, nonfinite=np.isnan(cells))
    text = figure.to_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))

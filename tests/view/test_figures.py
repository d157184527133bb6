"""What the figures of modules show, read back from them: the numbers of the table, in order, gaps and marks."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from figure_helpers import IN_ORDER, STEPS, number, rows, small_run, trace, traces, values_counted
from log_rows import new_run, write_run

from statsbridge import ConfigError
from statsbridge.analyze.run_data import RunData, load
from statsbridge.view import figures
from statsbridge.view.figures_histograms import EXPONENTS, FORMATS
from statsbridge.view.figures_parts import TENSOR_BROKEN

NEAR = 1e-6  # figures have 7 significant digits


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return small_run(tmp_path_factory.mktemp("runs"))


def floats(values: object) -> np.ndarray:
    return np.array(values, np.float64)


def expected(site: str, step: int) -> list[float]:
    """`std` along the depth; `norm` has none at step 40."""
    return [math.nan if (module, step) == ("norm", 40) else number(module, step, site) for module in IN_ORDER]


def test_heat_map_has_the_values_of_the_table_by_depth(data: RunData) -> None:
    figure = figures.heat_map(data, "activation", "std")
    cells = 10 ** floats(figure.data[0].z)
    assert list(figure.data[0].y) == ["1 · stem", "2 · norm", "3 · head", "unused"]
    for column, step in enumerate(STEPS):
        wanted = [*expected("activation", step), math.nan]
        if step >= 20:
            wanted[1] = math.nan  # marked in black instead
        np.testing.assert_allclose(cells[:, column], wanted, rtol=2e-3)
    assert list(figure.data[0].x) == [0, 10, 20, 40, 50]
    assert (floats(figure.data[1].z) == 1).tolist() == [[False] * 4, [False, False, True, True], *[[False] * 4] * 2]


def test_heat_map_of_many_steps_keeps_the_extremes(data: RunData) -> None:
    narrow = figures.heat_map(data, "activation", "std", width_pixels=8)
    assert floats(narrow.data[0].z).shape == (4, 2)


def test_small_signed_numbers_are_not_rounded_away(data: RunData) -> None:
    figure = figures.heat_map(data, "activation", "mean", modules="stem")
    np.testing.assert_allclose(
        floats(figure.data[0].z)[0], [-number("stem", step, "activation") for step in STEPS], NEAR
    )


def test_depth_profile_is_forward_above_backward_over_one_axis(data: RunData) -> None:
    figure = figures.depth_profile(data, step=20, forward=("activation", "std"), backward=("activation_grad", "l2"))
    above, below = (trace(figure, name=name) for name in ("activation std", "activation_grad l2"))
    np.testing.assert_allclose(floats(above.y), expected("activation", 20), NEAR)
    np.testing.assert_allclose(floats(below.y), 2 * floats(expected("activation_grad", 20)), NEAR)
    assert list(above.x) == list(below.x) == [0, 1, 2]
    assert list(figure.layout.xaxis2.ticktext) == list(IN_ORDER)
    assert figure.layout.xaxis.matches == "x2"
    assert figure.layout.yaxis.domain[0] > figure.layout.yaxis2.domain[1]
    assert (above.yaxis, below.yaxis) == ("y", "y2")
    assert (figure.layout.yaxis.type, figure.layout.yaxis2.type) == ("log", "log")
    assert figure.layout.yaxis.title.text == "activation: std<br>[unit of the activation]"
    assert figure.layout.yaxis2.title.text == "activation_grad: l2<br>[loss per unit of the activation]"
    assert [list(one.x) for one in traces(figure, name=TENSOR_BROKEN)] == [[1], [1]]


def test_the_band_of_the_depth_profile_is_the_range_over_all_steps(data: RunData) -> None:
    figure = figures.depth_profile(data)
    band = trace(figure, name="activation std, range over steps")
    for place, module in enumerate(IN_ORDER):
        heights = [y for x, y in zip(band.x, band.y, strict=True) if x is not None and abs(x - place) == 0.5]
        inside = [number(module, step, "activation") for step in STEPS if (module, step) != ("norm", 40)]
        for extreme in (min(inside), max(inside)):
            assert min(abs(height - extreme) / extreme for height in heights) < NEAR
    assert band.fill == "toself"


def test_a_null_is_a_gap_and_a_nan_is_marked(data: RunData) -> None:
    figure = figures.depth_profile(data, step=40)
    assert trace(figure, name="activation std").y[1] is None
    assert trace(figure, name="activation std").customdata[1][0] == "norm"
    assert len(traces(figure, name=TENSOR_BROKEN)) == 2


def test_a_panel_whose_site_is_missing_says_so(data: RunData) -> None:
    figure = figures.depth_profile(data, backward=("tensor_grad", "l2"))
    assert "tensor_grad" in figure.layout.annotations[0].text
    assert len(traces(figure, name="activation std")) == 1


def test_update_ratio_has_its_band_and_its_limits(data: RunData) -> None:
    figure = figures.update_ratio(data, step=10)
    curve = trace(figure, name="update update_ratio")
    np.testing.assert_allclose(floats(curve.y), expected("update", 10), NEAR)
    band, *limits = figure.layout.shapes
    assert band.y0 < 1e-3 < band.y1
    assert [line.y0 for line in limits] == [0.1, 1.0]
    assert [note.text for note in figure.layout.annotations] == ["1e-3 usual", "0.1 suspicious", "1 diverging"]
    assert [note.y for note in figure.layout.annotations] == pytest.approx([-3, -1, 0])
    assert figure.layout.yaxis.type == "log"


def test_gradient_flow_along_the_depth_and_by_type(data: RunData) -> None:
    wanted = [number(module, 10, "parameter_grad") / number(module, 10, "parameter") for module in IN_ORDER]
    figure = figures.gradient_flow(data, step=10)
    np.testing.assert_allclose(floats(trace(figure, name="‖g‖ / ‖θ‖").y), wanted, NEAR)
    np.testing.assert_allclose(floats(trace(figure, name="‖Δθ‖ / ‖θ‖").y), expected("update", 10), NEAR)
    assert not traces(figure, name=TENSOR_BROKEN)
    boxes = trace(figures.gradient_flow(data, step=10, by="type"), name="‖g‖ / ‖θ‖")
    assert dict(zip(boxes.x, boxes.y, strict=True)) == pytest.approx(
        dict(zip(("Conv2d", "GroupNorm", "Linear"), wanted, strict=True)), rel=NEAR
    )


def test_gradient_flow_marks_what_is_not_finite_at_the_last_step(data: RunData) -> None:
    figure = figures.gradient_flow(data)
    assert figure.layout.title.text == "Gradient flow, step 40"
    assert [list(one.x) for one in traces(figure, name=TENSOR_BROKEN)] == [[1], [1]]
    assert [list(one.x) for one in traces(figures.gradient_flow(data, by="type"), name=TENSOR_BROKEN)] == [
        ["GroupNorm"],
        ["GroupNorm"],
    ]


def test_gradient_flow_of_nothing_finite_keeps_its_panels(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    sites = ("parameter", "parameter_grad", "update")
    write_run(run, *({"stats": rows(site, 40, (("norm", "GroupNorm", 1, 0),))} for site in sites))
    figure = figures.gradient_flow(load(run))
    # Plotly lays out no axes that hold no trace, and then shows no marks over them either.
    assert {"y", "y2"} <= {one.yaxis for one in figure.data}
    assert len(traces(figure, name=TENSOR_BROKEN)) == 2
    assert sum(note.text == "no finite number at this step" for note in figure.layout.annotations) == 2


def test_types_are_medians_with_the_range_of_the_members(tmp_path: Path) -> None:
    names = [("a", "Linear", 1, 0), ("bbb", "Linear", 2, 1), ("ccccccccc", "Linear", 3, 2), ("d", "ReLU", 4, 3)]
    run = new_run(tmp_path)
    write_run(run, {"stats": rows("activation", 10, tuple(names))})
    (bars,) = figures.types(load(run), "activation", "std").data
    low, middle, high = (number(one[0], 10, "activation") for one in names[:3])
    relu = number("d", 10, "activation")
    np.testing.assert_allclose(floats(bars.x), [middle, relu], NEAR)
    np.testing.assert_allclose(floats(bars.error_x.array), [high - middle, 0], NEAR)
    np.testing.assert_allclose(floats(bars.error_x.arrayminus), [middle - low, 0], NEAR)
    assert [about[:2] for about in bars.customdata] == [["Linear", 3], ["ReLU", 1]]


def test_grid_titles_and_values(data: RunData) -> None:
    figure = figures.grid(data, "activation", "std", columns=2)
    titles = next(one for one in traces(figure, mode="text") if one.textposition == "top right")
    assert list(titles.text) == ["Conv2d #0", "GroupNorm #1", "Linear #2", "Linear"]
    assert titles.x[0] == titles.x[2] < titles.x[1]
    assert titles.y[0] == titles.y[1] > titles.y[2]
    curve = trace(figure, name="stem")
    steps, values = zip(*curve.customdata, strict=True)
    assert steps == STEPS
    np.testing.assert_allclose(values, [number("stem", step, "activation") for step in STEPS], NEAR)
    # std grows by a factor of 1.37 a step: a straight line on the logarithmic scale.
    assert curve.y[1] - curve.y[0] == pytest.approx((curve.y[3] - curve.y[0]) / 4, abs=1e-4)
    assert curve.x[1] - curve.x[0] == pytest.approx((curve.x[3] - curve.x[0]) / 4, abs=1e-4)
    broken = trace(figure, name=TENSOR_BROKEN)
    assert list(broken.customdata) == [20, 40]
    assert list(trace(figure, name="norm").customdata[-1]) == [40, None]


def test_a_curve_that_hardly_moves_is_not_blown_up(data: RunData) -> None:
    figure = figures.grid(data, "activation", "count")
    low, high = (one.text for one in traces(figure, mode="text")[1:])
    assert (low[0], high[0]) == ("9.9 ", "10.1 ")


LARGEST, SMALLEST = sys.float_info.max, 5e-324


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("statistic", ["std", "mean"])
@pytest.mark.parametrize(
    "values",
    [
        (SMALLEST, SMALLEST),
        (SMALLEST, 1e308),
        (SMALLEST, -1.0, 0.0),
        (0.0, SMALLEST),
        (LARGEST, LARGEST),
        (LARGEST, -LARGEST, SMALLEST),
        (-LARGEST, -LARGEST),
        (math.inf, 1.0, math.nan),
        (math.inf, -math.inf),
        (math.inf, 0.0, -1.0),
        (math.nan, math.nan),
    ],
)
def test_small_plots_of_extreme_values_lie_in_their_frames(
    values: tuple[float, ...], statistic: str, tmp_path: Path
) -> None:
    run = new_run(tmp_path)
    names = (("first", "Linear", 1, 0), ("second", "Linear", 2, 1))
    at = [{**rows("activation", step, names), statistic: np.array([value, 1.0])} for step, value in enumerate(values)]
    write_run(run, *({"stats": table} for table in at))
    figure = figures.grid(load(run), "activation", statistic)
    curve = trace(figure, name="first")
    # Where a logarithm has nothing to show, the curve is on a linear scale.
    logarithmic = statistic == "std" and any(0 < value < math.inf for value in values)
    wanted = [place for place, value in enumerate(values) if math.isfinite(value) and (value > 0 or not logarithmic)]
    there = [step for (step, value), place in zip(curve.customdata, curve.y, strict=True) if place is not None]
    assert there == wanted
    frame = trace(figure, name=None, mode="lines")
    bottom, top = frame.y[0], frame.y[1]
    assert all(bottom - 1e-4 <= place <= top + 1e-4 for place in curve.y if place is not None)
    assert "NaN" not in figure.to_json()
    assert "Infinity" not in figure.to_json()


def test_histograms_are_the_shares_of_the_magnitudes(data: RunData) -> None:
    figure = figures.histograms(data, "stem", "parameter_grad")
    heat = trace(figure, type="heatmap")
    shares = floats(heat.customdata)
    for column, step in enumerate(STEPS):
        values = np.abs(values_counted(step))
        for place, power in enumerate(heat.y[:-1]):
            inside = (values > 0) & (np.floor(np.log2(np.where(values > 0, values, 1))) == power)
            if power == EXPONENTS[0]:
                inside = (values > 0) & (values < 2.0**-64)
            assert shares[place, column] == pytest.approx(inside.sum() / len(values), rel=NEAR, abs=1e-12), (
                power,
                step,
            )
    assert list(trace(figure, name="exactly 0").y) == [0.2] * 4
    assert list(trace(figure, name="below 2⁻²⁴, 0 in float16").y) == [0.2] * 4
    assert list(trace(figure, name="2¹⁶ and above, infinite in float16").y) == [0.1] * 4


def test_the_ranges_of_the_formats_are_those_of_torch() -> None:
    kinds = {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float8 E5M2": torch.float8_e5m2,
        "float8 E4M3": torch.float8_e4m3fn,
    }
    for one in FORMATS:
        info = torch.finfo(kinds.pop(one.name))
        smallest = info.smallest_normal * info.eps
        bounds = (math.log2(smallest), math.log2(info.smallest_normal), math.log2(info.max))
        assert (one.denormal, one.normal, one.largest) == pytest.approx(bounds, abs=0.01)
    assert not kinds


def test_ridges_of_the_same_shares(data: RunData) -> None:
    figure = figures.histograms(data, "stem", "parameter_grad", kind="ridge")
    first = trace(figure, name="step 0")
    assert max(first.customdata) == pytest.approx(0.2)
    assert list(figure.layout.yaxis.ticktext) == [str(step) for step in STEPS]
    assert list(figure.layout.yaxis2.ticktext) == [one.name for one in FORMATS]


def test_ranges_of_the_formats_are_drawn(data: RunData) -> None:
    figure = figures.histograms(data, "stem", "parameter_grad")
    bars = {(shape.y0, shape.y1) for shape in figure.layout.shapes if shape.type == "rect"}
    assert {(-24, -14), (-14, math.log2(65504)), (-9, -6), (-6, math.log2(448))} <= bars


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda data: figures.heat_map(data, "activatoin", "std"), "did you mean activation"),
        (lambda data: figures.heat_map(data, "activation", "stdd"), "did you mean std"),
        (lambda data: figures.depth_profile(data, step=11), r"step 11 \(not sampled\).* 10, "),
        (lambda data: figures.depth_profile(data, forward=("a", "std"), backward=("b", "std")), "site a"),
        (lambda data: figures.update_ratio(data, modules="nothing*"), "nothing"),
        (lambda data: figures.gradient_flow(data, by="tpye"), "did you mean type"),
        (lambda data: figures.grid(data, "activation", "std", columns=0), "columns=0"),
        (lambda data: figures.histograms(data, "stem", "parameter_grad", kind="bars"), "kind bars"),
        (lambda data: figures.histograms(data, "stem", "parameter_grad", tensor="bias"), "tensor bias.*weight"),
        (lambda data: figures.histograms(data, "stem", "parameter_grad", call=3), "call 3"),
        (lambda data: figures.histograms(data, "stem", "activation"), r"histograms=True"),
        (lambda data: figures.types(data, "activation", "nope"), "statistic nope"),
    ],
)
def test_what_is_not_there_is_named_with_the_choices(data: RunData, draw: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        draw(data)


def test_without_plotly_the_extra_is_named(data: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=r"statsbridge\[figures\]"):
        figures.heat_map(data, "activation", "std")


def test_an_empty_run_says_that_there_is_nothing(tmp_path: Path) -> None:
    empty = load(new_run(tmp_path))
    assert figures.training(empty).layout.annotations[0].text == "no scalars recorded yet"
    with pytest.raises(ConfigError, match=r"no statistics of site activation in .* yet"):
        figures.heat_map(empty, "activation", "std")
    with pytest.raises(ConfigError, match="no statistics of module 'stem' yet"):
        figures.module_series(empty, "stem")


@pytest.mark.parametrize("dark", [False, True])
def test_figures_are_json_in_either_theme(data: RunData, dark: bool) -> None:
    for figure in (
        figures.heat_map(data, "activation", "std", dark=dark),
        figures.depth_profile(data, dark=dark),
        figures.grid(data, "activation", "std", dark=dark),
        figures.types(data, "activation", "std", dark=dark),
        figures.histograms(data, "norm", "parameter_grad", dark=dark),
    ):
        text = figure.to_json()
        json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        assert ("#14171c" in text) == dark


def test_a_run_of_300_modules_makes_small_files(tmp_path: Path) -> None:
    names = tuple((f"transformer.h.{n}.mlp.c_fc", "Linear", n, n) for n in range(300))
    run = new_run(tmp_path)
    numbers = np.random.default_rng(0).random((400, 300))
    works = [{"stats": rows("activation", 0, names) | {"step": step, "std": numbers[step]}} for step in range(400)]
    write_run(run, {"stats": {name: _joined(works, name) for name in works[0]["stats"]}})
    data = load(run)
    sizes = {
        "heat map": len(figures.heat_map(data, "activation", "std").to_json()),
        "grid": len(figures.grid(data, "activation", "std").to_json()),
        "depth profile": len(figures.depth_profile(data).to_json()),
    }
    assert sizes["heat map"] < 800_000
    assert sizes["grid"] < 3_000_000
    assert sizes["depth profile"] < 200_000


def _joined(works: list[dict[str, dict[str, object]]], name: str) -> object:
    """One column of all works under each other; what is one value for all rows stays so."""
    values = [work["stats"][name] for work in works]
    if name == "step":
        return np.repeat(values, 300)
    return np.concatenate(values) if isinstance(values[0], np.ndarray | list) else values[0]

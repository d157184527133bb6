"""What the figures over the steps show: raw values always, smoothed ones beside, marks, events, several runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from figure_helpers import STEPS, number, small_run, trace, traces
from log_rows import new_run, scalar_rows, stats_rows, write_run

from statsbridge import ConfigError
from statsbridge.analyze.curves import curves
from statsbridge.analyze.run_data import RunData, load
from statsbridge.view import figures
from statsbridge.view.downsample import NAN, PLUS_INFINITY
from statsbridge.view.figures_parts import TENSOR_BROKEN

NEAR = 1e-6  # figures have 7 significant digits


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return small_run(tmp_path_factory.mktemp("runs"))


def floats(values: object) -> np.ndarray:
    return np.array(values, np.float64)


def average(values: list[float], weight: float) -> list[float]:
    """The bias-corrected moving average in closed form: a weighted mean of the values so far."""
    return [
        float(np.average(values[: k + 1], weights=[weight ** (k - i) for i in range(k + 1)]))
        for k in range(len(values))
    ]


def recorded(folder: Path, *works: dict[str, object], name: str | None = None) -> RunData:
    run = new_run(folder, name)
    write_run(run, *works)
    return load(run)


def curve_of(steps: np.ndarray, values: np.ndarray, name: str = "loss", **columns: object) -> dict[str, object]:
    return {
        "scalars": {"step": steps, "iteration": steps, "time": 1.7e9 + steps, "name": name, "value": values, **columns}
    }


def test_module_series_has_a_panel_a_site_raw_and_smoothed(data: RunData) -> None:
    figure = figures.module_series(data, "stem", smoothing=0.5)
    titles = [figure.layout[f"yaxis{n}"].title.text for n in ("", 2, 3, 4, 5)]
    assert titles == [
        "activation: std<br>[unit of the activation]",
        "activation_grad: l2<br>[loss per unit of the activation]",
        "parameter: l2<br>[unit of the parameter]",
        "parameter_grad: l2<br>[loss per unit of the parameter]",
        "update: update_ratio<br>[no unit]",
    ]
    raw = trace(figure, name="activation")
    values = [number("stem", step, "activation") for step in STEPS]
    assert tuple(raw.x) == STEPS
    np.testing.assert_allclose(floats(raw.y), values, NEAR)
    np.testing.assert_allclose(floats(trace(figure, name="activation, smoothed (0.5)").y), average(values, 0.5), NEAR)
    assert trace(figure, name="update weight").yaxis == "y5"
    assert figure.layout.title.text == "stem (Conv2d)"


def test_raw_values_alone_without_smoothing(data: RunData) -> None:
    for none in (None, 0):
        names = [one.name for one in figures.module_series(data, "stem", smoothing=none).data]
        assert not [name for name in names if "smoothed" in name]
        assert "activation" in names
    with pytest.raises(ConfigError, match="smoothing=2"):
        figures.module_series(data, "stem", smoothing=2)


def test_a_nan_in_the_tensor_is_marked_and_null_is_a_gap(data: RunData) -> None:
    figure = figures.module_series(data, "norm", sites=["activation"], statistic="l2")
    assert trace(figure, name="activation").y[3] is None
    mark = trace(figure, name=TENSOR_BROKEN)
    assert list(mark.x) == [20, 40]
    # On an axis of its own, from 0 to 1: no zoom takes it out of sight.
    assert figure.layout[mark.yaxis.replace("y", "yaxis")].range == (0, 1)
    assert figure.layout[mark.yaxis.replace("y", "yaxis")].overlaying == "y"


def test_events_of_the_module_and_of_none_are_marked(data: RunData) -> None:
    figure = figures.module_series(data, "norm")
    critical = trace(figure, name="event: critical")
    assert (list(critical.x), list(critical.hovertext)) == ([20], ["step 20, bad norm: NaN &lt;here&gt;"])
    assert list(trace(figure, name="event: info").x) == [20]
    assert not traces(figures.module_series(data, "stem"), name="event: critical")
    assert not traces(figures.module_series(data, "norm", events=False), name="event: info")
    assert {line.x0 for line in figure.layout.shapes} == {20}


def test_several_tensors_and_the_extreme_of_both_signs(tmp_path: Path) -> None:
    work = stats_rows(3, 2, module="m", tensor=["bias", "weight"], site="parameter", min=[-5.0, -1.0], max=[2.0, 3.0])
    figure = figures.module_series(recorded(tmp_path, {"stats": work}), "m", statistic="abs_max", smoothing=None)
    assert [trace(figure, name=f"parameter {tensor}").y[0] for tensor in ("bias", "weight")] == [5.0, 3.0]
    assert trace(figure, name="parameter bias").line.color != trace(figure, name="parameter weight").line.color


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"module": "stam"}, "did you mean stem"),
        ({"module": "stem", "call": 2}, "call 2"),
        ({"module": "stem", "sites": ["tensor"]}, "unknown site tensor"),
        ({"module": "stem", "statistic": "stdd"}, "did you mean std"),
        ({"module": "stem", "sites": ["activation"], "statistic": "update_ratio"}, "belongs to site update"),
    ],
)
def test_what_is_not_there_is_named_with_the_choices(data: RunData, arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        figures.module_series(data, **arguments)


def test_a_module_name_is_no_pattern(tmp_path: Path) -> None:
    data = recorded(tmp_path, {"stats": stats_rows(0, 3, module=["m[0]", "m0", "m*"])})
    figure = figures.module_series(data, "m[0]", statistic="mean")
    assert trace(figure, name="activation").y[0] == pytest.approx(data.stats["mean"][0].as_py(), rel=NEAR)
    assert len(trace(figures.module_series(data, "m*", statistic="mean"), name="activation").y) == 1


def test_training_shows_loss_rate_and_norm_with_what_is_not_finite(data: RunData) -> None:
    figure = figures.training(data)
    titles = [figure.layout[axis].title.text for axis in ("yaxis", "yaxis2", "yaxis3")]
    assert titles == ["loss", "learning rate", "gradient norm (L2)"]
    loss = trace(figure, name="loss")
    wanted = [None if step in (30, 31) else pytest.approx(2 / (1 + step), rel=NEAR) for step in range(50)]
    assert list(loss.y) == wanted
    assert list(trace(figure, name=NAN).x) == [30]
    assert list(trace(figure, name=PLUS_INFINITY).x) == [31]
    smoothed = [one for one in trace(figure, name="loss, smoothed (0.9)").y if one is not None]
    finite = [2 / (1 + step) for step in range(50) if step not in (30, 31)]
    np.testing.assert_allclose(smoothed, average(finite, 0.9), NEAR)
    assert not traces(figure, name="lr, smoothed (0.9)")
    assert figure.layout.yaxis2.type == figure.layout.yaxis3.type == "log"
    assert len(traces(figure, name="event: critical")) == 1


def test_a_spike_is_in_the_figure_of_20_000_points(tmp_path: Path) -> None:
    steps = np.arange(20_000)
    values = np.random.default_rng(0).random(20_000)
    values[12_345], values[777] = 5.008, np.nan
    figure = figures.scalars(recorded(tmp_path, curve_of(steps, values)), "loss", width_pixels=1000)
    loss = trace(figure, name="loss")
    assert loss.y[list(loss.x).index(12_345)] == 5.008
    assert max(one for one in loss.y if one is not None) == 5.008
    assert len(loss.x) < 4_100
    assert list(trace(figure, name=NAN).x) == [777]


def test_scalars_share_a_panel_by_the_last_part_of_the_name(tmp_path: Path) -> None:
    works = [scalar_rows(s, loss=3.0 - s, **{"val/loss": 4.0 - s, "val/acc": s / 3}, lr=0.1) for s in range(3)]
    data = recorded(tmp_path, *({"scalars": one} for one in works))
    figure = figures.scalars(data)
    assert {one.name: one.yaxis for one in figure.data if "smoothed" not in one.name} == {
        "loss": "y",
        "val/loss": "y",
        "val/acc": "y2",
    }
    only = figures.scalars(data, ["val/*"], smoothing=None)
    assert [one.name for one in only.data] == ["val/loss", "val/acc"]
    with pytest.raises(ConfigError, match="did you mean loss"):
        figures.scalars(data, ["los"])


def test_more_scalars_than_panels_is_said(tmp_path: Path) -> None:
    data = recorded(tmp_path, {"scalars": scalar_rows(0, **{f"s{n}": float(n) for n in range(30)})})
    figure = figures.scalars(data)
    assert "12 of 30 panels" in figure.layout.title.text
    assert len(figure.data) == 12


def test_kinds_of_one_name_are_curves_of_their_own(tmp_path: Path) -> None:
    steps = np.arange(4)
    data = recorded(
        tmp_path, curve_of(steps, steps * 1.0, kind="batch"), curve_of(steps[1:3], steps[1:3] + 0.5, kind="recomputed")
    )
    figure = figures.scalars(data, smoothing=None)
    assert [(one.name, list(one.y)) for one in figure.data] == [
        ("loss (batch)", [0, 1, 2, 3]),
        ("loss (recomputed)", [1.5, 2.5]),
    ]


def test_a_run_of_one_step_shows_its_points(tmp_path: Path) -> None:
    data = recorded(tmp_path, {"scalars": scalar_rows(7, loss=2.5)}, {"stats": stats_rows(7, 2)})
    loss = trace(figures.training(data), name="loss")
    assert (list(loss.x), list(loss.y), loss.mode) == ([7], [2.5], "lines+markers")
    point = trace(figures.module_series(data, "m0", statistic="mean"), name="activation")
    assert point.mode == "lines+markers"
    assert len(figures.grid(data, "activation", "std").data) > 2


def test_a_curve_below_0_is_linear_and_a_wide_one_logarithmic(tmp_path: Path) -> None:
    steps = np.arange(10)
    data = recorded(
        tmp_path,
        curve_of(steps, steps - 5.0, "reward"),
        curve_of(steps, 10.0**-steps, "loss"),
        curve_of(steps, steps / 9, "acc"),
    )
    kinds = {figures.scalars(data, name).layout.yaxis.type or "linear" for name in ("reward", "acc")}
    assert kinds == {"linear"}
    assert figures.scalars(data, "loss").layout.yaxis.type == "log"


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> list[RunData]:
    folder = tmp_path_factory.mktemp("twenty")
    steps = np.arange(6)
    return [recorded(folder, curve_of(steps, steps + number), name=f"run {number % 19}") for number in range(20)]


def test_twenty_runs_over_each_other_are_told_apart(twenty: list[RunData]) -> None:
    figure = figures.overlay(twenty, "loss")
    shown = [one for one in figure.data if one.showlegend is not False]
    assert len({one.name for one in shown}) == 20
    assert len({(one.line.color, one.line.dash) for one in shown}) == 20
    raw = [one for one in figure.data if one.showlegend is False]
    assert [list(one.y) for one in raw] == [[step + number for step in range(6)] for number in range(20)]
    # Two are of one name: the id tells them apart.
    assert sum(twenty[0].id in one.name or twenty[19].id in one.name for one in shown) == 2


def test_runs_without_the_scalar_are_named(twenty: list[RunData], data: RunData) -> None:
    figure = figures.overlay({"first": twenty[0], "other": data}, "grad_norm")
    assert "grad_norm of 1 run, " in figure.layout.title.text
    assert "not in first" in figure.layout.title.text
    with pytest.raises(ConfigError, match="did you mean loss"):
        figures.overlay(twenty, "los")
    with pytest.raises(ConfigError, match="no runs"):
        figures.overlay([], "loss")


def test_learning_curves_mark_what_was_found(tmp_path: Path) -> None:
    steps = np.arange(1, 1001)
    noise = np.random.default_rng(0).normal(size=1000)
    values = 2 * np.exp(-steps / 150) + 0.3 + 0.0008 * np.maximum(steps - 800, 0) + 0.08 * noise
    values[600:605] += 3.0
    every = steps[19::20]
    validation = (every - 500.0) ** 2 / 1e6 + 1
    data = recorded(tmp_path, curve_of(steps, values), curve_of(every, validation, "val_loss"))
    figure = figures.learning_curves(curves(data, train="loss", validation="val_loss"))
    assert max(trace(figure, name="loss").y) == pytest.approx(values.max(), rel=NEAR)
    assert max(trace(figure, name="spikes that smoothing hides").y) == pytest.approx(values.max(), rel=NEAR)
    np.testing.assert_allclose(floats(trace(figure, name="val_loss").y), validation, NEAR)
    assert (figure.layout.annotations[0].x, figure.layout.annotations[0].text) == (500, "lowest validation")
    assert figure.layout.title.text.startswith("loss and val_loss: ")
    assert not math.isnan(figure.layout.shapes[0].x0)

"""The shapes of learning curves, as published digit for digit, and what is said of them."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from log_rows import scalar_rows, written
from scipy import stats

from statsbridge.analyze.curve_shape import FEWEST, judge, line, shape
from statsbridge.analyze.curve_steps import jumps, running_median, smoothed, spikes
from statsbridge.analyze.curves import Curves, curve, curves
from statsbridge.errors import ConfigError
from statsbridge.log import RunData

Floats = npt.NDArray[np.float64]

EPOCHS = np.arange(1, 51)


def noise(seed: int, count: int = 50) -> Floats:
    return np.random.default_rng(seed).normal(size=count)


def pair(number: int, train: Floats, validation: Floats) -> tuple[Floats, Floats]:
    return train + 0.01 * noise(number), validation + 0.01 * noise(number + 10)


# The four of figures.md; train, validation, then its table: last train, lowest epoch, gap, slope, wiggle.
FOUR = {
    "overfitting": (
        pair(0, np.exp(-EPOCHS / 8) + 0.05, 0.9 * np.exp(-EPOCHS / 8) + 0.25 + 0.004 * EPOCHS),
        ("0.065", 26, "0.385", "0.0039", "0.025"),
    ),
    "underfitting": (
        pair(1, 0.6 + 0.2 * np.exp(-EPOCHS / 5), 0.62 + 0.2 * np.exp(-EPOCHS / 5)),
        ("0.609", 25, "0.004", "-0.0009", "0.013"),
    ),
    "rate too large": (
        pair(2, 0.4 + 0.3 * np.abs(np.sin(EPOCHS)), 0.45 + 0.3 * np.abs(np.sin(EPOCHS + 1))),
        ("0.490", 21, "0.167", "-0.0054", "0.155"),
    ),
    "rate too small": (
        pair(3, 1 - 0.006 * EPOCHS, 1.02 - 0.006 * EPOCHS),
        ("0.711", 48, "0.023", "-0.0040", "0.016"),
    ),
}


def recorded(folder: Path, *rows: dict[str, Any]) -> RunData:
    """A run with these scalars: each of `rows` has step, name, value, and perhaps epoch and kind."""
    columns = {name: [row.get(name) for row in rows] for name in ("step", "name", "value", "epoch", "kind")}
    return written(folder, {"scalars": {**columns, "iteration": columns["step"], "time": 1.7e9}})


def scalar(
    name: str, values: Any, steps: Any = None, epochs: Any = None, kind: str | None = None
) -> list[dict[str, Any]]:
    steps = range(len(values)) if steps is None else steps
    epochs = [None] * len(values) if epochs is None else epochs
    return [
        {"step": int(step), "name": name, "value": float(value), "epoch": epoch, "kind": kind}
        for step, value, epoch in zip(steps, values, epochs, strict=True)
    ]


def of_pair(folder: Path, train: Floats, validation: Floats, **options: Any) -> Curves:
    steps = 10 * np.arange(1, len(train) + 1)
    rows = scalar("loss", train, steps) + scalar(
        "val_loss", validation, steps, [float(e) for e in range(1, len(train) + 1)]
    )
    return curves(recorded(folder, *rows), validation="val_loss", **options)


@pytest.mark.parametrize("word", FOUR)
def test_the_four_shapes_digit_for_digit(word: str, tmp_path: Path) -> None:
    (train, validation), (last, lowest, gap, slope, wiggle) = FOUR[word]
    found = of_pair(tmp_path, train, validation)
    assert f"{found.shape.last_train:.3f}" == last
    assert found.best_epoch == found.shape.lowest == lowest
    assert found.best_step == 10 * lowest
    assert f"{found.shape.gap:.3f}" == gap
    assert f"{found.shape.slope:.4f}" == slope
    assert f"{found.shape.wiggle:.3f}" == wiggle
    assert found.verdict.word == word
    assert any(character.isdigit() for reason in found.verdict.reasons for character in reason)


@pytest.mark.parametrize("seed", range(20))
def test_verdicts_do_not_hang_on_the_noise(seed: int) -> None:
    for word, ((train, validation), _) in FOUR.items():
        found = shape(train + 0.005 * noise(seed + 100), validation + 0.005 * noise(seed + 200))
        assert judge(found).word == word


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(
    ("train", "validation"),
    [
        (2 * np.exp(-EPOCHS / 8) + 0.30, 2 * np.exp(-EPOCHS / 8) + 0.33),
        (2.3 * np.exp(-EPOCHS / 4) + 0.01, 2.3 * np.exp(-EPOCHS / 4) + 0.011),
        (3 / np.sqrt(EPOCHS), 3.1 / np.sqrt(EPOCHS)),
    ],
    ids=["levels off", "near zero", "power law"],
)
def test_healthy_curves_of_any_size(scale: float, train: Floats, validation: Floats) -> None:
    for seed in range(5):
        noisy = [scale * (one * (1 + 0.01 * noise(seed + place))) for place, one in enumerate((train, validation))]
        assert judge(shape(*noisy)).word == "healthy"


# Powers of two: the same digits. The last ones are at the ends of what 64 bits hold.
@pytest.mark.parametrize("power", [-1000, -600, 600, 1000, 1023])
@pytest.mark.parametrize("word", FOUR)
def test_a_curve_of_any_size_has_the_same_verdict(power: int, word: str) -> None:
    """Squares of losses beyond 1e154 are infinite, those below 1e-162 are 0: none of them is needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usual, enormous = (shape(*(np.ldexp(one, by) for one in FOUR[word][0])) for by in (0, power))
    assert judge(enormous).word == judge(usual).word == word
    for name in ("slope", "slope_error", "late_slope", "late_slope_error", "wiggle", "late_wiggle", "level", "rise"):
        assert getattr(enormous, name) == pytest.approx(np.ldexp(getattr(usual, name), power), rel=1e-12)


@pytest.mark.parametrize("power", [-1000, -600, 600, 1000, 1020])
def test_steps_and_spikes_of_a_curve_of_any_size(power: int) -> None:
    curve_with_both = 2 + 0.01 * noise(7, 400) - 0.5 * (np.arange(400) >= 200)
    curve_with_both[300] = 4.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enormous = np.ldexp(curve_with_both, power)
        assert spikes(enormous).tolist() == spikes(curve_with_both).tolist() == [300]
        assert smoothed(enormous, 0.99).hidden.tolist() == [300]
        (step,), (usual,) = jumps(enormous), jumps(curve_with_both)
    assert (step.place, step.size) == (usual.place, pytest.approx(np.ldexp(usual.size, power)))


def test_the_end_of_a_curve_that_came_down_from_an_enormous_loss() -> None:
    end = 2 + 0.01 * noise(7, 300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = jumps(np.concatenate([1e300 * (1 + 0.01 * noise(8, 100)), end, end - 1]))
    assert [jump.place for jump in found] == [100, 400]


def test_an_enormous_loss_is_judged_without_a_warning(tmp_path: Path) -> None:
    falling = [1.5e308 * 0.9**step * sign for step, sign in enumerate([1.0] * 60 + [-1.0] * 20)]
    rows = (
        scalar("loss", falling)
        + scalar("loss", falling, kind="batch")
        + scalar("val_loss", falling[::4], range(0, 80, 4))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for validation in (None, "val_loss"):
            assert curves(recorded(tmp_path / str(validation), *rows), validation=validation).verdict.word


def test_validation_that_stands_far_above_training_is_overfitting_too() -> None:
    train, validation = 2 * np.exp(-EPOCHS / 5) + 0.01, 1.5 * np.exp(-EPOCHS / 5) + 0.6
    verdict = judge(shape(train, validation))
    assert verdict.word == "overfitting"
    assert "no longer falls" in verdict.reasons[0]


def test_few_points_are_not_enough_and_a_nan_at_the_end_is_divergence() -> None:
    assert judge(shape(np.linspace(1, 0.1, FEWEST - 1))).word == "not enough data"
    assert judge(shape(np.linspace(1, 0.1, FEWEST))).word != "not enough data"
    assert judge(shape(np.zeros(0))).word == "not enough data"
    found = shape(np.append(np.linspace(1, 0.1, 20), np.nan))
    assert (judge(found).word, found.nonfinite) == ("rate too large", 1)
    assert judge(shape(np.linspace(1, 3, 30))).word == "rate too large"


def test_slope_and_its_error_are_those_of_a_linear_regression() -> None:
    values = np.random.default_rng(0).normal(size=17) + 0.1 * np.arange(17)
    expected = stats.linregress(np.arange(17), values)
    assert line(values) == pytest.approx((expected.slope, expected.stderr), rel=1e-12)
    assert line(values[:2]) == (pytest.approx(values[1] - values[0]), None)
    assert line(values[:1]) == (None, None)


def test_what_smoothing_hides_digit_for_digit() -> None:
    steps = np.arange(1, 1001)
    clean = 2 * np.exp(-steps / 150) + 0.3 + 0.0008 * np.maximum(steps - 800, 0)
    loss = clean + 0.08 * noise(0, 1000)
    loss[600:605] += 3.0
    assert f"{loss[595:615].max():.2f}" == "3.52"
    for weight, highest, below in ((0.9, "1.55", "0.028"), (0.99, "0.54", "0.058")):
        found = smoothed(loss, weight)
        assert f"{found.corrected[595:615].max():.2f}" == highest
        assert f"{(clean - found.corrected)[899:].mean():.3f}" == below
        np.testing.assert_array_equal(found.raw, loss)
        assert len(found.spikes) == len(found.hidden) == 1, "five points next to each other are one spike"
        assert 600 <= found.spikes[0] <= 604
    assert f"{found.uncorrected[0]:.3f}" == "0.023"
    assert f"{found.corrected[0]:.3f}" == f"{loss[0]:.3f}" == "2.297"


@pytest.mark.parametrize("weight", [0.01, 0.5, 0.9, 0.999])
def test_averages_are_the_weighted_sums_they_stand_for(weight: float) -> None:
    values = noise(5, 40)
    found = smoothed(values, weight)
    for count in (1, 2, 17, 40):
        weights = (1 - weight) * weight ** np.arange(count)[::-1]
        assert found.uncorrected[count - 1] == pytest.approx((weights * values[:count]).sum(), rel=1e-10, abs=1e-12)
        assert found.corrected[count - 1] == pytest.approx(np.average(values[:count], weights=weights), rel=1e-10)


@pytest.mark.parametrize("weight", [0, 1, -0.5, 1.5, math.nan, "0.9"])
def test_a_weight_that_is_none_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigError, match="smoothing="):
        smoothed([1.0, 2.0], weight)


def test_a_light_average_hides_no_spike_and_noise_is_none() -> None:
    loss = 1 + 0.05 * noise(0, 500)
    assert len(spikes(loss)) == 0
    loss[[100, 300]] += [2, -2]
    loss[200] = math.nan
    assert spikes(loss).tolist() == [100, 300]
    assert smoothed(loss, 0.3).hidden.tolist() == []
    assert smoothed(loss, 0.9).hidden.tolist() == [100, 300]
    assert np.isnan(smoothed(loss, 0.9).corrected[200])


def test_the_running_median_is_the_median_of_the_window() -> None:
    values = noise(1, 120)
    found = running_median(values, 11)
    for place, half in ((0, 0), (3, 3), (60, 5), (117, 2), (119, 0)):
        assert found[place] == np.median(values[place - half : place + half + 1])
    assert len(running_median(values[:2], 11)) == 2


def test_a_steep_beginning_is_no_spike() -> None:
    for time in (0.5, 2, 8, 30):
        assert spikes(np.exp(-EPOCHS / time) + 0.01 * noise(0)).tolist() == []


def test_a_step_is_found_and_smooth_curves_and_noise_have_none() -> None:
    steps = np.arange(400)
    stair = np.where(steps < 150, 1.0, 0.4) + np.exp(-steps / 40) + 0.03 * noise(0, 400)
    (jump,) = jumps(stair)
    assert abs(jump.place - 150) <= 1
    assert jump.size == pytest.approx(-0.6, abs=0.05)
    for time in (2, 10, 50, 200):
        assert jumps(np.exp(-steps / time)) == ()
        assert jumps(np.exp(-steps / time) + 0.05 * noise(time, 400)) == ()
    spiky = 1 + 0.05 * noise(3, 400)
    spiky[200:204] += 3
    assert jumps(spiky) == ()


def test_a_step_at_a_change_of_the_learning_rate_is_explained(tmp_path: Path) -> None:
    steps = np.arange(400)
    loss = np.where(steps < 200, 1.0, 0.5) + np.exp(-steps / 40) + 0.05 * noise(0, 400)
    rate = np.where(steps < 200, 0.1, 0.01)
    warm = np.minimum(1e-3 * (steps + 1), 0.1)
    rows = scalar("loss", loss) + scalar("lr/0", rate) + scalar("lr/1", warm)
    (change,) = curves(recorded(tmp_path, *rows)).level_changes
    assert abs(change.step - 200) <= 1
    assert (change.cause, change.before, change.after) == ("lr/0", 0.1, 0.01)
    (note,) = [note for note in curves(recorded(tmp_path, *rows)).notes if "at one blow" in note]
    assert "lr/0 went from 0.1 to 0.01" in note
    alone = curves(recorded(tmp_path, *scalar("loss", loss)))
    assert alone.level_changes[0].cause is None
    assert any("no learning rate changed there" in note for note in alone.notes)


def test_validation_below_training_is_said_with_its_causes(tmp_path: Path) -> None:
    train = 2 * np.exp(-EPOCHS / 8) + 0.4
    found = of_pair(tmp_path, train, train - 0.1)
    (note,) = [note for note in found.notes if "below training" in note]
    assert "100%" in note
    assert "dropout" in note
    assert "means over steps" in note
    assert not any("below training" in note for note in of_pair(tmp_path, train, train + 0.1).notes)


def test_the_same_name_three_numbers_digit_for_digit(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(2000, 5))
    target = inputs @ np.array([1, -1, 0.5, 0, 2]) + 0.5 * rng.normal(size=2000)
    weights, batches = np.zeros(5), []
    for start in range(0, 2000, 20):
        x, y = inputs[start : start + 20], target[start : start + 20]
        error = x @ weights - y
        batches.append(float((error**2).mean()))
        weights -= 0.02 * 2 * x.T @ error / 20
    whole = float(((inputs @ weights - target) ** 2).mean())
    rows = [
        *scalar("loss", batches, kind="batch"),
        *scalar("loss", [np.mean(batches)], [99], [1.0], kind="epoch_mean"),
        *scalar("loss", [whole], [99], [1.0], kind="recomputed"),
    ]
    data = recorded(tmp_path, *rows)
    chosen, others = curve(data, "loss")
    assert (chosen.kind, f"{chosen.values[-1]:.3f}") == ("recomputed", "0.242")
    numbers = {other.kind: (f"{other.values.mean():.3f}", f"{other.values[-1]:.3f}") for other in others}
    assert numbers == {"epoch_mean": ("1.053", "1.053"), "batch": ("1.053", "0.295")}
    notes = curves(data).notes
    assert any("recomputed" in note for note in notes)
    assert any("batch" in note and "mean 1.053, last 0.295" in note for note in notes)
    assert curve(data, "loss", "batch")[0].steps.tolist() == list(range(100))
    with pytest.raises(ConfigError, match="unknown kind of loss mean"):
        curve(data, "loss", "mean")


def test_batches_are_averaged_from_one_validation_to_the_next(tmp_path: Path) -> None:
    losses = np.arange(100, dtype=float)
    rows = scalar("loss", losses) + scalar("val", [1.0, 2.0, 3.0], [9, 49, 99], kind="recomputed")
    points = curves(recorded(tmp_path, *rows), validation="val").points
    assert points.column_names == ["point", "step", "epoch", "train", "validation"]
    assert points["train"].to_pylist() == [losses[:10].mean(), losses[10:50].mean(), losses[50:].mean()]
    assert points["step"].to_pylist() == [9, 49, 99]
    means = scalar("loss", [5.0, 6.0, 7.0], [8, 48, 98], kind="epoch_mean")
    points = curves(recorded(tmp_path, *means, *rows[100:]), validation="val").points
    assert points["train"].to_pylist() == [5.0, 6.0, 7.0]


def test_epochs_bound_the_points_where_they_were_logged(tmp_path: Path) -> None:
    losses = np.exp(-np.arange(300) / 60)
    rows = scalar("loss", losses, epochs=[step // 20 + 0.5 for step in range(300)])
    points = curves(recorded(tmp_path, *rows)).points
    assert points.num_rows == 15
    assert points["train"][0].as_py() == pytest.approx(losses[:20].mean())
    assert curves(recorded(tmp_path, *scalar("loss", losses))).points.num_rows == 50


def test_validation_before_the_first_training_value_has_none_beside_it(tmp_path: Path) -> None:
    rows = scalar("loss", [2.0, 1.0], [5, 6]) + scalar("val", [3.0, 1.5], [0, 6])
    found = curves(recorded(tmp_path, *rows), validation="val")
    assert found.points["train"].to_pylist() == [None, 1.5]
    assert found.verdict.word == "not enough data"
    assert found.shape.gap == 0.0


def test_nan_losses_are_passed_over_and_counted(tmp_path: Path) -> None:
    train = 2 * np.exp(-EPOCHS / 8) + 0.3
    train[20] = math.inf
    found = of_pair(tmp_path, train, 2 * np.exp(-EPOCHS / 8) + 0.33)
    assert found.verdict.word == "healthy"
    assert found.shape.nonfinite == 1
    assert any("NaN or infinite" in note for note in found.notes)


def test_several_ranks_and_values_at_one_step_are_one_curve(tmp_path: Path) -> None:
    rows = scalar("loss", [1.0, 9.0, 2.0], [0, 0, 1])
    found, _ = curve(recorded(tmp_path, *rows), "loss")
    assert (found.steps.tolist(), found.values.tolist()) == ([0, 1], [9.0, 2.0])


def test_what_was_not_recorded_is_named(tmp_path: Path) -> None:
    data = recorded(tmp_path, *scalar("loss", [1.0, 2.0]), *scalar("val_loss", [1.0, 2.0]))
    with pytest.raises(ConfigError, match="unknown scalar los: did you mean loss"):
        curves(data, train="los")
    with pytest.raises(ConfigError, match="unknown scalar val/loss: did you mean val_loss"):
        curves(data, validation="val/loss")
    with pytest.raises(ConfigError, match="last=2"):
        curves(data, last=2)
    with pytest.raises(ConfigError, match="no scalars in run"):
        curves(written(tmp_path, {"events": {"kind": "note", "severity": "info", "message": "x"}}))


def test_json_has_what_was_judged(tmp_path: Path) -> None:
    found = of_pair(tmp_path, *FOUR["overfitting"][0]).to_json()
    assert found["verdict"] == "overfitting"
    assert (found["lowest_epoch"], found["points"], found["slope_points"]) == (26, 50, 10)
    assert found["train"] == {"name": "loss", "kind": None, "values": 50}
    assert found["smoothing"]["weight"] == 0.9


@pytest.mark.filterwarnings("error")
def test_a_loss_that_has_come_down_to_exactly_0_has_no_noise_to_judge_by() -> None:
    assert jumps(np.zeros(120)) == ()
    (jump,) = jumps(np.concatenate((np.zeros(60), np.ones(60))))
    assert (jump.place, jump.size) == (60, 1.0)


@pytest.mark.parametrize(
    "validations",
    [[*range(9, 200, 10), 205], [-1, *range(9, 200, 10)], range(0, 200, 2)],
    ids=["after", "before", "often"],
)
def test_a_validation_without_training_before_it_is_not_nan(tmp_path: Path, validations: Any) -> None:
    def loss(step: int) -> float:
        return 2 * math.exp(-step / 50) + 0.3

    works: list[dict[str, Any]] = [{"scalars": scalar_rows(step, loss=loss(step))} for step in range(0, 200, 3)]
    for step in validations:
        value = {"step": step, "time": 1.7e9, "name": ["val/loss"], "value": [loss(step) + 0.05]}
        works.append({"scalars": value})
    found = curves(written(tmp_path, *works), validation="val/loss")
    assert found.verdict.word == "healthy"
    assert found.shape.nonfinite == 0
    assert found.best_step == validations[-1], "the point counts, for what it has"
    assert not any("NaN" in note for note in found.notes)
    works[-2]["scalars"]["value"] = [math.nan]
    assert curves(written(tmp_path, *works), validation="val/loss").shape.nonfinite == 1

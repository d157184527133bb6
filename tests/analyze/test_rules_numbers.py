"""The numbers in findings, against what they say they are."""

from __future__ import annotations

import math
import random
import statistics
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from log_rows import scalar_rows
from torch import nn
from zoo_helpers import mlp, record, supervised, vectors

import statsbridge
from statsbridge.analyze.diagnosis import diagnose
from statsbridge.analyze.findings import Finding
from statsbridge.analyze.rules.loss import RunningMedian
from statsbridge.analyze.rules.ranking import ranked
from statsbridge.analyze.rules.underflow import around_the_least
from statsbridge.analyze.rules.words import FACTS, WORDS
from statsbridge.analyze.thresholds import Thresholds
from statsbridge.analyze.watch import Watch
from statsbridge.collect.histogram import histogram_of
from statsbridge.log.schema import to_table


def watched(thresholds: Thresholds | None = None, **courses: Any) -> dict[str, Finding]:
    """The findings, by kind, of scalars with these values from step 0 on."""
    watch = Watch(thresholds)
    length = len(next(iter(courses.values())))
    steps = [{name: float(values[step]) for name, values in courses.items()} for step in range(length)]
    rows = [to_table("scalars", scalar_rows(step, **values)) for step, values in enumerate(steps)]
    watch.add({"scalars": pa.concat_tables(rows)})
    return {finding.kind: finding for finding in watch.findings()}


EXTREMES = (0.0, -0.0, 1.0, -3.5, 1e308, -1e308, 5e-324, 1e160, 1e-170, math.inf, -math.inf, math.nan, None)


@pytest.mark.parametrize("seed", range(3))
def test_numbers_of_any_size_are_judged_without_a_warning(seed: int) -> None:
    """A training in float64 that diverges has such numbers, and the rules look on while it runs."""
    chance, watch = random.Random(seed), Watch()
    sites = ("activation", "activation_grad", "parameter", "parameter_grad", "update", "tensor")
    statistics = ("mean", "std", "min", "max", "abs_mean", "l2", "zero_fraction", "update_ratio", "kl_unit_gaussian")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(40):
            rows: dict[str, Any] = {
                "module": [name for _ in sites for name in "abc"],
                "type": [kind for _ in sites for kind in ("Linear", "ReLU", "Sigmoid")],
                "site": [site for site in sites for _ in "abc"],
                "tensor": ["weight" if "a" not in site[:2] else "" for site in sites for _ in "abc"],
                "depth": [0, 1, 2] * len(sites),
                "order": [0, 1, 2] * len(sites),
                "count": [chance.choice((0, 1, 10, 2**62)) for _ in range(3 * len(sites))],
                "nan_count": 0, "inf_count": 0, "call": 0, "step": step, "iteration": step, "time": 1.7e9,
            }  # fmt: skip
            rows |= {name: [chance.choice(EXTREMES) for _ in range(3 * len(sites))] for name in statistics}
            values = {name: chance.choice(EXTREMES[:-1]) for name in ("loss", "grad_norm", "lr/0")}
            watch.add({"stats": to_table("stats", rows), "scalars": to_table("scalars", scalar_rows(step, **values))})
        assert watch.findings()


# ---------------------------------------------------------------------- the loss


def test_the_running_median_is_that_of_the_last_values() -> None:
    values = np.random.default_rng(0).normal(size=200)
    running = RunningMedian(50)
    for end, value in enumerate(values, 1):
        running.add(value)
        last = values[max(0, end - 50) : end]
        assert running.median == pytest.approx(statistics.median(last.tolist()), abs=1e-15)
        low, high = np.quantile(last, [0.25, 0.75])
        assert running.spread == pytest.approx((high - low) / 1.349)


def noisy_course() -> np.ndarray:
    """The curve of notes/figures.md, "What smoothing hides": five spikes of 3 at 600, and a slow rise at the end."""
    steps = np.arange(1, 1001)
    loss = 2 * np.exp(-steps / 150) + 0.3 + 0.0008 * np.maximum(steps - 800, 0)
    loss += 0.08 * np.random.default_rng(0).normal(size=1000)
    loss[600:605] += 3
    return loss


def test_a_spike_is_found_at_its_step_and_noise_is_none() -> None:
    loss = noisy_course()
    found = watched(loss=loss)
    assert list(found) == ["loss_spike"]
    spike = found["loss_spike"]
    assert spike.step == 600
    assert spike.value == loss[600]
    assert spike.threshold == pytest.approx(3 * np.median(loss[550:600]))
    calm = loss.copy()
    calm[600:605] -= 3
    assert watched(loss=calm) == {}


def test_a_converged_loss_may_flicker_and_a_negative_one_is_judged_by_its_spread() -> None:
    noise = np.random.default_rng(1).exponential(size=500)
    assert watched(loss=np.concatenate((np.linspace(2, 1, 20), 1e-4 * noise))) == {}
    likelihood = -100 + np.random.default_rng(2).normal(size=300)
    likelihood[:20] += np.linspace(150, 0, 20)
    assert watched(loss=likelihood) == {}
    likelihood[250] = 300
    assert list(watched(loss=likelihood)) == ["loss_spike"]


def test_the_first_loss_against_the_logarithm_of_the_number_of_classes() -> None:
    found = watched(Thresholds(classes=10), loss=[4.0])["initial_loss"]
    assert found.threshold == pytest.approx(math.log(10))
    assert watched(Thresholds(classes=10), loss=[2.4]) == {}
    assert watched(loss=[4.0]) == {}


def test_a_loss_that_does_not_fall_and_one_that_falls_slowly() -> None:
    noise = 0.03 * np.random.default_rng(3).normal(size=200)
    found = watched(loss=2 + noise)["loss_not_decreasing"]
    assert found.step == 0
    assert watched(loss=2 + noise - np.linspace(0, 1.5, 200)) == {}
    assert watched(loss=(2 + noise)[:100]) == {}
    assert list(watched(loss=np.full(30, 0.5))) == ["loss_flat"]


def test_a_loss_that_comes_down_to_guessing_has_not_fallen() -> None:
    noise = 0.01 * np.random.default_rng(3).normal(size=200)
    course = math.log(4) + 0.08 * np.exp(-np.arange(200) / 8) + noise
    assert watched(loss=course) == {}
    found = watched(Thresholds(classes=4), loss=course)["loss_not_decreasing"]
    assert found.threshold == pytest.approx(0.99 * math.log(4))
    assert "guesses among all classes has 1.386" in found.message
    assert watched(Thresholds(classes=4), loss=course - np.linspace(0, 0.3, 200)) == {}
    # What begins far below (a model that was trained before) is judged by where it began.
    assert "loss_not_decreasing" not in watched(Thresholds(classes=4), loss=course - 1 - np.linspace(0, 0.2, 200))


def test_a_hinge_loss_at_its_floor_may_jump_and_a_norm_may_come_back() -> None:
    generator = np.random.default_rng(7)
    course = np.concatenate((np.linspace(0.4, 0, 30), np.zeros(200)))
    course[[120, 180, 210]] = 0.3 * generator.random(3)
    norms = np.concatenate((np.linspace(0.5, 0.01, 30), np.zeros(200)))
    norms[[120, 180, 210]] = 0.2
    assert watched(loss=course, grad_norm=norms) == {}
    course[190], norms[190] = 3.0, 60.0
    assert set(watched(loss=course, grad_norm=norms)) == {"loss_spike", "exploding_gradient"}


def test_a_loss_that_had_fallen_does_not_stand_still_from_the_start() -> None:
    noise = np.random.default_rng(3).normal(0, 0.001, 400)
    course = np.where(np.arange(400) < 200, np.geomspace(2.3, 0.1, 400), 30.0) + noise
    found = watched(loss=course)["loss_not_decreasing"]
    assert 200 <= found.step <= 201
    assert watched(loss=2.3 + noise)["loss_not_decreasing"].step == 0


def test_swinging_is_not_noise() -> None:
    swing = np.where(np.arange(90) % 2, 1.0, 0.5) + 0.02 * np.random.default_rng(4).normal(size=90)
    swing[:10] += 1  # it fell at first
    assert "loss_oscillating" in watched(loss=swing)
    for seed in range(5):
        noise = np.random.default_rng(seed).uniform(0.5, 1.0, size=1000)
        noise[:10] += 1
        assert watched(loss=noise) == {}


# ---------------------------------------------------------------------- the gradient norm


def test_a_training_that_begins_with_nothing_to_learn_does_not_explode_as_it_begins() -> None:
    course = np.concatenate((np.zeros(30), np.linspace(0, 1, 20) ** 2, np.ones(60))) + 0.0
    assert not {"exploding_gradient", "loss_spike"} & watched(loss=course, grad_norm=course).keys()
    course[100] = 1000
    assert {"exploding_gradient", "loss_spike"} <= watched(loss=course, grad_norm=course).keys()


def test_swinging_is_seen_whatever_the_size_of_the_loss() -> None:
    swings = (-1.0) ** np.arange(90)
    for size in (1e-150, 1.0, 1e160, 8e307):  # a diverging training in float64 comes by all of the last ones
        found = watched(loss=size * (1 + 0.5 * swings))
        assert found["loss_oscillating"].step == 29
        assert f"their mean {size:.4g} than" in found["loss_oscillating"].message


def test_a_clipping_value_from_the_healthy_part_and_how_many_steps_it_would_have_clipped() -> None:
    healthy = np.random.default_rng(5).lognormal(0, 0.3, size=100)
    norms = np.concatenate((healthy, [1e3, 1e4, 1e5, math.nan]))
    found = watched(grad_norm=norms)["exploding_gradient"]
    assert (found.step, found.severity) == (100, "critical")
    value = np.percentile(healthy, 95)
    clipped = int((healthy > value).sum()) + 3
    assert found.suggestions[0] == (
        f"clip the gradient norm at {value:.3g} (95 % of the 100 norms before lie below): {clipped} of 104 steps would "
        "have been clipped"
    )


def test_one_large_norm_is_a_warning_and_three_are_an_explosion() -> None:
    calm = np.full(40, 1.0)
    once = watched(grad_norm=np.concatenate((calm, [500.0], calm)))["exploding_gradient"]
    assert (once.severity, once.step, once.value) == ("warning", 40, 500.0)
    assert watched(grad_norm=np.concatenate((calm, [90.0], calm))) == {}


def test_a_norm_at_the_very_start_does_not_hide_later_explosions_for_ever() -> None:
    norms = np.abs(1 + 0.1 * np.random.default_rng(5).normal(size=2000))
    norms[1] = 1e6
    assert watched(grad_norm=norms) == {}
    soon, later = norms.copy(), norms.copy()
    soon[500:510] = later[1500:1510] = 1e5
    assert watched(grad_norm=soon) == {}
    found = watched(grad_norm=later)["exploding_gradient"]
    assert (found.step, found.severity) == (1500, "critical")
    # A hinge loss, whose norm is mostly 0 in the end, comes back to what it was at first however late.
    hinge = np.where(np.arange(4000) % 700 < 699, 0.0, 3.0)
    hinge[:100] = 1.0
    hinge[50] = 5.0
    assert watched(grad_norm=hinge) == {}


def test_many_norms_are_thinned_out_and_the_count_says_so() -> None:
    norms = np.concatenate((np.full(4500, 1.0), [1e3, 1e4, 1e5]))
    suggestion = watched(grad_norm=norms)["exploding_gradient"].suggestions[0]
    assert "about" in suggestion
    assert "of 4,503 steps" in suggestion


# ---------------------------------------------------------------------- numbers of modules


def found_in(model: nn.Module, folder: Path, **settings: Any) -> dict[str, Finding]:
    run = record(supervised(model, vectors()), folder, steps=8, **settings)
    return {finding.kind: finding for finding in diagnose(statsbridge.load(run))}


def test_the_share_of_dead_units_is_counted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp(16, 64, 64, 4)
    with torch.no_grad():
        model[2].bias[:56] = -30.0
    found = found_in(model, tmp_path)["dead_units"]
    assert found.value == 56 / 64
    assert (found.module, found.type, found.depth, found.step) == ("3", "ReLU", 4, 0)


@pytest.mark.parametrize(("activation", "slope"), [(nn.Sigmoid, 0.25), (nn.Tanh, 1.0)])
def test_saturation_is_the_mean_slope(activation: type[nn.Module], slope: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp(16, 32, 32, 4, activation=activation)
    with torch.no_grad():
        model[2].weight.mul_(300)
    inputs = next(iter(vectors()))[0]
    middle = model[2](model[1](model[0](inputs))).detach().double().requires_grad_()
    activation()(middle).sum().backward()
    expected = float(middle.grad.mean()) / slope
    assert expected < 0.05
    run = record(supervised(model, vectors(), optimizer=torch.optim.SGD(model.parameters(), 1e-9)), tmp_path, steps=1)
    found = diagnose(statsbridge.load(run), thresholds={"persistence": 1})
    saturated = next(finding for finding in found if finding.kind == "saturated")
    assert saturated.value == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_the_elements_next_to_the_smallest_number_of_float16() -> None:
    generator = np.random.default_rng(6)
    values = np.exp2(generator.uniform(-40, 3, size=(3, 4000))) * generator.choice([-1, 1], size=(3, 4000))
    values[:, :100] = 0
    counts = [histogram_of(row) for row in values]
    column = pa.chunked_array([pa.array([counts[0].tolist(), None, counts[1].tolist(), counts[2].tolist()])])
    found = around_the_least(column)
    size = np.abs(values)
    for name, expected in (
        ("below", ((size > 0) & (size < 2.0**-24)).sum(1)),
        ("least", ((size >= 2.0**-24) & (size < 2.0**-22)).sum(1)),
        ("nonzero", (size > 0).sum(1)),
    ):
        assert found[name][[0, 2, 3]].tolist() == expected.tolist()
        assert np.isnan(found[name][1])


def test_a_mask_of_infinities_is_meant(tmp_path: Path) -> None:
    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(torch.eye(*x.shape, dtype=torch.bool), -torch.inf)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), Mask(), nn.Softmax(1), nn.Linear(64, 4))
    assert found_in(model, tmp_path) == {}


def test_the_gradient_of_a_bias_before_a_batch_norm_is_only_rounding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        model[0].bias.fill_(8.0)
    run = record(supervised(model, vectors(), optimizer=torch.optim.SGD(model.parameters(), lr=0.01)), tmp_path)
    data = statsbridge.load(run)
    unmoved = data.series("0", "update", "zero_fraction", tensor="bias")["value"].to_pylist()
    assert min(unmoved) > 0.9
    assert [finding.kind for finding in diagnose(data)] == []


def test_attention_does_its_work_itself_though_it_has_children(tmp_path: Path) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.head = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x[:, None, :].expand(-1, 3, -1)
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    torch.manual_seed(0)
    model = Attending()
    with torch.no_grad():
        model.attention.out_proj.weight.mul_(1e9)
    found = found_in(model, tmp_path)["exploding_activation"]
    assert (found.module, found.type) == ("attention", "MultiheadAttention")


def test_a_parameter_of_the_whole_model_is_not_nearest_to_the_cut(tmp_path: Path) -> None:
    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(16))
            self.body = mlp(16, 32, 32)
            self.head = nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x + self.offset).detach())

    torch.manual_seed(0)
    found = found_in(Offset(), tmp_path)["no_gradient"]
    assert (found.module, found.following) == ("body.2", 2)


def test_models_in_a_dict_without_depth_are_judged_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp(16, 32, 32, 4)
    with torch.no_grad():
        model[2].bias.fill_(-20.0)
    training = supervised(model, vectors())
    run = record(type(training)({"net": model}, training.step), tmp_path, steps=8, order="execution")
    found = {finding.kind: finding for finding in diagnose(statsbridge.load(run))}
    assert found["dead_units"].module == "net.3"
    assert found["dead_units"].depth is None


# ---------------------------------------------------------------------- order and words


def finding(kind: str, step: int, severity: Any = "critical", **rest: Any) -> Finding:
    return Finding(kind=kind, severity=severity, step=step, message="", **rest)


def test_the_first_cause_comes_first() -> None:
    given = [
        finding("nonfinite_loss", 10),
        finding("nonfinite_gradient", 10),
        finding("loss_spike", 9, "warning"),
        finding("nonfinite_activation", 10),
        finding("dead_units", 30),
        finding("update_too_large", 2, "warning"),
        finding("unused_module", 0, "info"),
    ]
    assert [one.kind for one in ranked(reversed(given))] == [
        "update_too_large",
        "unused_module",
        "nonfinite_activation",
        "nonfinite_loss",
        "nonfinite_gradient",
        "dead_units",
        "loss_spike",
    ]


@pytest.mark.parametrize(("dead", "collapsed"), [(12, 13), (13, 12)])
def test_of_activations_that_fail_in_one_step_the_shallower_is_the_cause(dead: int, collapsed: int) -> None:
    given = [finding("collapsed_activation", 0, depth=collapsed), finding("dead_units", 0, depth=dead)]
    for findings in (given, given[::-1]):
        assert [one.depth for one in ranked(findings)] == [12, 13]


def test_what_comes_later_explains_nothing() -> None:
    kinds = [one.kind for one in ranked([finding("loss_spike", 5, "warning"), finding("update_too_large", 9)])]
    assert kinds == ["update_too_large", "loss_spike"]
    kinds = [one.kind for one in ranked([finding("nonfinite_loss", 5), finding("update_too_large", 9)])]
    assert kinds == ["nonfinite_loss", "update_too_large"]


SPENT = ("dead_units", "saturated", "collapsed_activation", "identical_outputs", "zero_gradient", "vanishing_gradient")


@pytest.mark.parametrize("kind", SPENT)
def test_what_becomes_of_a_network_that_finds_nothing_to_learn_is_no_cause_of_it(kind: str) -> None:
    stands = finding("loss_not_decreasing", 0, "warning")
    for onset, order in ((5, [kind, stands.kind]), (60, [stands.kind, kind])):
        given = [stands, finding(kind, onset)]
        for findings in (given, given[::-1]):
            assert [one.kind for one in ranked(findings)] == order


def test_every_kind_has_words_and_facts_are_kinds() -> None:
    for words in WORDS.values():
        assert words.title
        assert words.causes
        assert words.suggestions
    assert set(WORDS) >= FACTS - {"optimizer_step_skipped"}

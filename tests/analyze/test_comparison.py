"""A planted fault is where a run parts from a good one, and another seed of a healthy training does not part."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison_helpers import Perceptron, train
from log_rows import new_run, stats_rows, write_run
from torch import nn

import statsbridge
from statsbridge.analyze.comparison import Comparison, compare
from statsbridge.errors import ConfigError

STEPS = 24


def alter(name: str, change: Callable[[torch.Tensor], object]) -> Callable[[nn.Module], None]:
    def plant(model: nn.Module) -> None:
        with torch.no_grad():
            change(model.get_parameter(name))

    return plant


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path_factory.mktemp("compared")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def good(folder: Path) -> list[statsbridge.RunData]:
    return [train(folder, Perceptron, seed, steps=STEPS) for seed in range(3)]


def one(good: statsbridge.RunData | list[statsbridge.RunData], other: statsbridge.RunData) -> Comparison:
    (found,) = compare(good, other)
    return found


def test_other_seeds_do_not_part(good: list[statsbridge.RunData]) -> None:
    for run in good:
        others = [other for other in good if other is not run]
        for found in compare(run, *others):
            assert found.partings == ()
            assert found.steps == (0, STEPS - 2)
        assert one(others, run).partings == (), "nor from two good runs"
        assert one(run, run).settings == ()


@pytest.mark.parametrize("at", [0, 11])
@pytest.mark.parametrize(
    ("plant", "site"),
    [
        (alter("layers.2.weight", lambda weight: weight.mul_(30)), "parameter"),
        (alter("layers.2.weight", lambda weight: weight.zero_()), "parameter"),
        (alter("layers.2.bias", lambda bias: bias.fill_(-100.0)), "parameter"),
        (lambda model: model.get_submodule("layers.2").requires_grad_(False), "parameter_grad"),
    ],
    ids=["scaled", "zero", "dead", "frozen"],
)
def test_a_fault_in_one_module_is_found_there(
    folder: Path, good: list[statsbridge.RunData], plant: Callable[[nn.Module], None], site: str, at: int
) -> None:
    other = train(folder, Perceptron, 7, plant=plant, at=at, steps=STEPS)
    for measure in (good[0], good):
        first = one(measure, other).first
        assert first is not None
        assert (first.module, first.site) == ("layers.2", site)
        assert first.step == (at + 1) // 2 * 2, "the first sampled step from the fault on"
        assert first.type == "Linear"


def test_a_nan_is_found_in_the_module_it_began_in(folder: Path, good: list[statsbridge.RunData]) -> None:
    def plant(model: nn.Module) -> None:
        model.get_submodule("layers.1").register_forward_hook(lambda module, inputs, output: output * math.nan)

    other = train(folder, Perceptron, 7, plant=plant, at=12, steps=STEPS)
    found = one(good[0], other)
    # A hook of the user's that replaces an output runs after ours: what reads it shows first.
    (parting,) = [one for one in found.partings if one.site == "activation" and one.kind == "not finite"]
    assert (parting.module, parting.step) == ("relu", 12)


def test_a_learning_rate_is_seen_at_once_and_named(folder: Path, good: list[statsbridge.RunData]) -> None:
    other = train(folder, Perceptron, 7, lr=0.3, steps=STEPS)
    found = one(good[0], other)
    assert found.first is not None
    assert (found.first.site, found.first.step, found.first.module) == ("update", 0, "layers.0")
    assert [(setting.name, setting.good, setting.other) for setting in found.settings] == [("config.lr", (0.003,), 0.3)]
    assert json.loads(json.dumps(found.to_json()))["partings"][0]["step"] == 0


def made(
    folder: Path, steps: range, *, config: dict[str, object] | None = None, **columns: object
) -> statsbridge.RunData:
    """A run of five modules, `columns` of `stats` as functions of the step."""
    run = statsbridge.log.create_run(folder, name=None, config=config, information={})
    works = []
    for step in steps:
        own = {name: value(step) if callable(value) else value for name, value in columns.items()}
        numbers = {name: [1.0] * 5 for name in ("std", "abs_mean", "min", "max", "l2", "zero_fraction")}
        works.append({"stats": stats_rows(step, 5, **{**numbers, **own})})
    write_run(run, *works)
    return statsbridge.load(run)


def test_a_number_has_parted_after_three_steps_outside(tmp_path: Path) -> None:
    good = made(tmp_path, range(12))

    def other(outside: set[int]) -> Comparison:
        return one(
            good, made(tmp_path, range(12), l2=[1.0] * 5, std=lambda step: [1, 1, 50.0 if step in outside else 1, 1, 1])
        )

    assert other({4}).first is None
    assert other({4, 5}).first is None
    found = other({2, 4, 5, 6}).first
    assert found is not None
    assert (found.step, found.module, found.statistic, found.value) == (4, "m2", "std", 50.0)
    assert (found.low, found.high) == (0.2, 5.0)
    assert (found.kind, found.modules) == ("outside", 1)
    assert other({11}).first is None, "one step at the end is not enough"
    assert other({10, 11}).first is not None, "two are"


def test_backward_the_module_nearest_to_the_loss_comes_first(tmp_path: Path) -> None:
    good = made(tmp_path, range(6), site="activation_grad")
    other = made(tmp_path, range(6), site="activation_grad", l2=[1e-9, 1e-9, 1e-9, 1.0, 1.0])
    first = one(good, other).first
    assert first is not None
    assert (first.module, first.modules) == ("m2", 3)


def test_several_good_runs_widen_the_range(tmp_path: Path) -> None:
    good = [made(tmp_path, range(6)), made(tmp_path, range(6), std=[1.0, 1.0, 20.0, 1.0, 1.0])]
    other = made(tmp_path, range(6), std=[1.0, 1.0, 8.0, 1.0, 1.0])
    assert one(good[0], other).first is not None
    assert one(good, other).first is None
    assert one(good[0], made(tmp_path, range(6), std=[4.0] * 5)).first is None
    (narrow,) = compare(good[0], made(tmp_path, range(6), std=[4.0] * 5), factor=2)
    assert narrow.first is not None


def test_what_was_set_differently_and_modules_of_one_side(tmp_path: Path) -> None:
    good = made(tmp_path, range(4), config={"lr": 0.1, "model": {"width": 8, "depth": 2}, "seed": 1})
    other = made(tmp_path, range(4), config={"lr": 0.1, "model": {"width": 16, "depth": 2}, "note": "x"})
    found = one(good, other)
    assert [(setting.name, setting.good, setting.other) for setting in found.settings] == [
        ("config.model.width", (8,), 16),
        ("config.note", (None,), "x"),
        ("config.seed", (1,), None),
    ]
    assert (found.only_good, found.only_other) == ((), ())
    assert found.first is None


def test_steps_after_the_good_run_are_not_compared(tmp_path: Path) -> None:
    good = made(tmp_path, range(6))
    other = made(tmp_path, range(20), std=lambda step: [1.0 if step < 8 else 100.0] * 5)
    found = one(good, other)
    assert (found.first, found.steps) == (None, (0, 5))
    apart = one(good, made(tmp_path, range(50, 60)))
    assert (apart.first, apart.steps) == (None, None)


def test_what_one_of_the_good_runs_has_not_either_is_not_missed(folder: Path, good: list[statsbridge.RunData]) -> None:
    def freeze(model: nn.Module) -> None:
        model.get_submodule("layers.0").requires_grad_(False)

    frozen = [train(folder, Perceptron, seed, plant=freeze, steps=STEPS) for seed in (11, 12)]
    assert [parting.kind for parting in one(good[0], frozen[1]).partings if parting.module == "layers.0"] == [
        "missing",
        "missing",
    ]
    for several in ([good[0], frozen[0]], [frozen[0], good[0]]):
        assert "missing" not in [parting.kind for parting in one(several, frozen[1]).partings]


def test_a_site_of_which_nothing_was_recorded_has_parted(folder: Path, good: list[statsbridge.RunData]) -> None:
    torch.manual_seed(3)
    model = Perceptron()
    optimizer = torch.optim.Adam(Perceptron().parameters())  # of another copy of the model
    with statsbridge.init(model, dir=folder, every=2) as run:
        for _ in range(8):
            optimizer.zero_grad()
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(0, 4, (32,)))
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
    found = one(good, statsbridge.load(run.path))
    missing = [parting for parting in found.partings if parting.kind == "missing"]
    assert [(parting.step, parting.site, parting.statistic, parting.modules) for parting in missing] == [
        (0, "update", "update_ratio", 8)
    ]
    with statsbridge.init(model, dir=folder, every=2, sites=("activation", "parameter")) as run:
        for _ in range(8):
            model(torch.randn(32, 16))
            run.step()
    asked = one(good, statsbridge.load(run.path))
    assert "missing" not in [parting.kind for parting in asked.partings], "of what was not asked for nothing is missed"


def test_what_was_not_asked_for_is_not_missed(folder: Path, good: list[statsbridge.RunData]) -> None:
    def recorded(**chosen: Any) -> statsbridge.RunData:
        torch.manual_seed(0)
        model = Perceptron()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        with statsbridge.init(model, dir=folder, every=2, **chosen) as run:
            for _ in range(8):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(0, 4, (32,)))
                loss.backward()
                optimizer.step()
                run.step(loss=loss)
        return statsbridge.load(run.path)

    for chosen in ({"modules": "layers.1"}, {"statistics": ("mean", "std")}):
        assert one(good, recorded(**chosen)).partings == ()


def test_what_is_missing_after_the_good_run_is_not_compared(tmp_path: Path) -> None:
    runs = []
    for first, modules in ((0, ["m0", "m1", "m1"]), (3, ["m0", "m0", "m1"]), (50, ["m0", "m0", "m1"])):
        sites = ["activation", "activation" if modules[1] == "m1" else "update", "parameter"]
        runs.append(new_run(tmp_path))
        rows = [stats_rows(first + step, 3, module=modules, site=sites) for step in range(6)]
        write_run(runs[-1], *({"stats": one_step} for one_step in rows))
    good, within, after = (statsbridge.load(run) for run in runs)
    assert [(parting.kind, parting.module) for parting in one(good, within).partings if parting.kind == "missing"] == [
        ("missing", "m1")
    ]
    assert one(good, after).partings == ()


def test_wrong_input_is_refused(tmp_path: Path) -> None:
    good = made(tmp_path, range(3))
    with pytest.raises(ConfigError, match="at least one other"):
        compare(good)
    with pytest.raises(ConfigError, match="at least one good run"):
        compare([], good)
    with pytest.raises(ConfigError, match="factor=0"):
        compare(good, good, factor=0)
    with pytest.raises(ConfigError, match="unknown statistic stdd"):
        compare(good, good, statistics={"activation": ["stdd"]})
    empty = new_run(tmp_path)
    write_run(empty, {"scalars": {"step": 0, "name": "loss", "value": 1.0}})
    assert one(good, statsbridge.load(empty)).steps is None


@pytest.mark.parametrize("config", ["text", [1], 7])
def test_a_config_that_is_no_mapping_has_no_settings(config: object, tmp_path: Path) -> None:
    """As where somebody has written into `run.json`."""
    good = made(tmp_path, range(4), config={"lr": 0.1})
    other = made(tmp_path, range(4))
    file = Path(other.path, "run.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "config": config}))
    found = one(good, statsbridge.load(other.path))
    assert [(setting.name, setting.other) for setting in found.settings] == [("config.lr", None)]

"""Wrong arguments: an error at the call that caused it, which says what to do."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recording import Small, events, rows, scalars
from torch import nn

import statsbridge
from statsbridge import ConfigError, Sampling, StatsBridgeError, StatsBridgeWarning, UnknownBackendError
from statsbridge.collect.sampling import LARGEST_LABEL
from statsbridge.log.runs import run_state

Record = Callable[..., statsbridge.Run]


class FolderInBytes:
    """A path as `os.fspath` gives it for `os.scandir(b".")`."""

    def __fspath__(self) -> bytes:
        return b"runs"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("resnet", "model is a str: give a torch.nn.Module, or a dict"),
        (None, "model is a NoneType"),
        (torch.zeros(3), "model is a torch.Tensor"),
        ({}, "empty dict"),
        ({"generator": 3}, r"model\['generator'\] is a int"),
        ({"a.b": nn.Linear(1, 1)}, "'a.b' cannot name a model"),
        ({1: nn.Linear(1, 1)}, "1 cannot name a model"),
    ],
)
def test_a_model_that_is_none(model: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        statsbridge.init(model, dir=tmp_path)
    assert list(tmp_path.iterdir()) == [], "an init() that fails leaves no run behind"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every=0: give a whole number of at least 1"),
        ({"every": "often"}, "every='often'"),
        ({"sites": "activations"}, "sites: 'activations' matches none of activation, .*did you mean 'activation'"),
        ({"sites": []}, "sites="),
        ({"sites": 3}, "sites=3"),
        ({"statistics": ["mean", "median"]}, "statistics: 'median' matches none of mean, std"),
        ({"modules": "frist"}, "modules: 'frist' matches none of the model's 5 modules, such as 'first'"),
        ({"order": "random"}, "order='random': give one of 'auto', 'fx', 'execution'"),
        ({"flush_interval": 0}, "flush_interval=0"),
        ({"flush_interval": "fast"}, "flush_interval='fast'"),
        ({"start_step": 1.5}, "start_step=1.5"),
        ({"start_step": 2**63}, "start_step=9223372036854775808: give one of at most"),
        ({"name": ""}, "name=''"),
        ({"config": [1]}, "config is a list: give a dict"),
        ({"backend": 7}, "backend=7"),
        ({"backend": []}, "backend="),
        ({"optimizer": "adam"}, "optimizer is a str"),
        ({"optimizer": {"main": "adam"}}, "optimizer is a str"),
        ({"every": 10**5000}, "every=int: give a whole number of at most 9223372036854775807"),
        ({"start_step": 10**5000}, "start_step=int: give one of at most"),
        ({"order": np.array(["auto", "fx"])}, r"order=array\(\['auto', 'fx'\].*: give one of 'auto'"),
        ({"flush_interval": 10**400}, "flush_interval=10000.*: give a number of seconds above 0"),
        ({"flush_interval": 1e10}, r"flush_interval=10000000000.0: give at most \d+ seconds"),
        ({"flush_interval": math.nan}, "flush_interval=nan"),
        ({"flush_interval": True}, "flush_interval=True"),
        ({"max_bytes": 10**400}, "max_bytes=10000.*: give a number of bytes above 0"),
        ({"max_bytes": 0.5}, "max_bytes=0.5: give a number of bytes above 0"),
        ({"name": b"run"}, "name=b'run': give a text"),
        ({"resume": FolderInBytes()}, "resume=<.*: give a run's folder"),
        ({"resume": " ", "start_step": 0}, "resume=' ': give a run's folder"),
        ({"resume": "a\0b", "start_step": 0}, r"resume='a\\x00b': give a run's folder"),
        ({"alerts": {"loss_spike": 10**400}}, r"threshold loss_spike=1000.*: give a smaller number"),
        ({"alerts": {"persistence": 10**5000}}, "threshold persistence=int: give a smaller number"),
        ({"alerts": {"loss_spike": math.nan}}, "threshold loss_spike=nan"),
        ({"alerts": 1}, "alerts=1: give True, False, a Thresholds or a mapping"),
        ({"mirror": {}}, "mirror is a dict: give a statsbridge.Selection"),
        ({"grad_scaler": 3}, "grad_scaler is a int: give the torch.amp.GradScaler in use, or None"),
        ({"grad_scaler": torch.amp.GradScaler}, "grad_scaler is a type: give the torch.amp.GradScaler"),
        ({"optimizer": {"": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)}}, "optimizer: an empty name"),
        ({"optimizer": torch.tensor(3)}, "optimizer is a torch.Tensor"),
        ({"backend": b"local"}, "backend=b'local': give a name such as 'local'"),
        ({"backend": torch.tensor(3)}, r"backend=tensor\(3\): give a name such as 'local'"),
        (
            {"backend": {"mlflow": "http://host:5000"}},
            r"backend=\{'mlflow': .*: give a name such as 'local', 'name:target'",
        ),
        *(
            ({name: value}, f"{name}={value!r}: give True or False".replace("[", r"\["))
            for name in ("restricted", "histograms", "eval")
            for value in ("x", "", 1, 0, None, [], math.nan)
        ),
    ],
)
def test_a_setting_that_is_wrong(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        statsbridge.init(Small(), dir=tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", [None, 3, True, 1.5, "", " ", b"runs", FolderInBytes(), "a\0b", "\ud800"])
def test_a_folder_that_is_none(folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"dir=.*: (give the path of a folder, such as|no folder can have this name)"):
        statsbridge.init(Small(), dir=folder)
    assert list(tmp_path.iterdir()) == []


def test_a_backend_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        UnknownBackendError, match=r"'mlfow'.*did you mean 'mlflow'\?.*Installed: local, .*mlflow"
    ) as raised:
        statsbridge.init(Small(), backend="mlfow", dir=tmp_path)
    assert "statsbridge[mlflow]" in str(raised.value)
    assert "statsbridge[mlfow]" not in str(raised.value), "there is no such extra"
    with pytest.raises(StatsBridgeError, match="'wand'"):
        statsbridge.init(Small(), backend=["local", "wand"], dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_settings_from_numpy_and_other_libraries(record: Record) -> None:
    """What argparse, NumPy and YAML make of a setting counts as what it is."""
    model = Small()
    optimizers = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.first, model.second))
    run = record(
        model,
        every=np.int8(100),
        start_step=np.int64(250),
        optimizer=optimizers,
        grad_scaler=torch.amp.GradScaler("cpu", enabled=False),
        restricted=np.False_,
        histograms=np.True_,
        eval=np.False_,
        alerts=np.False_,
        flush_interval=np.float32(0.5),
        max_bytes=np.int64(10**9),
        name=np.str_("numbers"),
        sites=np.array(["activation"]),
    )
    for _ in range(60):
        with torch.set_grad_enabled(True):
            model(torch.randn(4, 8)).sum().backward()
        run.step(loss=1.0)
    run.finish()
    data = statsbridge.load(run.path)
    assert {row["step"] for row in rows(data)} == {300}
    assert all(row["histogram"] for row in rows(data, module="first"))
    assert data.info["restricted"] is False
    assert data.events.num_rows == 0


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"optimizer SGD holds none of the model's parameters: make it from"):
        statsbridge.init(Small(), optimizer=optimizer, dir=tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"cannot write a run into .*file"):
        statsbridge.init(Small(), dir=tmp_path / "file")
    with pytest.raises(ConfigError, match="/proc"):
        statsbridge.init(Small(), dir="/proc/statsbridge")


def test_fx_says_what_it_cannot_trace(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if x.sum() > 0 else x

    with pytest.raises(ConfigError, match='order="auto"'):
        statsbridge.init(Branching(), order="fx", dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [3, 2, 3.5, 4.0, "7", True, 2**63, 10**30])
def test_a_bad_label_inside_the_loop(bad: object, record: Record) -> None:
    model = nn.Linear(2, 2)
    run = record(model)
    labels = [3, bad, None, 10]
    for label in labels[:1]:
        run.step(loss=1.0, step=label)  # type: ignore[arg-type]
    with pytest.warns(StatsBridgeWarning, match="recorded as step 4") as warned:
        run.step(loss=2.0, step=bad)  # type: ignore[arg-type]
        run.step(loss=2.5, step=bad)  # type: ignore[arg-type]
    assert len(warned) == 1
    run.step(loss=3.0)
    run.step(loss=4.0, step=10)
    run.finish()
    data = statsbridge.load(run.path)
    assert scalars(data.scalars, "loss") == {3: 1.0, 4: 2.0, 5: 2.5, 6: 3.0, 10: 4.0}
    told = events(data, "bad_step_label")
    assert [event["step"] for event in told] == [4, 5]
    assert all(repr(bad) in event["message"] for event in told)


@pytest.mark.parametrize("first", [0, -LARGEST_LABEL])
def test_what_happens_after_the_largest_label_is_recorded(first: int, record: Record) -> None:
    """The step in progress is expected as far from the last label as that was from the one before."""
    run = record(nn.Linear(2, 2))
    run.step(loss=1.0, step=first)
    run.step(loss=2.0, step=LARGEST_LABEL)
    run._reporter.event("test", "in the step after it", severity="info")
    run.step(loss=3.0)
    run.finish()
    data = statsbridge.load(run.path)
    assert scalars(data.scalars, "loss") == {first: 1.0, LARGEST_LABEL: 2.0, LARGEST_LABEL + 1: 3.0}
    assert [event["kind"] for event in data.events.to_pylist()] == ["test"]


def test_values_that_are_no_numbers(record: Record) -> None:
    run = record(nn.Linear(2, 2))
    with pytest.warns(StatsBridgeWarning) as warned:
        run.step(loss=torch.zeros(3), good=1.5, text="high", nothing=None, pair=torch.tensor(1j))
    assert len(warned) == 4
    run.log({"val/loss": torch.tensor(2.0), "flag": True})
    run.finish()
    data = statsbridge.load(run.path)
    assert {e["message"].split("=")[0] for e in events(data, "bad_scalar")} == {"loss", "text", "nothing", "pair"}
    assert scalars(data.scalars, "good") == {0: 1.5}
    assert scalars(data.scalars, "val/loss") == {0: 2.0}
    assert scalars(data.scalars, "flag") == {0: 1.0}


def test_a_label_that_no_column_holds_is_none_for_log(record: Record) -> None:
    run = record(nn.Linear(2, 2))
    run.step(loss=1.0, step=5)
    with pytest.warns(StatsBridgeWarning, match="too large"):
        run.log({"val/loss": 0.5}, step=2**64)
    run.finish()
    assert scalars(statsbridge.load(run.path).scalars, "val/loss") == {5: 0.5}


class Speechless:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(30, 40), "x=Tensor of shape (30, 40) is no"),
        ([0.5] * 10_000, "x=[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ...] (list) is no"),
        ("a" * 10_000, "(str) is no"),
        (Speechless(), "(Speechless) is no"),
    ],
)
def test_a_value_that_is_no_number_is_told_in_a_few_words(value: object, said: str, record: Record) -> None:
    """What is in a tensor would have to be waited for; and what cannot be shown costs nothing but itself."""
    run = record(nn.Linear(2, 2))
    with pytest.warns(StatsBridgeWarning, match="x="):
        run.step(x=value, other=1.0)
    run.finish()
    data = statsbridge.load(run.path)
    [event] = events(data, "bad_scalar")
    assert said in event["message"]
    assert len(event["message"]) < 250
    assert scalars(data.scalars, "other") == {0: 1.0}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_value_that_cannot_be_shown_costs_nothing_but_itself(record: Record) -> None:
    run = record(nn.Linear(2, 2))
    with pytest.warns(StatsBridgeWarning, match="is no single number"):
        run.step(x=torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), other=1.0)  # has no shape
        run.step(x=10**5000, other=2.0)  # is no text
    run.finish()
    data = statsbridge.load(run.path)
    assert [event["message"][:12] for event in events(data, "bad_scalar")] == ["x=Tensor is ", "x=int is no "]
    assert scalars(data.scalars, "other") == {0: 1.0, 1: 2.0}


def test_log_keeps_epoch_and_kind(record: Record) -> None:
    run = record(nn.Linear(2, 2))
    run.step(loss=1.0)
    run.log({"train/loss": 0.5}, epoch=1, kind="epoch_mean")
    run.log({"train/loss": 0.4}, step=7, epoch=2.5, kind="recomputed")
    with pytest.warns(StatsBridgeWarning, match="kind='guess'"):
        run.log({"train/loss": 0.3}, kind="guess")
    with pytest.warns(StatsBridgeWarning, match="epoch='two'"):
        run.log({"train/loss": 0.2}, epoch="two")  # type: ignore[arg-type]
    run.finish()
    found = [row for row in statsbridge.load(run.path).scalars.to_pylist() if row["name"] == "train/loss"]
    assert [(r["step"], r["value"], r["epoch"], r["kind"], r["iteration"]) for r in found] == [
        (0, 0.5, 1.0, "epoch_mean", None),
        (7, 0.4, 2.5, "recomputed", None),
        (0, 0.3, None, None, None),
        (0, 0.2, None, None, None),
    ]


def test_notes_are_events(record: Record) -> None:
    run = record(nn.Linear(2, 2))
    run.step(step=5)
    run.note("lowered the rate")
    run.finish()
    (note,) = events(statsbridge.load(run.path), "note")
    assert (note["step"], note["severity"], note["message"]) == (5, "info", "lowered the rate")


def test_nan_and_infinity_are_kept_in_scalars(record: Record) -> None:
    run = record(nn.Linear(2, 2))
    for loss in (float("nan"), float("inf"), torch.tensor(float("-inf"))):
        run.step(loss=loss)
    run.finish()
    found = scalars(statsbridge.load(run.path).scalars, "loss")
    assert str([found[0], found[1], found[2]]) == "[nan, inf, -inf]"


def test_filters(record: Record) -> None:
    model = Small()
    run = record(model, modules=["first", "sec*"], sites=["activation", "update"], statistics=["std", "l?"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    assert {(r["module"], r["site"]) for r in rows(data)} == {
        ("first", "activation"),
        ("second", "activation"),
        ("first", "update"),
        ("second", "update"),
    }
    for found in rows(data):
        assert found["std"] is not None
        assert found["l2"] is not None
        assert found["count"] > 0
        for name in ("mean", "skewness", "kurtosis", "min", "max", "abs_mean", "zero_fraction", "kl_unit_gaussian"):
            assert found[name] is None
    assert all(r["update_ratio"] is not None for r in rows(data, site="update"))
    assert {m["module"] for m in data.modules.to_pylist()} == {"", "first", "relu", "dropout", "second"}


def test_sampling_decides_which_steps_have_rows(record: Record) -> None:
    model = Small()
    run = record(model, every=Sampling(every=4, first=2), start_step=3)
    for _ in range(8):
        model(torch.randn(4, 8)).sum().backward()
        run.step()
    run.finish()
    data = statsbridge.load(run.path)
    assert sorted({r["step"] for r in rows(data)}) == [4, 8]
    assert sorted(scalars(data.scalars, "step_time")) == list(range(3, 11))


def test_several_models_and_optimizers(record: Record) -> None:
    models = {"generator": nn.Linear(2, 4), "discriminator": nn.Sequential(nn.Linear(4, 1))}
    optimizers = {
        "g": torch.optim.Adam(models["generator"].parameters(), lr=0.1),
        "d": torch.optim.SGD(models["discriminator"].parameters(), lr=0.2),
    }
    run = record(models, optimizer=optimizers)
    fake = models["generator"](torch.randn(8, 2))
    (models["discriminator"](fake.detach()).mean() + models["discriminator"](torch.randn(8, 4)).mean()).backward()
    optimizers["d"].step()
    models["discriminator"](fake).mean().backward()
    optimizers["g"].step()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    names = {m["module"]: m for m in data.modules.to_pylist()}
    assert set(names) == {"generator", "discriminator", "discriminator.0"}
    assert (names["generator"]["parent"], names["discriminator.0"]["parent"]) == (None, "discriminator")
    assert scalars(data.scalars, "lr/g/0") == {0: 0.1}
    assert scalars(data.scalars, "lr/d/0") == {0: 0.2}
    assert {r["module"] for r in rows(data, site="update")} == {"generator", "discriminator.0"}


def test_an_optimizer_that_does_not_step_keeps_the_window_open(record: Record) -> None:
    """`run.step()` called once for each micro-batch: one warning, and nothing is lost."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(model, optimizer=optimizer, every=4)
    with pytest.warns(StatsBridgeWarning, match="once for each optimizer step") as warned:
        for number in range(8):
            model(torch.randn(5, 3)).sum().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            run.step()
    assert len(warned) == 1
    run.finish()
    data = statsbridge.load(run.path)
    found = {r["step"]: r["count"] for r in rows(data, site="activation")}
    assert found == {1: 20, 5: 20}
    assert len(rows(data, site="update", tensor="weight")) == 2


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STATSBRIDGE_DISABLED", "1")
    model = nn.Linear(2, 2)
    with statsbridge.init(model, dir=tmp_path / "runs", every=0) as run:
        model(torch.randn(2, 2)).sum().backward()
        run.step(loss=1.0)
        run.log({"a": 1})
        run.log_tensor("x", torch.zeros(3))
        run.note("nothing")
        assert (run.path, run.id) == (None, None)
    assert os.listdir(tmp_path) == []


def test_everything_after_finish_does_nothing(record: Record) -> None:
    model = nn.Linear(2, 2)
    run = record(model)
    run.step(loss=1.0)
    run.finish()
    run.finish()
    run.step(loss=2.0)
    run.log({"a": 1})
    run.log_tensor("x", torch.zeros(3))
    run.note("late")
    data = statsbridge.load(run.path)
    assert scalars(data.scalars, "loss") == {0: 1.0}
    assert data.events.num_rows == 0


@pytest.mark.parametrize("timeout", [math.inf, 1e30, math.nan, None, "a minute", torch.tensor(30.0)])
def test_finish_takes_any_timeout(timeout: Any, record: Record) -> None:
    """The model may not be saved yet: at the end of a training nothing raises."""
    run = record(nn.Linear(2, 2))
    run.step(loss=1.0)
    run.finish(timeout=timeout)
    assert run.path is not None
    assert run_state(run.path) == "finished"
    assert scalars(statsbridge.load(run.path).scalars, "loss") == {0: 1.0}


class Unweighable(torch.Tensor):
    """A subclass of somebody's that cannot even say how many elements it has."""

    def numel(self) -> int:
        raise TypeError("numel of an unweighable tensor")


def test_finish_with_a_timeout_that_fails_takes_the_hooks_away(record: Record) -> None:
    before = hooks()
    run = record(Small(), every=1)
    run.step(loss=1.0)
    assert hooks() == before + 4
    with pytest.warns(StatsBridgeWarning, match=r"an error of its own in run\.finish: TypeError"):
        run.finish(timeout=torch.tensor(5.0).as_subclass(Unweighable))  # type: ignore[arg-type]
    assert hooks() == before
    assert run.path is not None
    assert run_state(run.path) == "finished"
    data = statsbridge.load(run.path)
    assert scalars(data.scalars, "loss") == {0: 1.0}
    assert "unweighable" in events(data, "internal_error")[0]["message"]


@pytest.mark.parametrize(
    "part", ["_collector.abandon", "_reporter.count_the_rest", "_writer.close", "_reporter.trouble"]
)
def test_a_part_of_finish_that_fails_keeps_no_other_from_its_turn(
    part: str, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mirrors:
        finished: list[str] = []  # noqa: RUF012

        def finish(self, timeout: float, status: str) -> None:
            self.finished.append(status)
            raise RuntimeError("the last mirror")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    run = record(Small(), every=1)
    run.step(loss=1.0)
    owner, _, method = part.partition(".")
    with monkeypatch.context() as patched:
        patched.setattr(getattr(run, owner), method, fail)
        patched.setattr(run, "_mirrors", [Mirrors(), Mirrors()])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            run.finish()
    assert Mirrors.finished == ["finished", "finished"]
    assert len(warned) == {"_reporter.trouble": 0}.get(part, 1), "one cause, one warning"
    run._collector.abandon()
    run._writer.close()
    assert run.path is not None
    assert run_state(run.path) == "finished"
    assert scalars(statsbridge.load(run.path).scalars, "loss") == {0: 1.0}


def hooks() -> int:
    """How many of torch's hooks for all modules and optimizers are taken."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    taken = (
        module._global_forward_pre_hooks,
        module._global_forward_hooks,
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
    )
    return sum(map(len, taken))


@pytest.mark.parametrize(
    ("error", "state"),
    [(ZeroDivisionError, "failed"), (KeyboardInterrupt, "stopped"), (SystemExit, "stopped")],
)
def test_an_exception_in_the_loop_closes_the_run(error: type[BaseException], state: str, tmp_path: Path) -> None:
    """Who leaves by `sys.exit()` or Ctrl-C has not failed."""
    import json

    model = nn.Linear(2, 2)
    with pytest.raises(error), statsbridge.init(model, dir=tmp_path, every=1) as run:
        run.step(loss=1.0)
        raise error
    assert run.path is not None
    assert json.loads((run.path / "writers" / "rank=0.json").read_text())["state"] == state
    assert scalars(statsbridge.load(run.path).scalars, "loss") == {0: 1.0}

"""`init(backend=…)`: trackers follow a real training, which never notices them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror_helpers import Hanging, JsonLines, Lacking, Planned, install, lines, logged, start_python, stored_scalars
from recording import events
from torch import nn

import statsbridge
from statsbridge import ConfigError, MirrorError, PolicyError, Retry, Selection, StatsBridgeWarning, UnknownBackendError

Record = Callable[..., statsbridge.Run]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def train(run: statsbridge.Run, model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 2)).pow(2).mean()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)


def states(path: Path) -> dict[str, Any]:
    return {file.stem.partition("-")[0]: json.loads(file.read_text()) for file in (path / "mirrors").glob("*.json")}


# ------------------------------------------------------------------ what backend may be


@pytest.mark.parametrize("form", ["name", "object", "list"])
def test_the_record_arrives(form: str, record: Record, installed: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    name = f"lines:{store}"
    backend = {"name": name, "object": JsonLines(store), "list": ["local", name]}[form]
    model = nn.Linear(2, 2)
    run = record(model, backend=backend, every=5, flush_interval=0.05)
    train(run, model, 20)
    run.log({"val": 1.0})
    run.finish()
    assert stored_scalars(store) == logged(run.path)
    assert {step for name, step, *_ in lines(store) if name.startswith("parameter_grad/")} == {0, 5, 10, 15}
    state = states(run.path)["lines"]
    assert (state["status"], state["options"]) == ("finished", {"path": str(store)})


def test_several_trackers_get_the_same(record: Record, tmp_path: Path) -> None:
    stores = [JsonLines(tmp_path / "a"), Planned(tmp_path / "b", [Retry("down")])]
    model = nn.Linear(2, 2)
    with pytest.warns(StatsBridgeWarning, match="cannot deliver now"):
        run = record(model, backend=stores, flush_interval=0.05)
        train(run, model, 10)
        run.finish()
    assert stored_scalars(tmp_path / "a") == stored_scalars(tmp_path / "b") == logged(run.path)


@pytest.mark.parametrize(
    ("backend", "error", "said"),
    [
        ("nonsense", UnknownBackendError, r"'nonsense' is not known here\. Installed: local, .*lines[^\[]*$"),
        ("broken", UnknownBackendError, "'broken' is installed, but cannot be imported.*mirror_helpers_that_is_not"),
        ("lacking:x", UnknownBackendError, "needs the package a_tracker_that_is_not_there, which is not installed"),
        (Lacking("x"), UnknownBackendError, "pip install a_tracker_that_is_not_there"),
        ("lines", ConfigError, "backend 'lines' cannot be had: .*path"),
        ("lines:", ConfigError, "write 'name' or 'name:target'"),
        ("local:x", ConfigError, "the local record has no target"),
        (JsonLines, ConfigError, "give a name such as 'local'"),
        (7, ConfigError, "backend=7: give a name such as 'local'"),
        ([], ConfigError, "backend="),
        (["local", None], ConfigError, "backend=None"),
        (["lines:/a/b", "lines:/a/b"], ConfigError, "lines at /a/b is asked for twice"),
    ],
)
def test_a_backend_that_cannot_be_had(
    backend: Any, error: type[Exception], said: str, installed: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        statsbridge.init(nn.Linear(2, 2), backend=backend, dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_our_own_adapter_without_its_tracker_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "mlflow" else find(name, *a))
    with pytest.raises(UnknownBackendError, match=r"pip install 'statsbridge\[mlflow\]'"):
        statsbridge.init(nn.Linear(2, 2), backend="mlflow", dir=tmp_path / "runs")


def test_a_selection_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mirror is a dict: give a statsbridge\.Selection"):
        statsbridge.init(nn.Linear(2, 2), mirror={}, dir=tmp_path / "runs")  # type: ignore[arg-type]
    assert not (tmp_path / "runs").exists()


def test_the_selection_decides(record: Record, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    selection = Selection(sites="parameter", statistics=["mean"], aggregates=False, smoothing=None, figures=False)
    run = record(model, backend=JsonLines(tmp_path / "store"), mirror=selection)
    train(run, model, 3)
    run.finish()
    names = {name for name, *_ in lines(tmp_path / "store")}
    assert {name for name in names if "/" in name and not name.startswith("lr/")} == {
        "parameter/mean/root.weight",
        "parameter/mean/root.bias",
    }


def test_an_adapter_that_cannot_say_where(tmp_path: Path) -> None:
    class Lost(JsonLines):
        def destination(self) -> Any:
            raise KeyError("HOME")

    with pytest.raises(ConfigError, match="'lines' cannot say where it would send to: KeyError"):
        statsbridge.init(nn.Linear(2, 2), backend=Lost("x"), dir=tmp_path / "runs")


# ------------------------------------------------------------------ policy


def test_what_the_policy_forbids_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = JsonLines(tmp_path / "store")
    with pytest.raises(PolicyError, match="no policy file lists any destination"):
        statsbridge.init(nn.Linear(2, 2), backend=store, restricted=True, dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    run = statsbridge.init(nn.Linear(2, 2), restricted=True, dir=tmp_path / "runs")
    run.finish()


def test_a_restricted_run_sends_only_what_it_may(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = tmp_path / "site-store"
    where.mkdir()
    (tmp_path / "statsbridge-policy.toml").write_text(
        f'destinations = [{{backend = "lines", path = "{where}", scalars = ["loss"], tables = ["scalars"]}}]\n'
    )
    store = JsonLines(where / "store")
    model = nn.Linear(2, 2)
    run = record(model, backend=store, restricted=True, name="secret", config={"password": "p"})
    train(run, model, 4)
    run.finish()
    assert {name for name, *_ in lines(store.path)} == {"loss", "loss/smoothed"}
    assert store.opened is not None
    assert (store.opened.restricted, store.opened.config, store.opened.name) == (True, {}, run.id)


# ------------------------------------------------------------------ training is sacred


def test_a_tracker_that_hangs_for_ever_disturbs_nobody(record: Record, tmp_path: Path) -> None:
    """Counted, not timed: all steps are taken while `send` has not come back once."""
    hanging, other = Hanging(tmp_path / "hanging"), JsonLines(tmp_path / "other")
    model = nn.Linear(2, 2)
    run = record(model, backend=[hanging, other], flush_interval=0.02)
    train(run, model, 5)
    assert hanging.hangs.wait(30)
    train(run, model, 200)
    assert lines(hanging.path) == []
    with pytest.warns(StatsBridgeWarning) as warned:
        run.finish(timeout=3)
    (text,) = {str(warning.message) for warning in warned}
    assert "hanging" in text
    assert f"statsbridge sync {run.path}" in text
    assert stored_scalars(other.path) == logged(run.path)
    assert len(logged(run.path, lambda name: name == "loss")) == 205
    found = states(run.path)
    assert (found["lines"]["status"], found["hanging"]["status"]) == ("finished", "remaining")
    assert found["hanging"]["owner"] is None
    hanging.let_go.set()


def test_unreachable_at_the_start_the_run_goes_on(record: Record, installed: Path, tmp_path: Path) -> None:
    from statsbridge.mirror.sync import sync

    down = Planned(tmp_path / "store", opening=[Retry("connection refused")] * 10_000)
    model = nn.Linear(2, 2)
    with pytest.warns(StatsBridgeWarning) as warned:
        run = record(model, backend=down, flush_interval=0.02)
        train(run, model, 10)
        run.finish(timeout=0.5)
    told = [str(warning.message) for warning in warned]
    assert len(told) == 2
    assert "connection refused" in told[0]
    assert f"statsbridge sync {run.path}" in told[1]
    assert [event["severity"] for event in events(statsbridge.load(run.path), "mirror_unreachable")] == ["warning"]
    (result,) = sync(run.path, None, report=lambda *_, **__: None, progress=lambda *_: None)
    assert (result.remaining, result.status) == (0, "finished")
    assert stored_scalars(down.path) == logged(run.path)


def test_wrong_credentials_are_one_warning_and_an_event(record: Record, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    refusing = Planned(tmp_path / "store", opening=[MirrorError("wrong password; set LINES_PASSWORD")])
    with pytest.warns(StatsBridgeWarning, match="wrong password; set LINES_PASSWORD") as warned:
        run = record(model, backend=refusing, flush_interval=0.02)
        end = time.monotonic() + 30
        while states(run.path)["planned"]["status"] != "stopped" and time.monotonic() < end:
            time.sleep(0.01)
        train(run, model, 3)
        run.finish()
    assert len(warned) == 1
    assert len(events(statsbridge.load(run.path), "mirror_stopped")) == 1


def test_outages_are_events(record: Record, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    adapter = Planned(tmp_path / "store", opening=[Retry("down")] * 3)
    with pytest.warns(StatsBridgeWarning, match="cannot deliver now"):
        run = record(model, backend=adapter, flush_interval=0.02)
        end = time.monotonic() + 30
        while not lines(adapter.path) and time.monotonic() < end:
            train(run, model, 2)
        run.finish()
    data = statsbridge.load(run.path)
    assert len(events(data, "mirror_unreachable")) == len(events(data, "mirror_resumed")) == 1
    # What happened to the mirror is an alert for whoever watches the dashboard.
    assert "mirror_unreachable" in {event.kind for event in adapter.alerts}


def test_many_rows_of_an_outage_arrive_after_it(record: Record, tmp_path: Path) -> None:
    up = []

    def down(batch: object = None) -> None:
        if not up:
            raise Retry("down")

    adapter = Planned(tmp_path / "store", [down] * 100_000)
    model = nn.Linear(2, 2)
    with pytest.warns(StatsBridgeWarning, match="cannot deliver now"):
        run = record(model, backend=adapter, every=100, flush_interval=0.02)
        train(run, model, 1500)
        end = time.monotonic() + 30
        while not adapter.calls and time.monotonic() < end:
            time.sleep(0.01)
        up.append(True)
        run.finish()
    assert stored_scalars(adapter.path) == logged(run.path)
    assert len(stored_scalars(adapter.path)) > 6000


# ------------------------------------------------------------------ processes

TRAIN = """
    import sys, time, torch, statsbridge
    from torch import nn
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = statsbridge.init(model, backend=sys.argv[2], dir=sys.argv[1], every=3, flush_interval=0.02)
    print(run.path, flush=True)
    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad(); loss = model(torch.randn(4, 2)).pow(2).mean(); loss.backward(); optimizer.step()
            run.step(loss=loss)
"""


def sync_program(path: str, folder: Path, *options: str) -> tuple[int, str, str]:
    program = start_python("from statsbridge.cli import app; app()", folder, "sync", path, *options)
    out, error = program.communicate(timeout=120)
    return program.returncode, out, error


@pytest.mark.parametrize("delivered", [pytest.param(2, marks=pytest.mark.slow), 40])
def test_killed_in_mid_run_then_synced_the_store_equals_the_log(
    delivered: int, installed: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    program = start_python(
        TRAIN + "\n    while True: train(1); time.sleep(0.001)", installed, tmp_path, f"lines:{store}"
    )
    assert program.stdout is not None
    path = program.stdout.readline().strip()
    end = time.monotonic() + 60
    while len(lines_of(store)) < delivered and time.monotonic() < end:
        time.sleep(0.005)
    program.send_signal(signal.SIGKILL)
    program.wait()
    with store.open("ab") as file:
        file.truncate(store.read_bytes().rfind(b"\n") + 1)  # a line that was being written
    before = stored_scalars(store)
    wanted = logged(Path(path))
    assert before == wanted[: len(before)]
    assert len(before) < len(wanted)
    assert states(Path(path))["lines"]["status"] == "running"
    code, out, error = sync_program(path, installed)
    assert (code, error) == (0, "")
    assert "finished" in out
    assert stored_scalars(store) == wanted
    assert len(set(lines(store))) == len(lines(store))
    again = lines(store)
    assert sync_program(path, installed)[0] == 0
    assert lines(store) == again, "nothing is left to do"


def lines_of(store: Path) -> list[bytes]:
    try:
        return store.read_bytes().splitlines()
    except FileNotFoundError:
        return []


ENDINGS = ("sys.exit(3)", "raise ValueError('at two in the morning')")


@pytest.mark.parametrize("ending", ["pass", *(pytest.param(ending, marks=pytest.mark.slow) for ending in ENDINGS)])
def test_a_script_that_never_calls_finish(ending: str, installed: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    program = start_python(TRAIN + f"\n    train(10)\n    {ending}", installed, tmp_path, f"lines:{store}")
    out, error = program.communicate(timeout=120)
    assert "statsbridge" not in error.replace("import statsbridge", "")
    path = Path(out.strip())
    assert stored_scalars(store) == logged(path)
    assert len(logged(path, lambda name: name == "loss")) == 10
    assert states(path)["lines"]["status"] == "finished"


@pytest.mark.slow
def test_a_script_whose_tracker_hangs_ends_and_says_so(installed: Path, tmp_path: Path) -> None:
    program = start_python(TRAIN + "\n    train(10)", installed, tmp_path, f"hanging:{tmp_path / 'store'}")
    out, error = program.communicate(timeout=120)
    assert program.returncode == 0
    assert f"statsbridge sync {out.strip()}" in error
    assert states(Path(out.strip()))["hanging"]["status"] == "remaining"


@pytest.mark.slow
def test_a_forked_child_mirrors_nothing(installed: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    source = (
        TRAIN
        + """
    import os
    train(5)
    child = os.fork()
    if child == 0:
        train(50)
        run.finish()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    train(5)
    run.finish()
    """
    )
    program = start_python(source, installed, tmp_path, f"lines:{store}")
    out, error = program.communicate(timeout=120)
    assert program.returncode == 0, error
    path = Path(out.strip())
    assert stored_scalars(store) == logged(path)
    assert len(logged(path, lambda name: name == "loss")) == 10


@pytest.mark.slow
def test_a_local_run_imports_nothing_of_the_mirrors(installed: Path, tmp_path: Path) -> None:
    source = (
        TRAIN
        + """
    train(3)
    run.finish()
    heavy = {"tenacity", "plotly", "statsbridge.mirror", "mirror_helpers", "mlflow", "wandb", "aim", "tensorboard"}
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
    """
    )
    program = start_python(source, installed, tmp_path, "local")
    assert program.communicate(timeout=120)[1] == ""
    assert program.returncode == 0


@pytest.mark.slow
def test_only_rank_zero_mirrors(installed: Path, tmp_path: Path) -> None:
    from recording_ranks import run_ranks

    store = tmp_path / "store"
    source = """
        import torch, statsbridge, sys
        from torch import nn
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        model = nn.Linear(2, 2)
        run = statsbridge.init(model, backend=sys.argv[2], dir=sys.argv[1], every=1)
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward()
            run.step(loss=float(torch.distributed.get_rank()))
        run.finish()
        torch.distributed.destroy_process_group()
    """
    assert run_ranks(source, installed, tmp_path / "runs", f"lines:{store}") == [0, 0]
    assert {value for name, _, _, value in lines(store) if name == "loss"} == {"0.0"}


@pytest.mark.slow
def test_what_rank_zero_may_not_no_rank_may(installed: Path, tmp_path: Path) -> None:
    from recording_ranks import run_ranks

    source = """
        import torch, statsbridge, sys
        torch.distributed.init_process_group("gloo")
        try:
            statsbridge.init(torch.nn.Linear(2, 2), backend=sys.argv[2], dir=sys.argv[1], restricted=True)
        except statsbridge.PolicyError as error:
            sys.exit(7)
    """
    assert run_ranks(source, installed, tmp_path / "runs", f"lines:{tmp_path / 'store'}", cwd=tmp_path) == [7, 7]
    assert not (tmp_path / "runs").exists()

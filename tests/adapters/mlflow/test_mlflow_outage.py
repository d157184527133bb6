"""The server goes, hangs or comes back, the process is killed: in the end the store equals the record."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow_helpers
import pytest
import torch
from statsbridge_mlflow import MLflow
from torch import nn

import statsbridge
from statsbridge import StatsBridgeWarning, testing
from statsbridge.mirror.state import load_states
from statsbridge.mirror.sync import sync
from statsbridge.mirror.verify import Verification, verify

TRAIN = """
import sys, time, torch, statsbridge
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = statsbridge.init(model, backend=sys.argv[1], every=10, dir=sys.argv[2], flush_interval=0.05)
while True:
    time.sleep(0.01)
    loss = model(torch.randn(4, 8)).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); run.step(loss=loss)
    print(run.path, flush=True)
"""


def train(run: statsbridge.Run, model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)


def run_id(run: Path) -> str:
    (state,) = load_states(run)
    return state.memory["run_id"]


def proved(run: Path) -> Verification:
    """The verification of the run's only mirror: everything there, once, as it was recorded."""
    (found,) = verify(run, "mlflow")
    assert found.proved, found.differences.to_pylist()
    assert found.same == found.compared > 0
    return found


def losses(place: Any, run: Path) -> list[tuple[int, float | None]]:
    """(step, loss) as they lie in MLflow's database."""
    found = mlflow_helpers.rows(place.database, run_id(run))
    return [(step, value) for key, step, _, value in found if key == "statsbridge/loss"]


def recorded_losses(run: Path) -> list[tuple[int, float | None]]:
    """(step, loss) as they lie in the record."""
    rows = statsbridge.load(run).scalars.to_pylist()
    return [(row["step"], row["value"]) for row in rows if row["name"] == "loss"]


def event_kinds(run: Path) -> set[str]:
    return set(statsbridge.load(run).events["kind"].to_pylist())


@contextmanager
def mirrored(place: Any, folder: Path) -> Iterator[tuple[statsbridge.Run, nn.Module]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    run = statsbridge.init(model, backend=f"mlflow:{place.uri}", every=5, dir=folder, flush_interval=0.05)
    yield run, model
    run.finish(timeout=120)


def test_through_init(place: Any, tmp_path: Path) -> None:
    with mirrored(place, tmp_path) as (run, model):
        train(run, model, 20)
    assert losses(place, run.path) == recorded_losses(run.path)
    assert len(losses(place, run.path)) == 20
    assert mlflow_helpers.status(place.database, run_id(run.path)) == "FINISHED"
    proved(run.path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["down", "hanging"])
def test_conformance_in_an_outage(kind: str, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    testing.check_outage(server.make, tmp_path, getattr(server.server, kind), bound=30)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["down", "hanging"])
def test_the_server_goes_in_mid_run_and_comes_back(
    kind: str, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training does all its steps meanwhile; afterwards nothing is missing and nothing is there twice."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with (
        pytest.warns(StatsBridgeWarning, match="cannot be reached|did not answer"),
        mirrored(server, tmp_path) as (run, model),
    ):
        train(run, model, 20)
        with getattr(server.server, kind)():
            while "mirror_unreachable" not in event_kinds(run.path):
                train(run, model, 10)
                time.sleep(0.1)
        train(run, model, 20)
    proved(run.path)
    assert losses(server, run.path) == recorded_losses(run.path)


@pytest.mark.slow
def test_the_server_is_away_from_the_beginning_to_the_end(server: Any, tmp_path: Path) -> None:
    """The run is recorded all the same, says once that it is not mirrored, and is delivered later."""
    server.server.stop()
    try:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        with (
            pytest.warns(StatsBridgeWarning, match="cannot be reached"),
            pytest.warns(StatsBridgeWarning, match="has not delivered .* statsbridge sync"),
        ):
            run = statsbridge.init(model, backend=f"mlflow:{server.uri}", every=2, dir=tmp_path, flush_interval=0.05)
            train(run, model, 20)
            run.finish(timeout=30)
    finally:
        server.server.start()
    (delivered,) = sync(run.path, None, report=lambda *_, **__: None, progress=lambda *_: None)
    assert (delivered.rejected, delivered.remaining) == (0, 0)
    proved(run.path)
    assert losses(server, run.path) == recorded_losses(run.path)
    assert mlflow_helpers.status(server.database, run_id(run.path)) == "FINISHED"


@pytest.mark.slow
def test_training_is_killed_and_delivered_later(place: Any, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)}
    command = [sys.executable, "-c", TRAIN, f"mlflow:{place.uri}", str(tmp_path / "runs")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        path = Path(child.stdout.readline().strip())
        while not sum(state.counts.points for state in load_states(path)):
            assert child.stdout.readline()
        for _ in range(50):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    assert len(losses(place, path)) < len(recorded_losses(path))
    sync(path, None, report=lambda *_, **__: None, progress=lambda *_: None)
    proved(path)
    assert losses(place, path) == recorded_losses(path)


def test_verify_finds_what_was_changed(sqlite: Any, tmp_path: Path) -> None:
    """A changed value, a deleted metric and a doubled value: each by its name."""
    with mirrored(sqlite, tmp_path) as (run, model):
        train(run, model, 6)
    with sqlite3.connect(sqlite.database) as connection:
        connection.execute("update metrics set value = value + 1 where key = 'statsbridge/loss' and step = 3")
        for table in ("metrics", "latest_metrics"):
            connection.execute(f"delete from {table} where key = 'statsbridge/grad_norm'")
        connection.execute(
            "insert into metrics (key, value, timestamp, run_uuid, step, is_nan) select key, value, timestamp + 5000,"
            " run_uuid, step, is_nan from metrics where key = 'statsbridge/loss' and step = 4"
        )
    connection.close()
    (found,) = verify(run.path, "mlflow")
    assert not found.proved
    rows = {(row["kind"], row["key"], row["step"]) for row in found.differences.to_pylist()}
    assert rows == {
        ("different", "statsbridge/loss", 3),
        ("duplicated", "statsbridge/loss", 4),
        *(("missing", "statsbridge/grad_norm", step) for step in range(6)),
    }


def test_wrong_run_id(sqlite: Any, tmp_path: Path) -> None:
    model = nn.Linear(8, 1)
    with pytest.warns(StatsBridgeWarning, match="no run nonsense"):
        run = statsbridge.init(model, backend=MLflow(sqlite.uri, run_id="nonsense"), dir=tmp_path)
        train(run, model, 3)
        run.finish()
    assert statsbridge.load(run.path).scalars.num_rows > 0

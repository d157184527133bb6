"""Two real stores: an sqlite file that this process opens itself, and a server on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlflow_helpers
import pytest
from statsbridge_mlflow import MLflow


@dataclass(frozen=True)
class Place:
    """A store of MLflow: its tracking URI, and the sqlite file that is behind it."""

    uri: str
    database: Path
    server: mlflow_helpers.Server | None = None

    def make(self, **settings: str) -> MLflow:
        """A new adapter for this store."""
        return MLflow(self.uri, **settings)


@pytest.fixture(scope="session", autouse=True)
def no_telemetry() -> None:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"


@pytest.fixture(autouse=True)
def mlflow_as_new(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a test sets in MLflow's module or environment is gone after it, and files are kept in its own folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    if mlflow := sys.modules.get("mlflow"):
        while mlflow.active_run():
            mlflow.end_run()
        mlflow.set_tracking_uri(None)
        mlflow.tracking.fluent._active_experiment_id = None


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory, no_telemetry: None) -> Path:
    """Made once: MLflow takes seconds to make its tables."""
    from mlflow import MlflowClient

    file = tmp_path_factory.mktemp("mlflow") / "empty.db"
    with contextlib.chdir(file.parent):  # the default experiment keeps its files below the folder it was made in
        MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def sqlite(empty_database: Path, tmp_path: Path) -> Place:
    """A database of this test's own."""
    file = tmp_path / "mlflow.db"
    shutil.copyfile(empty_database, file)
    return Place(f"sqlite:///{file}", file)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server that all tests share."""
    with mlflow_helpers.running(tmp_path_factory.mktemp("server")) as running:
        yield Place(running.uri, running.database, running)


@pytest.fixture(params=["sqlite", "server"])
def place(request: pytest.FixtureRequest) -> Place:
    """Either store."""
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def make(place: Place) -> Callable[..., MLflow]:
    """Makes adapters for either store."""
    return place.make

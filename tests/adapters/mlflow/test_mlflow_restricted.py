"""A restricted run: what MLflow takes down by itself is off, in the whole store, and nobody else is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow_helpers
import pytest
from statsbridge_mlflow import MLflow

from statsbridge import PolicyError, testing
from statsbridge.mirror import Batch

# What leaves this process, with every connection noted. Run without the variables by which MLflow knows a test.
RECORD = """
import json, sys
connected = []
sys.addaudithook(lambda event, arguments: connected.append(arguments[-1]) if event == "socket.connect" else None)
sys.addaudithook(lambda event, arguments: connected.append(arguments[0]) if event == "socket.getaddrinfo" else None)
request = json.loads(sys.argv[1])
if request["imported"]:
    import mlflow
    started = mlflow.telemetry.get_telemetry_client() is not None
from pathlib import Path
from statsbridge import testing
from statsbridge_mlflow import MLflow
run = testing.made_run(Path(request["folder"]), restricted=True)
session = testing.Session(MLflow(request["uri"]), run)
for batch in testing.made_batches(2):
    session.send(batch)
session.call("alert", session.adapter.alert, testing.made_event(3))
session.close()
import mlflow
client = mlflow.telemetry.get_telemetry_client()
print(json.dumps({"connected": sorted({str(one) for one in connected}), "telemetry": client is not None}))
"""


def test_the_file_of_an_sqlite_store(tmp_path: Path) -> None:
    """Made by the restricted run itself, in a working folder that must not be in it."""
    store = tmp_path / "store"
    store.mkdir()
    adapter = MLflow(f"sqlite:///{store}/mlflow.db", experiment="secret project?")
    testing.check_restricted(lambda: adapter, tmp_path, store)


def test_the_store_of_a_server(server: Any, tmp_path: Path) -> None:
    testing.check_restricted(server.make, tmp_path, server.server.folder)


@pytest.mark.slow
@pytest.mark.parametrize("imported", [False, True], ids=["we import MLflow", "the user did"])
def test_no_report_to_mlflows_makers(imported: bool, server: Any, tmp_path: Path) -> None:
    """Nothing but the server is connected to, or looked up."""
    known = ("PYTEST", "MLFLOW", "CI", "DO_NOT_TRACK", "GITHUB", "GITLAB", "BUILDKITE", "TF_BUILD", "JENKINS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(known)}
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    request = json.dumps({"uri": server.uri, "folder": str(tmp_path), "imported": imported})
    done = subprocess.run(
        [sys.executable, "-c", RECORD, request], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["telemetry"] is False
    if not imported:  # where the user's own import has begun to, it may have asked where to report to
        assert set(found["connected"]) == {"127.0.0.1", f"('127.0.0.1', {server.server.port})"}


def test_files_go_nowhere_that_the_policy_was_not_asked_about(sqlite: Any, tmp_path: Path) -> None:
    """An experiment may keep its files anywhere: the policy has allowed the database's folder."""
    from mlflow import MlflowClient

    elsewhere, beside = tmp_path / "elsewhere", tmp_path / "store"
    beside.mkdir()
    database = shutil.copyfile(sqlite.database, beside / "mlflow.db")
    MlflowClient(f"sqlite:///{database}").create_experiment("theirs", artifact_location=elsewhere.as_uri())
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "part").write_text("numbers")
    for experiment, allowed in (("theirs", False), ("ours", True)):
        adapter = MLflow(f"sqlite:///{database}", experiment=experiment)
        session = testing.Session(adapter, testing.made_run(tmp_path, restricted=True))
        session.send(Batch([testing.made_point(testing.made_series("loss"), 0, 0.5)]))
        if allowed:
            session.call("artifact", adapter.artifact, kept)
        else:
            with pytest.raises(PolicyError, match="keep this run's files at"):
                session.call("artifact", adapter.artifact, kept)
        assert len(mlflow_helpers.rows(database, session.memory["run_id"])) == 1
    assert not elsewhere.exists()
    assert [path.read_text() for path in beside.rglob("part")] == ["numbers"]


def test_a_restricted_run_goes_to_a_server_or_a_file(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="MLflow server or an sqlite file only"):
        testing.Session(MLflow("postgresql://db/mlflow"), testing.made_run(tmp_path, restricted=True))

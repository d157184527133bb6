"""The run in MLflow: attached to or made, found again, described and ended; figures, alerts and files in it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow_helpers
import pytest
from statsbridge_mlflow import MLflow

from statsbridge import MirrorError, __version__, testing
from statsbridge.mirror import Batch

POINT = Batch([testing.made_point(testing.made_series("loss"), 0, 0.5)])


def test_a_run_of_its_own(place: Any, tmp_path: Path) -> None:
    run = replace(testing.made_run(tmp_path), attempt=2)
    session = testing.Session(place.make(experiment=tmp_path.name), run)
    session.send(POINT)
    run_id = session.memory["run_id"]
    assert mlflow_helpers.status(place.database, run_id) == "RUNNING"
    session.close("failed")
    assert mlflow_helpers.status(place.database, run_id) == "FAILED"
    assert mlflow_helpers.tags(place.database, run_id) == {
        "mlflow.runName": "made up",
        "statsbridge.run_id": run.id,
        "statsbridge.own_run": "true",
        "statsbridge.version": __version__,
        "statsbridge.attempt": "2",
        "statsbridge.versions.python": "3.11",
        "statsbridge.versions.torch": "2.13",
    }
    assert mlflow_helpers.parameters(place.database, run_id) == {
        "statsbridge/lr": "0.001",
        "statsbridge/model.width": "64",
        "statsbridge/model.norm": "None",
        "statsbridge/tags": '["a", "b"]',
    }
    again = testing.Session(place.make(), run, destination=session.destination, memory=session.memory)
    assert mlflow_helpers.status(place.database, run_id) == "RUNNING"
    again.close("stopped")
    assert mlflow_helpers.status(place.database, run_id) == "KILLED"


def test_a_run_made_by_a_process_that_died_before_it_was_noted_is_found(place: Any, tmp_path: Path) -> None:
    run = testing.made_run(tmp_path)
    first = testing.Session(place.make(), run)
    second = testing.Session(place.make(), run)
    other = testing.Session(place.make(), testing.made_run(tmp_path))
    assert first.memory == second.memory
    assert first.memory["run_id"] != other.memory["run_id"]


def test_the_users_run_and_parameters_stay_as_they_are(place: Any, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(place.uri)
    run_id = client.create_run("0", run_name="theirs", tags={"note": "mine"}).info.run_id
    client.log_param(run_id, "lr", "0.1")
    client.log_param(run_id, "statsbridge/lr", "their own of our name")
    session = testing.Session(place.make(run_id=run_id), testing.made_run(tmp_path))
    session.send(POINT)
    session.close("failed")
    assert session.memory["run_id"] == run_id
    assert mlflow_helpers.status(place.database, run_id) == "RUNNING"
    tags = mlflow_helpers.tags(place.database, run_id)
    assert {"mlflow.runName": "theirs", "note": "mine"}.items() <= tags.items()
    assert "statsbridge.own_run" not in tags
    parameters = mlflow_helpers.parameters(place.database, run_id)
    assert parameters["lr"] == "0.1"
    assert parameters["statsbridge/lr"] == "their own of our name"
    assert parameters["statsbridge/model.width"] == "64"


def test_a_run_that_does_not_exist(place: Any, tmp_path: Path) -> None:
    with pytest.raises(MirrorError, match="no run 0123456789abcdef"):
        testing.Session(place.make(run_id="0123456789abcdef"), testing.made_run(tmp_path))


def test_a_deleted_run(place: Any, tmp_path: Path) -> None:
    """Deleted while it is mirrored to: the values are fine, so none is rejected."""
    from mlflow import MlflowClient

    session = testing.Session(place.make(), testing.made_run(tmp_path))
    MlflowClient(place.uri).delete_run(session.memory["run_id"])
    with pytest.raises(MirrorError, match=f"mlflow runs restore --run-id {session.memory['run_id']}") as caught:
        session.call("send", session.adapter.send, POINT)
    assert type(caught.value) is MirrorError


def test_an_alert_is_a_tag(place: Any, tmp_path: Path) -> None:
    session = testing.Session(place.make(), testing.made_run(tmp_path))
    for _ in range(2):
        session.call("alert", session.adapter.alert, testing.made_event(3))
    session.call("alert", session.adapter.alert, replace(testing.made_event(4), kind="what? "))
    tags = mlflow_helpers.tags(place.database, session.memory["run_id"])
    alerts = {key: text for key, text in tags.items() if key.startswith("statsbridge.alert.")}
    text = "critical at step {}: activation of blocks.0.conv has 12 NaN & more < 13"
    assert alerts.pop("statsbridge.alert.loss_not_finite") == text.format(3)
    assert list(alerts.values()) == [text.format(4)]


def test_figures_and_files(place: Any, tmp_path: Path) -> None:
    """A page that is whole in itself, the newest of its name; every file of the folder, byte for byte."""
    import plotly.graph_objects as go

    kept = tmp_path / "run-1"
    (kept / "stats" / "rank=0").mkdir(parents=True)
    (kept / "stats" / "rank=0" / "0-9.ab.parquet").write_bytes(bytes(range(256)))
    (kept / "run.json").write_text("{}")
    session = testing.Session(place.make(), testing.made_run(tmp_path))
    for step in (5, 6):
        figure = go.Figure(go.Heatmap(z=[[float(step)]]), layout={"title": f"step {step}"})
        session.call("figure", session.adapter.figure, "depth/activation", figure, step)
    session.call("artifact", session.adapter.artifact, kept)

    from mlflow.artifacts import download_artifacts

    copy = Path(
        download_artifacts(run_id=session.memory["run_id"], tracking_uri=place.uri, dst_path=str(tmp_path / "down"))
    )
    (page,) = (copy / "statsbridge" / "figures").iterdir()
    assert page.name == "depth.activation.html"
    text = page.read_text(encoding="utf-8")
    assert "step 6" in text
    assert "step 5" not in text
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", text)
    record = copy / "statsbridge" / "record" / "run-1"
    assert (record / "stats" / "rank=0" / "0-9.ab.parquet").read_bytes() == bytes(range(256))
    assert json.loads((record / "run.json").read_text()) == {}


def test_read_back_of_what_is_not_there(sqlite: Any, tmp_path: Path) -> None:
    run = testing.made_run(tmp_path)
    session = testing.Session(sqlite.make(), run)
    session.send(POINT)
    moved = replace(session.destination, address=f"sqlite:///{tmp_path}/other.db")
    for destination, memory in ((moved, session.memory), (session.destination, {})):
        with pytest.raises(MirrorError, match="no MLflow run of this mirror"):
            list(MLflow(destination.address).read_back(run, destination, memory))
    assert not (tmp_path / "other.db").exists()


def test_a_damaged_database_is_read_as_far_as_it_goes(sqlite: Any, tmp_path: Path) -> None:
    """One metric's history cannot be read: it is named, after all others have been read."""
    run = testing.made_run(tmp_path)
    session = testing.Session(sqlite.make(), run)
    session.send(Batch([testing.made_point(testing.made_series(name), 0, 0.5) for name in ("a", "b", "c")]))
    session.close()
    break_column(sqlite.database, "statsbridge/b")
    found = []
    with pytest.raises(MirrorError, match="1 of its metrics: statsbridge/b"):
        for reading in sqlite.make().read_back(run, session.destination, session.memory):
            found.append(reading.key)
    assert found == ["statsbridge/a", "statsbridge/c"]


def break_column(database: Path, key: str) -> None:
    """Put text that is no number where the value was, which sqlite lets anybody do."""
    import sqlite3

    with sqlite3.connect(database) as connection:
        connection.execute("update metrics set value = 'damaged' where key = ?", (key,))
    connection.close()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{folder}/mlruns", "file store keeps a value twice"),
        ("sqlite:///:memory:", "gone when this process ends"),
        ("sqlite:///{folder}/no.db", "no sqlite database"),
        ("http://", "no address of an MLflow server"),
    ],
)
def test_what_cannot_be_a_store(target: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "no.db").write_text("this is some other file")
    with pytest.raises(MirrorError, match=message):
        testing.Session(MLflow(target.format(folder=tmp_path)), testing.made_run(tmp_path))


def test_a_folder_with_a_space(sqlite: Any, tmp_path: Path) -> None:
    """MLflow's own default URI has %20 for it, and makes an empty folder of that name."""
    folder = tmp_path / "a b"
    folder.mkdir()
    shutil.copyfile(sqlite.database, folder / "mlflow.db")
    session = testing.Session(MLflow(f"sqlite:///{tmp_path}/a%20b/mlflow.db"), testing.made_run(tmp_path))
    session.send(POINT)
    assert mlflow_helpers.rows(folder / "mlflow.db", session.memory["run_id"])
    assert not (tmp_path / "a%20b").exists()

"""Beside the user's own calls of MLflow: every row of theirs and of ours arrives, and their run stays theirs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow_helpers
import pytest

from statsbridge import testing
from statsbridge.testing.session import compare, expected

STEPS = 12
Log = Callable[[int], None]


def explicit(step: int) -> None:
    import mlflow

    mlflow.log_metric("loss", step / 3, step=step)
    mlflow.log_metrics({"accuracy": step / 5, "other": float(step)}, step=step)


def automatic(step: int) -> None:
    """MLflow's own default: step 0 each time, told apart by the clock."""
    import mlflow

    mlflow.log_metric("loss", step / 3)
    mlflow.log_metrics({"accuracy": step / 5, "other": float(step)})


def theirs(database: Path, run_id: str) -> list[tuple[str, float | None]]:
    found = mlflow_helpers.rows(database, run_id)
    return sorted((key, value) for key, *_, value in found if not key.startswith("statsbridge/"))


def wanted(steps: int) -> list[tuple[str, float]]:
    rows = [("loss", step / 3) for step in range(steps)] + [("accuracy", step / 5) for step in range(steps)]
    return sorted(rows + [("other", float(step)) for step in range(steps)])


@pytest.mark.parametrize("log", [explicit, automatic])
def test_the_same_thread(place: Any, log: Log, tmp_path: Path) -> None:
    """They log before, between and after ours, in a run that they started and that we attach to."""
    import mlflow

    mlflow.set_tracking_uri(place.uri)
    batches = testing.made_batches(STEPS)
    with mlflow.start_run(run_name="theirs") as run:
        log(0)
        settings = dict(os.environ), mlflow.get_tracking_uri()
        run_info = testing.made_run(tmp_path)
        session = testing.Session(place.make(), run_info)
        for step in range(1, STEPS):
            log(step)
            session.send(batches[step])
        session.close("failed")
        assert (dict(os.environ), mlflow.get_tracking_uri()) == settings
        assert mlflow.active_run().info.run_id == run.info.run_id == session.memory["run_id"]
        assert mlflow_helpers.status(place.database, run.info.run_id) == "RUNNING"
        log(STEPS)
    assert mlflow_helpers.status(place.database, run.info.run_id) == "FINISHED"
    assert mlflow_helpers.tags(place.database, run.info.run_id)["mlflow.runName"] == "theirs"
    assert theirs(place.database, run.info.run_id) == wanted(STEPS + 1)
    if log is explicit:
        found = mlflow_helpers.rows(place.database, run.info.run_id, "loss")
        assert [step for _, step, *_ in found] == list(range(STEPS + 1))
    ours = place.make().read_back(run_info, session.destination, session.memory)
    compare(ours, expected(session.adapter, session.acknowledged))


def test_at_the_same_time(place: Any, tmp_path: Path) -> None:
    """They log in their thread while ours does, into the same run and the same file: nobody's row is lost."""
    import mlflow

    mlflow.set_tracking_uri(place.uri)
    run_info, done = testing.made_run(tmp_path), threading.Event()
    with mlflow.start_run() as run:
        session = testing.Session(place.make(), run_info)

        def mirror() -> None:
            for batch in testing.made_batches(3, series=200):
                session.send(batch)
            done.set()

        thread = threading.Thread(target=mirror)
        thread.start()
        step = 0
        while not done.is_set() or step < STEPS:
            explicit(step)
            step += 1
        thread.join()
    assert theirs(place.database, run.info.run_id) == wanted(step)
    ours = place.make().read_back(run_info, session.destination, session.memory)
    compare(ours, expected(session.adapter, session.acknowledged))
    assert len(session.acknowledged) == 3 * 2 * 200


def test_their_run_in_another_thread_is_not_ours(sqlite: Any, tmp_path: Path) -> None:
    """No run is active in the thread that calls init: ours goes into a run of its own, and theirs stays theirs."""
    import mlflow

    mlflow.set_tracking_uri(sqlite.uri)
    begun, end, ids = threading.Event(), threading.Event(), []

    def train() -> None:
        with mlflow.start_run() as run:
            ids.append(run.info.run_id)
            explicit(0)
            begun.set()
            end.wait()
            explicit(1)

    thread = threading.Thread(target=train)
    thread.start()
    begun.wait()
    session = testing.Session(sqlite.make(), testing.made_run(tmp_path))
    session.send(testing.made_batches(1)[0])
    end.set()
    thread.join()
    session.close()
    assert session.memory["run_id"] != ids[0]
    assert mlflow.active_run() is None
    assert theirs(sqlite.database, ids[0]) == wanted(2)
    assert not theirs(sqlite.database, session.memory["run_id"])
    assert not mlflow_helpers.rows(sqlite.database, ids[0], "statsbridge/")


def test_ours_first(sqlite: Any, tmp_path: Path) -> None:
    """A run that they start after ours is a run of theirs, not ours."""
    import mlflow

    session = testing.Session(sqlite.make(), testing.made_run(tmp_path))
    mlflow.set_tracking_uri(sqlite.uri)
    with mlflow.start_run() as run:
        explicit(0)
        session.send(testing.made_batches(1)[0])
        explicit(1)
    session.close()
    assert run.info.run_id != session.memory["run_id"]
    assert theirs(sqlite.database, run.info.run_id) == wanted(2)


def test_asynchronous_logging_of_theirs(sqlite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their setting, under which MLflow's calls return before anything is stored: ours still mean that it is."""
    import mlflow

    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
    mlflow.set_tracking_uri(sqlite.uri)
    with mlflow.start_run() as run:
        session = testing.Session(sqlite.make(), testing.made_run(tmp_path))
        for step, batch in enumerate(testing.made_batches(5)):
            explicit(step)
            session.send(batch)
            found = mlflow_helpers.rows(sqlite.database, run.info.run_id, "statsbridge/")
            assert len(found) == len(session.acknowledged)
    mlflow.flush_async_logging()
    assert theirs(sqlite.database, run.info.run_id) == wanted(5)

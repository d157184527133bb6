"""Where it would send to: as the user has set it, in one spelling, without credentials."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from statsbridge_mlflow import MLflow

from statsbridge import ConfigError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("http://localhost:5000/", "http://localhost:5000"),
        ("https://mlflow.lab.example/prefix", "https://mlflow.lab.example/prefix"),
        ("https://me:secret@mlflow.lab.example", "https://mlflow.lab.example"),
        ("postgresql://me:secret@db:5432/mlflow?password=secret", "postgresql://db:5432/mlflow"),
        ("postgresql://me:secret@db/mlflow?options=a@b", "postgresql://db/mlflow"),
        ("postgresql://me:secret%2Fsecret@db/mlflow", "postgresql://db/mlflow"),
        ("https://mlflow.lab.example:5000/team@lab", "https://mlflow.lab.example:5000/team@lab"),
        ("sqlite:///mlflow.db", "sqlite:///{here}/mlflow.db"),
        ("sqlite:///../mlflow.db", "sqlite:///{above}/mlflow.db"),
        ("sqlite:////data/a%20b.db", "sqlite:////data/a b.db"),
        ("sqlite:////data/100%25.db", "sqlite:////data/100%25.db"),
        ("mlruns", "{here}/mlruns"),
        ("file:///data/mlruns", "/data/mlruns"),
        ("databricks", "databricks"),
        ("databricks://profile", "databricks://profile"),
    ],
)
def test_address(target: str, address: str, here: Path) -> None:
    found = MLflow(target).destination()
    assert found.address == address.format(here=here, above=here.parent)
    assert found.explicit
    again = MLflow(**MLflow(target).options())
    assert again.destination() == found
    assert "secret" not in repr((found, again.options()))


def test_credentials_that_can_be_read_in_two_ways_are_refused() -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_USERNAME"):
        MLflow("https://evil.example\\@mlflow.lab.example")


@pytest.mark.parametrize(
    "target",
    [
        "postgresql://me:sec/ret@db/mlflow",  # which SQLAlchemy takes, and connects
        "postgresql://me:12/ret@db/mlflow",
        "mysql+pymysql://me:sec?ret@db/mlflow",
        "https://me:sec/ret@mlflow.lab.example",
        "https://me:sec#ret@mlflow.lab.example",
    ],
)
def test_a_password_that_reaches_beyond_the_host_is_refused_and_not_told(target: str) -> None:
    with pytest.raises(ConfigError, match="write them as %2F") as caught:
        MLflow(target)
    assert "ret" not in str(caught.value)


def test_without_a_setting_it_is_mlflows_own_default(here: Path) -> None:
    import mlflow

    found = MLflow().destination()
    assert found.address == f"sqlite:///{here}/mlflow.db"
    assert not found.explicit
    mlflow.set_tracking_uri(None)
    assert mlflow.get_tracking_uri() == f"sqlite:///{str(here).replace(' ', '%20')}/mlflow.db"


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5001")
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    found = MLflow().destination()
    assert (found.address, found.explicit, dict(found.details)) == ("http://localhost:5001", False, {"run_id": "abc"})
    monkeypatch.delenv("MLFLOW_RUN_ID")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert MLflow().destination().details == {"experiment": "mine"}
    assert MLflow(experiment="other").destination().details == {"experiment": "other"}
    # Run and experiment are those of the user's server: another has others.
    assert MLflow("http://localhost:5002").destination().details == {}


def test_the_active_run_of_the_calling_thread(sqlite: Any) -> None:
    import mlflow

    mlflow.set_tracking_uri(sqlite.uri)
    mlflow.set_experiment("mine")
    experiment = mlflow.get_experiment_by_name("mine").experiment_id
    assert MLflow().destination().details == {"experiment_id": experiment}
    with mlflow.start_run() as run:
        found = MLflow().destination()
        assert (found.address, found.explicit) == (sqlite.uri, False)
        assert found.details == {"run_id": run.info.run_id}
        assert MLflow(run_id="other").destination().details == {"run_id": "other"}
        assert sqlite.make().destination().details == {"run_id": run.info.run_id}
        assert MLflow("http://localhost:5002").destination().details == {}
        elsewhere: list[dict[str, str]] = []
        thread = threading.Thread(target=lambda: elsewhere.append(dict(MLflow().destination().details)))
        thread.start()
        thread.join()
        assert elsewhere == [{"experiment_id": experiment}]

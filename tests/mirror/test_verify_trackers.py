"""What `verify` finds in the real stores of the trackers, after somebody has changed them behind their back."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner
from verify_helpers import deliver, recorded

from statsbridge.cli import app
from statsbridge.mirror.verify import Verification, verify


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return recorded(tmp_path / "statsbridge-runs")


def verified(run: Path, backend: str) -> Verification:
    (result,) = verify(run, backend)
    status = CliRunner().invoke(app, ["verify", str(run), "--against", backend]).exit_code
    assert status == (0 if result.proved else 1)
    return result


def undocumented(
    result: Verification, kinds: Iterable[str] = ("missing", "extra", "different", "duplicated")
) -> list[tuple[str, str, int]]:
    return [(row["kind"], row["key"], row["step"]) for row in result.differences.to_pylist() if row["kind"] in kinds]


def test_tensorboard_a_dropped_and_a_doubled_file(run: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    deliver(run, f"tensorboard:{logs}")
    result = verified(run, "tensorboard")
    assert (result.proved, result.counts) == (True, {})
    assert result.same == result.compared > 50
    files = sorted(logs.rglob("*tfevents*"))
    largest = max(files, key=lambda file: file.stat().st_size)
    copy = largest.with_name(f"{largest.name}.copy")
    shutil.copy(largest, copy)
    result = verified(run, "tensorboard")
    assert set(result.counts) == {"duplicated"}
    copy.unlink()
    largest.unlink()
    result = verified(run, "tensorboard")
    assert not result.proved
    assert any(largest.name in row["reason"] for row in result.differences.to_pylist() if row["kind"] == "unreadable")


@pytest.mark.slow
def test_mlflow_rows_of_its_database(run: Path, tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    deliver(run, f"mlflow:sqlite:///{database}")
    result = verified(run, "mlflow")
    assert result.proved
    assert result.counts == {"altered": 2}  # an infinity and a negative zero
    with closing(sqlite3.connect(database)) as store, store:
        where = "WHERE key LIKE '%loss' AND step = ?"
        assert store.execute(f"UPDATE metrics SET value = 0.3333333333333334 {where}", (1,)).rowcount == 1
        assert store.execute(f"DELETE FROM metrics {where}", (4,)).rowcount == 1
        (key, value, time, owner) = store.execute(
            f"SELECT key, value, timestamp, run_uuid FROM metrics {where}", (0,)
        ).fetchone()
        store.execute(
            "INSERT INTO metrics (key, value, timestamp, step, is_nan, run_uuid) VALUES (?, ?, ?, 0, 0, ?)",
            (key, value, time + 1, owner),
        )
    found = undocumented(verified(run, "mlflow"))
    assert [(kind, step) for kind, _, step in found] == [("duplicated", 0), ("different", 1), ("missing", 4)]
    assert all(key.endswith("loss") for _, key, _ in found)


@pytest.mark.slow
def test_mlflow_a_deleted_metric(run: Path, tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    deliver(run, f"mlflow:sqlite:///{database}")
    with closing(sqlite3.connect(database)) as store, store:
        for table in ("metrics", "latest_metrics"):
            store.execute(f"DELETE FROM {table} WHERE key LIKE '%activation/std/m0'")
    found = undocumented(verified(run, "mlflow"))
    assert [kind for kind, _, _ in found] == ["missing"] * 6
    assert {key.rpartition("statsbridge/")[2] for _, key, _ in found} == {"activation/std/m0"}


@pytest.mark.slow
def test_wandb_a_truncated_file(run: Path, tmp_path: Path) -> None:
    deliver(run, "wandb:offline")
    result = verified(run, "wandb")
    assert result.proved
    # What was logged late, for a step that W&B has gone past.
    assert set(result.counts) == {"rejected"}
    (file,) = tmp_path.rglob("*.wandb")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    result = verified(run, "wandb")
    assert not result.proved
    assert result.counts["missing"] > 0
    assert 0 < result.same < result.compared


@pytest.mark.slow
def test_aim_a_repository(run: Path, tmp_path: Path) -> None:
    deliver(run, f"aim:{tmp_path / 'aim'}")
    result = verified(run, "aim")
    assert result.proved
    assert set(result.counts) <= {"superseded"}

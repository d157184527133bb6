"""Our own run, offline, with W&B's real client: what arrives in its file, replays, lost processes, bad surroundings."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from statsbridge_wandb import WandB
from wandb_helpers import client_records, client_rows, run_file

from statsbridge import MirrorError
from statsbridge.mirror import Batch
from statsbridge.testing import (
    HARD_NAMES,
    HARD_VALUES,
    Session,
    check_channels,
    check_crash,
    check_names,
    check_order,
    check_replay,
    check_steps,
    check_values,
    made_batches,
    made_event,
    made_histogram,
    made_point,
    made_run,
    made_series,
)
from statsbridge.testing.session import compare, expected, read


def offline(folder: Path) -> WandB:
    return WandB("offline", dir=str(folder), project="p", group="g")


def children(pid: int) -> list[int]:
    """The child processes of `pid`, of whichever of its threads."""
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return sorted(int(child) for line in found for child in line)


def client_processes() -> tuple[int, int]:
    """The worker that this process started, and W&B's service that the worker started."""
    (worker,) = [
        pid for pid in children(os.getpid()) if b"statsbridge_wandb" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    (service,) = children(worker)
    return worker, service


def test_names_values_histograms_alerts_figures_and_a_folder_arrive(tmp_path: Path) -> None:
    go = pytest.importorskip("plotly.graph_objects")
    run = made_run(tmp_path)
    session = Session(offline(tmp_path), run)
    points = [made_point(made_series(name), 0, float(n)) for n, name in enumerate(HARD_NAMES)]
    session.send(Batch(points))
    hard = made_series("hard")
    session.send(Batch([made_point(hard, step, value) for step, value in enumerate(HARD_VALUES, 1)]))
    session.send(Batch([made_point(made_series(f"m{n}"), 40, n / 3) for n in range(1000)], [made_histogram(40)]))
    adapter = session.adapter
    session.call("figure", adapter.figure, "depth × step/activation.std", go.Figure(go.Heatmap(z=[[1.0]])), 40)
    for event in (made_event(40), made_event(None), made_event(40)):
        session.call("alert", adapter.alert, event)
    (run.path / "kept").mkdir()
    (run.path / "kept" / "a.parquet").write_bytes(b"data")
    session.call("artifact", adapter.artifact, run.path / "kept")
    (run.path / "kept" / "a.parquet").unlink()
    session.close()

    compare(read(offline(tmp_path), run, session.destination, session.memory), expected(adapter, session.acknowledged))
    assert len(session.acknowledged) == len(HARD_NAMES) + len(HARD_VALUES) + 1000

    file = run_file(tmp_path, session.memory["id"])
    (begun,) = client_records(file, "run")
    assert (begun.project, begun.run_group, begun.job_type, begun.display_name) == ("p", "g", "statsbridge", "made up")
    config = {item.key: item.value_json for item in begun.config.update}
    assert config["lr"] == "0.001"
    rows = dict(client_rows(file))
    key = "histograms/activation/std/blocks.0.conv"
    assert rows[40][f"{key}._type"] == "histogram"
    assert rows[40][f"{key}.values"] == made_histogram(40).counts.tolist()
    assert rows[40][f"{key}.bins"] == made_histogram(40).edges.tolist()
    figure = rows[41]["figures/depth × step/activation.std.path"]
    assert (file.parent / "files" / figure).is_file()
    alerts = client_records(file, "alert")  # the third event was a repetition, the second had a lower number
    assert [(alert.title, alert.level) for alert in alerts] == [("loss_not_finite: blocks.0.conv", "ERROR")]
    (artifact,) = client_records(file, "artifact")
    assert Path(artifact.manifest.contents[0].local_path).read_bytes() == b"data"
    assert client_records(file, "exit")[0].exit_code == 0


@pytest.mark.slow
def test_a_lost_client_is_replaced_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    run, batches = made_run(tmp_path), made_batches(6)
    session = Session(offline(tmp_path), run)
    session.send(batches[0])
    for which, batch in zip((1, 0), batches[1:3], strict=True):  # the service at once, with no time for a last flush
        os.kill(client_processes()[which], signal.SIGKILL)
        found = read(offline(tmp_path), run, session.destination, session.memory)
        compare(found, expected(session.adapter, session.acknowledged))
        session.send(batch)  # which repeats on Retry, and on nothing else
    for batch in batches[3:]:
        session.send(batch)
    session.close("failed")
    points = [point for batch in batches for point in batch.points]
    compare(read(offline(tmp_path), run, session.destination, session.memory), expected(session.adapter, points))
    newest = sorted(tmp_path.glob("wandb/offline-run-*"))[-1] / f"run-{session.memory['id']}.wandb"
    assert client_records(newest, "exit")[0].exit_code == 1


def test_rows_written_but_not_acknowledged_are_not_written_again(tmp_path: Path) -> None:
    run, batches = made_run(tmp_path), made_batches(4)
    session = Session(offline(tmp_path), run)
    session.send(batches[0])
    memory = dict(session.memory)
    session.send(batches[1])
    session.close("stopped")
    again = Session(offline(tmp_path), run, destination=session.destination, memory=memory)
    late = made_point(made_series("loss"), batches[1].points[0].step, 99.0)
    again.send(Batch([late]))  # not what that step holds: refused
    for batch in batches[1:]:
        again.send(batch)
    again.close()
    assert again.acknowledged == [point for batch in batches[1:] for point in batch.points]
    points = [point for batch in batches for point in batch.points]
    compare(read(offline(tmp_path), run, session.destination, memory), expected(again.adapter, points))


@pytest.mark.slow
def test_damage_is_named_after_the_rest_has_been_read(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    session = Session(offline(tmp_path), run)
    for batch in made_batches(40, series=100):
        session.send(batch)
    session.close()
    file = run_file(tmp_path, session.memory["id"])
    whole = file.read_bytes()

    def readings() -> tuple[int, str]:
        found, told = 0, ""
        try:
            for _ in offline(tmp_path).read_back(run, session.destination, session.memory):
                found += 1
        except MirrorError as error:
            told = str(error)
        return found, told

    assert readings() == (8000, "")
    file.write_bytes(whole[: len(whole) // 2])
    found, told = readings()
    assert 2000 < found < 6000
    assert str(file) in told
    assert "middle of a record" in told
    file.write_bytes(whole[:40_000] + b"X" + whole[40_001:])
    found, told = readings()
    assert 6000 < found < 8000
    assert str(file) in told
    assert "checksum" in told
    file.unlink()
    with pytest.raises(MirrorError, match="no run file of this mirror"):
        list(offline(tmp_path).read_back(run, session.destination, session.memory))


def test_a_disabled_wandb_gets_nothing_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(MirrorError, match="disabled"):
        Session(WandB(mode="disabled", dir=str(tmp_path)), made_run(tmp_path))
    assert not (tmp_path / "wandb").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [check_names, check_values, check_steps, check_order, check_channels, check_replay, check_crash]
)
def test_the_conformance_kit(check: Any, tmp_path: Path) -> None:
    check(lambda: offline(tmp_path), tmp_path)


@pytest.mark.slow
def test_mirrors_to_two_projects_share_a_folder_and_nothing_else(tmp_path: Path) -> None:
    run, batches = made_run(tmp_path), made_batches(2)
    for project in ("one", "two"):
        adapter = WandB("offline", dir=str(tmp_path), project=project)
        session = Session(adapter, run)
        for batch in batches:
            session.send(batch)
        session.close()
        compare(read(adapter, run, session.destination, {}), expected(adapter, session.acknowledged))
        assert len(session.acknowledged) == 20

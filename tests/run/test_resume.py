"""`init(resume=…)`: a training that was interrupted goes on as one run."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import textwrap
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror_helpers import JsonLines, install, lines
from recording import Small, events, scalars
from recording_ranks import run_ranks
from typer.testing import CliRunner

import statsbridge
from statsbridge.cli import app
from statsbridge.errors import ConfigError, LogError, PolicyError
from statsbridge.mirror import relay as relay_module
from statsbridge.mirror.verify import verify

STEPS = 25
INTERRUPTED, CHECKPOINT = 19, 12


class Training:
    """A training whose state can be put away and taken up again, data order too."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = Small(dropout=0.5)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.checkpoint: dict[str, Any] = {}

    def train(self, run: statsbridge.Run, first: int, last: int, label: int | None = None) -> None:
        for step in range(first, last):
            if step == CHECKPOINT:
                self.save()
            loss = self.model(torch.randn(8, 8)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            run.step(loss=loss, step=None if label is None else label * step)

    def save(self) -> None:
        self.checkpoint = {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "random": torch.get_rng_state(),
        }

    def restore(self, checkpoint: dict[str, Any]) -> None:
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["random"])


def record(training: Training, folder: Path, **options: Any) -> statsbridge.Run:
    return statsbridge.init(training.model, dir=folder, **{"every": 5, "flush_interval": 0.05, **options})


def interrupted_and_resumed(folder: Path, label: int | None = None, **options: Any) -> statsbridge.Run:
    """Recorded up to INTERRUPTED, then from the checkpoint at CHECKPOINT to the end."""
    first = Training()
    run = record(first, folder, **options)
    first.train(run, 0, INTERRUPTED, label)
    run._finish("failed", 60)
    second = Training()
    second.restore(first.checkpoint)
    assert run.path is not None
    again = record(second, folder, resume=run.path, start_step=CHECKPOINT * (label or 1), **options)
    assert again.path == run.path
    second.train(again, CHECKPOINT, STEPS, label)
    again.finish()
    return again


def without(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


@pytest.mark.parametrize("label", [None, 7])
def test_resumed_is_as_if_never_interrupted(label: int | None, tmp_path: Path) -> None:
    whole = Training()
    run = record(whole, tmp_path / "whole", every=statsbridge.Sampling(every=5, first=3))
    whole.train(run, 0, STEPS, label)
    run.finish()
    expected = statsbridge.load(str(run.path))
    again = interrupted_and_resumed(tmp_path / "cut", label, every=statsbridge.Sampling(every=5, first=3))
    data = statsbridge.load(str(again.path))
    which = ("attempt", "seq", "time")
    assert data.stats.num_rows > 0
    assert without(data.stats.to_pylist(), *which) == without(expected.stats.to_pylist(), *which)
    both = [
        without([row for row in table.to_pylist() if row["name"] != "step_time"], *which)
        for table in (data.scalars, expected.scalars)
    ]
    assert both[0] == both[1]
    assert len(scalars(data.scalars, "step_time")) == STEPS
    assert set(data.stats["attempt"].to_pylist()) == {0, 1}
    raw = statsbridge.load(str(again.path), attempts="all")
    assert raw.scalars.num_rows > data.scalars.num_rows
    assert [event["step"] for event in events(data, "resumed")] == [CHECKPOINT * (label or 1)]
    places = {(row["rank"], row["attempt"], row["module"], row["call"]) for row in data.modules.to_pylist()}
    assert {(row["rank"], row["attempt"], row["module"], row["call"]) for row in data.stats.to_pylist()} <= places


def test_the_commands_know_attempts(tmp_path: Path) -> None:
    again = interrupted_and_resumed(tmp_path)
    shown = CliRunner().invoke(app, ["show", str(again.path)]).stdout
    assert f"resumed as attempt 1 from step {CHECKPOINT}" in shown
    (listed,) = json.loads(CliRunner().invoke(app, ["ls", str(tmp_path), "--format", "json"]).stdout)
    assert (listed["attempts"], listed["steps"]) == (2, STEPS)


def test_without_start_step_the_last_recorded_one_is_named(tmp_path: Path) -> None:
    training = Training()
    run = record(training, tmp_path, name="mine")
    training.train(run, 0, 8)
    run.finish()
    with pytest.raises(ConfigError, match=r"last recorded step is 7\).*start_step="):
        record(Training(), tmp_path, resume=run.id)
    run = record(Training(), tmp_path, resume="mine", start_step=8)
    run._finish("failed", 60)
    with pytest.raises(ConfigError, match="last recorded step is 7"):
        record(Training(), tmp_path, resume="auto", name="mine")
    assert len(list(tmp_path.iterdir())) == 1


def test_auto_begins_goes_on_and_begins_again(tmp_path: Path) -> None:
    paths = []
    for state in ("failed", "stopped", "finished", "finished"):
        run = record(Training(), tmp_path, resume="auto", name="nightly", start_step=0)
        run._finish(state, 60)
        paths.append(run.path)
    assert len(set(paths[:3])) == 1
    assert paths[3] != paths[0], "the run had finished"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"resume": "auto", "start_step": 0}, "give name="),
        ({"resume": 3, "start_step": 0}, "resume=3"),
        ({"resume": "", "start_step": 0}, "resume=''"),
    ],
)
def test_what_cannot_be_meant(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        record(Training(), tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_no_such_run(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no run 'yesterday'"):
        record(Training(), tmp_path, resume="yesterday", start_step=3)


def test_one_that_is_open_in_this_process_is_refused(tmp_path: Path) -> None:
    run = record(Training(), tmp_path)
    with pytest.raises(LogError, match=f"being written by process {os.getpid()} on .* since"):
        record(Training(), tmp_path, resume=run.path, start_step=0)
    run.finish()


def test_a_restricted_run_stays_so(tmp_path: Path) -> None:
    run = record(Training(), tmp_path, restricted=True)
    run.finish()
    with pytest.raises(PolicyError):
        record(Training(), tmp_path, resume=run.path, start_step=0, backend=JsonLines(tmp_path / "store"))
    assert not list(Path(str(run.path)).glob("attempts/*")), "nothing was begun"
    run = record(Training(), tmp_path, resume=run.path, start_step=0, config={"second": 2})
    run.finish()
    data = statsbridge.load(str(run.path))
    assert data.info["restricted"] is True
    assert data.info["config"] == {}
    assert data.attempts[0].config == {"second": 2}
    assert data.attempts[0].information["restricted"] is True
    free = record(Training(), tmp_path)
    free.finish()
    record(Training(), tmp_path, resume=free.path, start_step=0, restricted=True).finish()
    assert statsbridge.load(str(free.path)).info["restricted"] is True


KILLED = """
    import os, sys, torch, statsbridge
    from torch import nn
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = int(sys.argv[2])
    run = statsbridge.init(
        model, dir=sys.argv[1], every=1, flush_interval=0.02, resume="auto", name="killed", start_step=first
    )
    for step in range(first, first + 10):
        optimizer.zero_grad(); model(torch.randn(2, 4)).square().mean().backward(); optimizer.step()
        run.step()
    run._writer.flush()
    print(run.id, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_killed_and_started_again_on_the_same_machine(tmp_path: Path) -> None:
    ids = set()
    for first in (0, 7):
        program = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), str(first)]
        done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=120)
        assert done.returncode == -9, done.stderr
        ids.add(done.stdout.strip())
    (path,) = tmp_path.iterdir()
    assert ids == {path.name}
    data = statsbridge.load(path)
    found = sorted({(row["attempt"], row["step"]) for row in data.stats.to_pylist()})
    assert found == [*[(0, n) for n in range(7)], *[(1, n) for n in range(7, 17)]]
    assert data.damaged == ()


RANKS = """
    import sys, torch, statsbridge
    from torch import nn
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for first, state in ((0, "failed"), (3, "finished")):
        run = statsbridge.init(model, dir=sys.argv[1], every=1, resume="auto", name="pair", start_step=first)
        for step in range(first, first + 5):
            optimizer.zero_grad(); model(torch.randn(2, 4)).square().mean().backward(); optimizer.step()
            run.step()
        run._finish(state, 60)
        torch.distributed.barrier()
"""


def test_all_ranks_resume_the_same_run(tmp_path: Path) -> None:
    assert run_ranks(RANKS, tmp_path, tmp_path / "runs") == [0, 0]
    (path,) = (tmp_path / "runs").iterdir()
    data = statsbridge.load(path)
    found = sorted({(row["rank"], row["attempt"], row["step"]) for row in data.stats.to_pylist()})
    assert found == [
        (rank, attempt, step)
        for rank in range(2)
        for attempt, step in [*((0, n) for n in range(3)), *((1, n) for n in range(3, 8))]
    ]


def test_a_mirror_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All attempts arrive, in order, each row once; and verify finds just what it should."""
    monkeypatch.syspath_prepend(install(tmp_path / "installed"))
    store = tmp_path / "store"
    backend = JsonLines(store)
    again = interrupted_and_resumed(tmp_path / "runs", backend=backend)
    assert backend.opened is not None
    assert backend.opened.attempt == 1
    losses = [line[1] for line in lines(store) if line[0] == "loss"]
    assert losses == [*range(INTERRUPTED), *range(CHECKPOINT, STEPS)]
    (result,) = verify(Path(str(again.path)), "lines")
    assert result.proved
    assert result.same == result.compared > 0


def served(run: Path, **owner: Any) -> None:
    """Let a process on another host serve the run's mirror."""
    (file,) = (run / "mirrors").glob("lines-*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "owner": {"host": "elsewhere", "pid": 1, **owner}}))


def seconds_ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()


def test_a_mirror_whose_last_process_may_live_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted job begins again on another host before its last sign of life is old."""
    monkeypatch.setattr(relay_module, "CLAIM_SECONDS", 0.05)
    backend = JsonLines(tmp_path / "store")
    first = Training()
    run = record(first, tmp_path / "runs", backend=backend)
    first.train(run, 0, 3)
    run.finish()
    path = Path(str(run.path))
    served(path, token="theirs", heartbeat=seconds_ago(1))
    before = len(lines(backend.path))
    second = Training()
    again = record(second, tmp_path / "runs", backend=backend, resume=path, start_step=3)
    second.train(again, 3, 5)
    assert again._writer.flush()
    time.sleep(0.3)
    assert len(lines(backend.path)) == before
    served(path, token="theirs", heartbeat=seconds_ago(1000))
    again.finish()
    assert [line[1] for line in lines(backend.path) if line[0] == "loss"] == [0, 1, 2, 3, 4]


def test_a_mirror_that_stays_with_another_process_is_left_to_sync(tmp_path: Path) -> None:
    backend = JsonLines(tmp_path / "store")
    run = record(Training(), tmp_path / "runs", backend=backend)
    run.finish()
    path = Path(str(run.path))
    served(path, token="theirs", heartbeat=seconds_ago(1))
    second = Training()
    again = record(second, tmp_path / "runs", backend=backend, resume=path, start_step=0)
    second.train(again, 0, 3)
    with pytest.warns(statsbridge.StatsBridgeWarning) as warned:
        again.finish(timeout=30)
    said = " ".join(str(one.message) for one in warned)
    assert "is served by process 1 on elsewhere" in said
    assert "statsbridge sync" in said
    assert "did not end within" not in said
    (file,) = (path / "mirrors").glob("lines-*.json")
    assert json.loads(file.read_text())["owner"]["token"] == "theirs"

"""A real training: beside the user's own SummaryWriter, killed and synced, and verified against the record."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from statsbridge_tensorboard import TensorBoard
from tensorboard_helpers import accumulated, exact
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import statsbridge
from statsbridge.mirror.sync import sync
from statsbridge.mirror.verify import verify

SCRIPT = """
import sys, torch, statsbridge
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = statsbridge.init(model, backend="tensorboard:runs", every=1, histograms=True, flush_interval=0.05)
print(run.path, flush=True)
for step in range(100_000):
    loss = model(torch.randn(4, 8)).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    run.step(loss=loss)
"""


def train(run: statsbridge.Run, model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)


def assert_proved(path: Path, at_least: int) -> None:
    (result,) = verify(path, "tensorboard")
    assert result.differences.to_pylist() == []
    assert result.same == result.compared >= at_least


def test_beside_the_users_own_writer(tmp_path: Path) -> None:
    """Their writer is in the very folder that ours is below; they log before, between and after ours."""
    log_dir = tmp_path / "runs"
    writer = SummaryWriter(str(log_dir))
    writer.add_scalar("loss", 0.5, 0)
    model = nn.Linear(8, 2)
    run = statsbridge.init(model, backend=TensorBoard(log_dir), every=2, dir=tmp_path / "record", histograms=True)
    for step in range(1, 6):
        writer.add_scalar("loss", step + 0.5, step)
        train(run, model, 4)
        writer.add_scalar("auto", step)
    run.log({"val/loss": 7.0}, step=3)
    run.step(loss=1.0)
    run.finish()
    writer.add_scalar("loss", 99.0, 10)
    writer.close()
    theirs = accumulated(log_dir)
    assert [(event.step, event.value) for event in theirs.Scalars("loss")] == [
        *((step, step + 0.5) for step in range(6)),
        (10, 99.0),
    ]
    assert len(theirs.Scalars("auto")) == 5
    assert theirs.Tags()["tensors"] == []
    assert_proved(run.path, 300)
    ours = accumulated(log_dir / "statsbridge" / run.id)
    recorded = statsbridge.load(run.path).scalars.to_pylist()
    assert [item[::2] for item in exact(ours, "loss")] == [
        (row["step"], row["value"]) for row in recorded if row["name"] == "loss"
    ]


def test_verify_finds_a_dropped_file(tmp_path: Path) -> None:
    model = nn.Linear(8, 2)
    run = statsbridge.init(model, backend=TensorBoard(tmp_path / "runs"), every=1, dir=tmp_path / "record")
    train(run, model, 5)
    run.finish()
    assert_proved(run.path, 50)
    (path,) = (tmp_path / "runs").rglob("*tfevents*")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    (result,) = verify(run.path, "tensorboard")
    assert not result.proved
    assert result.counts["missing"] > 10
    path.unlink()
    (result,) = verify(run.path, "tensorboard")
    assert not result.proved
    assert str(path) in result.differences["reason"].to_pylist()[0]


def test_a_local_run_is_synced_later(tmp_path: Path) -> None:
    model = nn.Linear(8, 2)
    run = statsbridge.init(model, every=1, dir=tmp_path / "record")
    train(run, model, 5)
    run.finish()
    target = f"tensorboard:{tmp_path / 'runs'}"
    (delivered,) = sync(run.path, target, report=lambda *_, **__: None, progress=lambda *_: None)
    assert delivered.remaining == 0
    assert_proved(run.path, 50)


@pytest.mark.slow
def test_killed_and_synced(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        path = tmp_path / child.stdout.readline().strip()
        folder = tmp_path / "runs" / "statsbridge" / path.name
        while sum(file.stat().st_size for file in folder.rglob("*tfevents*")) < 300_000:
            assert child.poll() is None, child.communicate()[1]
            child_wait(child, 0.05)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    (delivered,) = sync(path, None, report=lambda *_, **__: None, progress=lambda *_: None)
    assert delivered.remaining == 0
    assert_proved(path, 1000)
    assert len(list(folder.rglob("*tfevents*"))) == 2


def child_wait(child: subprocess.Popen[str], seconds: float) -> None:
    """Let it work for a while."""
    try:
        child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return

"""`statsbridge sample`: a training in another process changes its sampling, which nobody had to stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from log_rows import new_run
from recording import events, scalars
from typer.testing import CliRunner

import statsbridge
from statsbridge.cli import app
from statsbridge.log.control import FILE
from statsbridge.log.folder import this_writer, write_state

TRAINING = """
import sys, time
from pathlib import Path
import torch
from torch import nn
import statsbridge

folder = Path(sys.argv[1])
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = statsbridge.init(model, dir=folder / "runs", every=1000, name="mine", flush_interval=0.05)
while not (folder / "end").exists():
    loss = model(torch.randn(8, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.step(loss=loss)
    time.sleep(0.002)
run.finish()
"""


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sample", *map(str, arguments)])
    return result.exit_code, result.output


def say_who_writes(run: Path, *, rank: int = 0, pid: int, state: str) -> None:
    (run / "writers").mkdir(exist_ok=True)
    write_state(run, replace(this_writer(rank, 0), pid=pid), state)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a real training that goes on until there is a file `end` in it."""
    folder = tmp_path_factory.mktemp("training")
    process = subprocess.Popen([sys.executable, "-c", TRAINING, str(folder)], stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: any(folder.glob("runs/*/scalars/rank=0/*.parquet")))
        yield folder
    finally:
        (folder / "end").touch()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said == "", "a healthy training, and nothing that it was asked to do, prints anything"


def changes(run: Path) -> list[str]:
    return [event["message"] for event in events(statsbridge.load(run), "sampling_changed")]


def test_a_running_training_is_sampled_as_asked(training: Path) -> None:
    (run,) = (training / "runs").iterdir()
    arguments = ("mine", "--dir", training / "runs")
    status, said = call(*arguments, "--every", 1, "--for", 20, "--sites", "activation,upd*")
    assert status == 0
    assert "every step is sampled; sites: activation, update; for 20 steps, then as before" in said
    assert f"asked process {json.loads((run / 'writers' / 'rank=0.json').read_text())['pid']} on" in said
    wait_for(lambda: len(changes(run)) == 2)
    status, said = call(*arguments, "--stop")
    assert (status, "no step is sampled" in said) == (0, True)
    wait_for(lambda: len(changes(run)) == 3)
    stopped = events(statsbridge.load(run), "sampling_changed")[-1]["step"]
    wait_for(lambda: max(scalars(statsbridge.load(run).scalars, "loss")) > stopped + 20)
    status, _ = call(*arguments, "--every", 2)
    wait_for(lambda: len(changes(run)) == 4)
    wait_for(lambda: statsbridge.load(run).stats["step"].to_numpy().max() > stopped)
    data = statsbridge.load(run)
    steps = [event["step"] for event in events(data, "sampling_changed")]
    found = {row["step"]: row["site"] for row in data.stats.select(["step", "site"]).to_pylist() if row["step"] > 0}
    assert [step for step in found if step < stopped and step % 1000] == [
        step for step in range(steps[0], steps[0] + 20) if step % 1000
    ]
    assert steps[1] == steps[0] + 20, "and back"
    assert all(step >= steps[3] and step % 2 == 0 for step in found if step >= stopped)
    told = changes(run)
    user = told[0].rpartition("asked by ")[2]
    assert "@" in user
    assert told[1].startswith("as before: every 1000 steps")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give every"),
        (("--for", 5), "for 5 steps, but what"),
        (("--every", 0), "at least 1"),
        (("--every", 1, "--for", -3), "at least 1"),
        (("--sites", "weights"), "'weights' matches none of activation"),
        (("--sites", ""), "'' matches none of"),
        (("--stop", "--every", 2), "neither every nor sites"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments: tuple[object, ...], said: str, training: Path) -> None:
    (run,) = (training / "runs").iterdir()
    before = (run / FILE).stat().st_mtime_ns if (run / FILE).exists() else None
    status, output = call(run, *arguments)
    assert status == 2
    assert said in output
    assert len(output.splitlines()) == 1
    assert ((run / FILE).stat().st_mtime_ns if (run / FILE).exists() else None) == before


def test_a_run_that_nobody_records(tmp_path: Path) -> None:
    run = new_run(tmp_path, name="old")
    say_who_writes(run, pid=os.getpid(), state="finished")
    status, said = call("old", "--dir", tmp_path, "--every", 1)
    assert status == 1
    assert said == f"run {run.name} is finished: nobody listens, nothing was changed\n"
    # Killed: the file says that it runs, and the process is gone.
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    say_who_writes(run, pid=process.pid, state="running")
    status, said = call("old", "--dir", tmp_path, "--every", 1)
    assert status == 1
    assert "is crashed: nobody listens" in said
    assert not (run / FILE).exists()


def test_processes_that_train_together_are_left_alone(tmp_path: Path) -> None:
    run = new_run(tmp_path, name="many")
    for rank in (0, 1):
        say_who_writes(run, rank=rank, pid=os.getppid(), state="running")
    status, said = call("many", "--dir", tmp_path, "--every", 1)
    assert status == 2
    assert "recorded by 2 processes" in said
    assert not (run / FILE).exists()


def test_no_such_run(tmp_path: Path) -> None:
    status, said = call("nothing", "--dir", tmp_path, "--stop")
    assert status == 2
    assert "no run 'nothing'" in said

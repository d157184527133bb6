import importlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import statsbridge
from statsbridge.cli.demo import DEAD_BLOCK
from statsbridge.log.runs import run_state

from .conftest import run_command

DEAD = f"blocks.{DEAD_BLOCK}.relu1"


def test_the_dead_relu_is_dead_and_the_others_are_not() -> None:
    import torch

    from statsbridge.cli.demo_model import ResidualNetwork, kill

    torch.manual_seed(0)
    model = ResidualNetwork()
    assert kill(model, DEAD_BLOCK) == DEAD
    zeros = {}
    for name, module in model.named_modules():
        if name.endswith("relu1"):
            module.register_forward_hook(
                lambda _module, _inputs, output, name=name: zeros.update({name: (output == 0).double().mean().item()})
            )
    model(torch.rand(64, 1, 8, 8))
    assert zeros.pop(DEAD) == 1.0
    assert len(zeros) == 2
    assert all(0.2 < fraction < 0.7 for fraction in zeros.values())


def test_the_demo_trains_with_one_thread_and_gives_the_others_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several take many times as long for tensors so small, and wait for each other where the machine is busy."""
    import torch

    demo = importlib.import_module("statsbridge.cli.demo")
    used: list[int] = []

    def evaluate(*_: object) -> dict[str, float]:
        used.append(torch.get_num_threads())
        if len(used) == 2:
            raise ZeroDivisionError
        return {"val/loss": 1.0, "val/accuracy": 0.5}

    monkeypatch.setattr(demo, "_evaluate", evaluate)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with pytest.raises(ZeroDivisionError):
            demo.train(str(tmp_path), 2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert used == [1, 1]


@pytest.mark.slow
def test_the_demo_learns_and_its_table_shows_what_is_dead(tmp_path: Path) -> None:
    before = os.times()
    result = run_command("demo", "--dir", str(tmp_path))
    assert result.returncode == 0, result.stderr
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 60
    (run,) = tmp_path.iterdir()
    data = statsbridge.load(run)
    assert run_state(run) == "finished"
    assert data.info["config"]["dead"] == DEAD
    scalars = data.scalars.to_pylist()
    accuracies = [one["value"] for one in scalars if one["name"] == "val/accuracy"]
    assert len(accuracies) == 15
    assert accuracies[-1] > 0.9
    zeros = data.series(DEAD, "activation", "zero_fraction")
    assert set(zeros["value"].to_pylist()) == {1.0}
    alerted = set(zeros["step"].to_pylist()) - set(range(0, 345, 10))
    assert len(zeros) == 35 + len(alerted)
    # Where the machine is slow, what follows from the dead units is found later, and has a burst of its own.
    bursts = data.events["kind"].to_pylist().count("burst")
    assert 1 <= bursts <= 3
    assert 4 * bursts <= len(alerted) <= 5 * bursts, "of the steps of a burst one may be sampled anyhow"
    gradients = data.series(f"blocks.{DEAD_BLOCK}.conv1", "parameter_grad", "l2", tensor="weight")
    assert gradients["value"].to_pylist() == [0.0] * len(zeros)
    assert f"critical at step 0: 100.0% of the units of module {DEAD} are dead" in result.stderr
    lines = result.stdout.splitlines()
    marked = [line.split()[1] for line in lines if "!! dead" in line and line.split()[0].isdigit()]
    assert marked == [DEAD]
    assert f"{DEAD} was broken on purpose" in result.stdout
    assert f"statsbridge show {run} --site parameter_grad" in result.stdout
    assert "epoch 15/15" in result.stderr


@pytest.mark.slow
def test_the_commands_that_the_demo_offers_work(tmp_path: Path) -> None:
    printed = run_command("demo", "--dir", str(tmp_path), "--epochs", "1").stdout
    offered = [line.strip() for line in printed.splitlines() if line.startswith("  ")]
    commands = [shlex.split(line, comments=True)[1:] for line in offered if line.startswith("statsbridge ")]
    assert [arguments[0] for arguments in commands] == ["diagnose", "show", "view", "report"]
    expected = {
        "diagnose": 1,
        "show": 0,
        "report": 0,
    }  # something critical is found; the page is a server, and has tests
    for arguments in commands:
        if arguments[0] in expected:
            more = ["-o", str(tmp_path / "report.html")] if arguments[0] == "report" else []
            result = run_command(*arguments, *more)
            assert (result.returncode, result.stderr) == (expected[arguments[0]], ""), arguments
    python = [line for line in offered if line.startswith("data")]
    assert len(python) == 3
    code = "; ".join(["import statsbridge", *python])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_ends_the_demo_quietly_and_keeps_the_run(tmp_path: Path) -> None:
    code = "from statsbridge.cli import app; app()"
    arguments = [sys.executable, "-c", code, "demo", "--epochs", "1000", "--dir", str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while (line := process.stderr.readline()) and not line.startswith("epoch 1/1000"):
            assert line.startswith("statsbridge: ")  # alerts
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert all(
        line.startswith(("epoch ", "statsbridge: warning at", "statsbridge: critical at"))
        for line in errors.splitlines()
    )
    (run,) = tmp_path.iterdir()
    assert statsbridge.load(run).stats.num_rows > 0


def test_without_scikit_learn_the_demo_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['sklearn'] = None; from statsbridge.cli import app; app()"
    arguments = [sys.executable, "-c", code, "demo", "--dir", str(tmp_path)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "statsbridge: the demo needs sklearn, not installed here: pip install 'statsbridge[demo]'\n"
    )


def test_where_statsbridge_is_disabled_the_demo_says_so(tmp_path: Path) -> None:
    result = run_command("demo", "--dir", str(tmp_path), STATSBRIDGE_DISABLED="1")
    assert (result.returncode, result.stdout) == (2, "")
    assert "$STATSBRIDGE_DISABLED=1" in result.stderr
    assert list(tmp_path.iterdir()) == []

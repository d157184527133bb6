"""`statsbridge preflight`: the user's function, and every wrong thing that can be given instead."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from statsbridge.cli import app

SETUP = """
import torch
from torch import nn

NUMBER = 3

def setup():
    print("building the model")
    torch.manual_seed(0)
    labels = torch.arange(40) % 2
    inputs = torch.randn(40, 3) + labels[:, None] * 3.0 - 1.5
    loader = [(inputs[i:i + 10], labels[i:i + 10]) for i in range(0, 40, 10)]
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), nn.CrossEntropyLoss(), loader

def keywords():
    model, loss, loader = setup()
    return {"model": model, "loss": loss, "loader": loader, "classes": 2}

def broken():
    model, loss, loader = setup()
    loader[1][0][4, 2] = float("nan")
    return model, loss, loader

def pair():
    return setup()[:2]

def partial_dict():
    return {"model": setup()[0]}

def mistyped():
    return {**keywords(), "clases": 2}

def needs(path):
    return setup()

def fails():
    raise FileNotFoundError("no images in data/")

def leaves():
    raise SystemExit(2)

def wrong_model():
    return 3, *setup()[1:]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_training.py").write_text(SETUP)
    (tmp_path / "half.py").write_text("import not_there_at_all\n")
    (tmp_path / "wrong.py").write_text("def f(:\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(1)\n")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other, as these tensors are tiny
    yield tmp_path
    torch.set_num_threads(threads)
    for name in ("my_training", "half", "wrong", "script"):
        sys.modules.pop(name, None)


def preflight(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["preflight", *arguments])


def test_a_healthy_training_passes() -> None:
    result = preflight("my_training:keywords")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "✓ preflight: passed"
    assert sum(line.startswith("  ✓") for line in lines) == 6
    assert "building the model" in result.stderr
    assert "building" not in result.stdout


def test_a_failure_has_status_1_and_says_why() -> None:
    result = preflight("my_training:broken")
    assert result.exit_code == 1
    assert "  ✗ check data" in result.stdout
    assert "sample 14, feature 2" in result.stdout
    assert result.stdout.count("not run") == 5


def test_json() -> None:
    result = preflight("my_training:broken", "--format", "json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["passed"] is False
    assert document["tests"][0]["name"] == "check_data"
    assert document["tests"][0]["numbers"]["nan_count"] == 1
    assert document["not_run"][0] == "initial_loss_check"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("my_training", "does not say MODULE:FUNCTION"),
        ("my_training:", "does not say MODULE:FUNCTION"),
        ("my_training.py:setup", "my_training.py is a file: give the module's name, my_training:setup"),
        ("src/my_training.py:setup", "give the module's name, src.my_training:setup"),
        ("nowhere:setup", "there is no module nowhere in "),
        ("my_training.inner:setup", "there is no module my_training.inner in "),
        (
            "half:setup",
            "importing half failed: ModuleNotFoundError: No module named 'not_there_at_all' (half.py, line 1)",
        ),
        ("wrong:f", "importing wrong failed: SyntaxError: "),
        ("script:setup", "importing script failed: SystemExit: 1 (script.py, line 2)"),
        ("my_training:setpu", "unknown function of my_training setpu: did you mean setup?"),
        ("my_training:NUMBER", "my_training:NUMBER is a int: give a function"),
        ("my_training:needs", "has to be called without arguments: missing a required argument: 'path'"),
        ("my_training:fails", "my_training:fails failed: FileNotFoundError: no images in data/ (my_training.py, line"),
        ("my_training:leaves", "my_training:leaves failed: SystemExit: 2"),
        ("my_training:pair", "returned a tuple of 2: it has to return (model, loss, loader)"),
        ("my_training:partial_dict", "returned a dict without loss, loader"),
        ("my_training:mistyped", "unknown keyword returned by my_training:mistyped clases: did you mean classes?"),
        ("my_training:wrong_model", "model is a int: give a torch.nn.Module"),
    ],
)
def test_every_wrong_thing_is_one_line(target: str, said: str) -> None:
    result = preflight(target)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    *_, line = result.stderr.splitlines()
    assert line.startswith("statsbridge: ")
    assert said in line


def test_an_unknown_format_is_said() -> None:
    result = preflight("my_training:setup", "--format", "xml")
    assert result.exit_code == 2
    assert "unknown format xml" in result.stderr


def test_the_path_is_as_before(folder: Path) -> None:
    before = list(sys.path)
    preflight("my_training:pair")
    assert sys.path == before

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from log_rows import new_run, write_run
from typer.testing import CliRunner, Result

from statsbridge.cli import app

EPOCHS = np.arange(1, 51)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run that overfits, the curve of figures.md."""
    directory = tmp_path_factory.mktemp("curves")
    train = np.exp(-EPOCHS / 8) + 0.05 + 0.01 * np.random.default_rng(0).normal(size=50)
    validation = 0.9 * np.exp(-EPOCHS / 8) + 0.25 + 0.004 * EPOCHS
    validation += 0.01 * np.random.default_rng(10).normal(size=50)
    steps = [*range(50), *range(50)]
    columns = {
        "step": steps,
        "iteration": steps,
        "time": 1.7e9,
        "name": ["loss"] * 50 + ["val_loss"] * 50,
        "value": [*train, *validation],
        "epoch": [float(step + 1) for step in steps],
    }
    write_run(new_run(directory, name="overfit"), {"scalars": columns})
    return directory


def curves(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["curves", "overfit", "--dir", str(folder), *arguments])


def said(result: Result) -> str:
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def test_the_verdict_stands_below_the_numbers(folder: Path) -> None:
    lines = said(curves(folder, "--train", "loss", "--val", "val_loss")).splitlines()
    facts = {line[:26].strip(): line[26:].split()[0] for line in lines if line[26:].strip()}
    assert facts["last training value"] == "0.0651"
    assert facts["gap"] == "0.385"
    assert facts["slope"] == "0.00386"
    assert facts["wiggle"] == "0.0249"
    assert any("epoch 26, step 25" in line for line in lines)
    assert lines[lines.index("overfitting") + 1].startswith("- validation has risen by 0.0463")
    assert "hides" in "\n".join(lines)


def test_json_csv_and_markdown(folder: Path) -> None:
    found = json.loads(said(curves(folder, "--val", "val_loss", "--format", "json")))
    assert (found["verdict"], found["lowest_epoch"], found["points"]) == ("overfitting", 26, 50)
    rows = list(csv.DictReader(io.StringIO(said(curves(folder, "--val", "val_loss", "--format", "csv")))))
    assert len(rows) == 50
    assert float(rows[-1]["validation"]) == found["last_validation"]
    assert said(curves(folder, "--val", "val_loss", "--format", "markdown")).startswith("**overfitting**: validation")


def test_without_validation_it_says_what_cannot_be_seen(folder: Path) -> None:
    assert "without a validation curve overfitting cannot be seen" in said(curves(folder))


def test_any_smoothing_stands_beside_the_raw_values(folder: Path) -> None:
    for weight in ("0.5", "0.99"):
        found = json.loads(said(curves(folder, "--smoothing", weight, "--format", "json")))["smoothing"]
        assert found["weight"] == float(weight)
        assert found["last"] != found["last_uncorrected"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--val", "val/loss"], "unknown scalar val/loss: did you mean val_loss?"),
        (["--smoothing", "1"], "smoothing=1.0: give a weight between 0 and 1"),
        (["--last", "1"], "last=1: a slope needs at least 3 points"),
        (["--format", "xml"], "unknown format xml: Choices: table, json, csv, markdown"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(folder: Path, arguments: list[str], text: str) -> None:
    result = curves(folder, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert text in result.stderr

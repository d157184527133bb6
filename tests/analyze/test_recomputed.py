"""Recomputed scalars: what agrees, what does not, and files that are none."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest
from log_rows import new_run, scalar_rows, write_run
from typer.testing import CliRunner

from statsbridge import ConfigError, load
from statsbridge.analyze.recomputed import Difference, compare_scalars, read_recomputed
from statsbridge.cli import app


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = new_run(tmp_path / "runs")
    values = (0.5, 0.25, math.nan, math.inf, 0.0)
    again = scalar_rows(1, val=3.0) | {"iteration": None}
    write_run(run, *({"scalars": scalar_rows(n, loss=v, val=2 * v)} for n, v in enumerate(values)), {"scalars": again})
    write_run(run, {"scalars": scalar_rows(0, loss=99.0)}, rank=1)
    return run


def compared(run: Path, text: str, tolerance: float = 1e-6) -> list[Difference]:
    file = run / "values.csv"
    file.write_text(text)
    return compare_scalars(load(run).scalars, read_recomputed(file), tolerance)


def test_equal_values_are_equal_nan_and_infinity_too(run: Path) -> None:
    text = "name,step,value\nloss,0,0.5\nloss,2,NaN\nloss,3,inf\nloss,4,-0.0\nval,0,1.0\n"
    assert compared(run, text, 0) == []


def test_a_value_that_differs_is_found_with_both_numbers(run: Path) -> None:
    (found,) = compared(run, "step,value,name,note\n0,0.5,loss,a\n1,0.2501,loss,b\n")
    assert found == Difference("different", 3, "loss", 1, 0.25, 0.2501)
    assert found.relative == pytest.approx(0.0001 / 0.2501)


def test_the_tolerance_is_relative_to_the_larger_value(run: Path) -> None:
    text = "name,step,value\nloss,1,0.26\n"
    assert len(compared(run, text, 0.038)) == 1
    assert compared(run, text, 0.039) == []
    assert len(compared(run, "name,step,value\nloss,4,1e-300\n", 0.9)) == 1


@pytest.mark.parametrize("text", ["loss,2,1.0", "loss,3,-inf", "loss,3,1e308", "loss,0,nan"])
def test_nothing_is_near_what_is_not_finite(run: Path, text: str) -> None:
    assert [one.kind for one in compared(run, f"name,step,value\n{text}\n", 1e9)] == ["different"]


def test_the_last_value_of_the_lowest_rank_counts(run: Path) -> None:
    assert compared(run, "name,step,value\nval,1,3.0\nloss,0,0.5\n", 0) == []


def test_a_step_that_was_not_recorded_is_missing(run: Path) -> None:
    assert compared(run, "name,step,value\nloss,9,1.0\n") == [Difference("missing", 2, "loss", 9, None, 1.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column name, step, value"),
        ("name,value\nloss,1\n", "has no column step: the first line must name the columns name, step, value"),
        ("name,step,value\nloss,0,0.5\nloss,1.5,1\n", "line 3: step '1.5' is no whole number"),
        ("name,step,value\nloss,1,high\n", "line 2: value 'high' is no number"),
        ("name,step,value\nloss,1\n", "line 2: fewer cells than columns"),
        ("name,step,value\nlos,1,1\n", "unknown scalar los: did you mean loss"),
    ],
)
def test_a_bad_file_is_refused_by_line(run: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compared(run, text)


def test_a_file_that_cannot_be_read_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.csv cannot be read: No such file"):
        read_recomputed(run / "nothing.csv")
    (run / "binary.csv").write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(ConfigError, match="is no CSV file"):
        read_recomputed(run / "binary.csv")


@pytest.mark.parametrize("tolerance", [-1.0, math.nan, math.inf])
def test_a_tolerance_that_is_none_is_refused(run: Path, tolerance: float) -> None:
    with pytest.raises(ConfigError, match="give a number from 0 on"):
        compared(run, "name,step,value\n", tolerance)


def test_the_command(run: Path) -> None:
    file = run / "values.csv"
    file.write_text("name,step,value\nloss,0,0.5000000001\nloss,1,0.3\nloss,7,1\n")

    def command(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["verify", str(run), "--scalars", str(file), *arguments])
        return result.exit_code, result.stdout

    status, text = command()
    assert status == 1
    assert "1 of 3 values are as recorded (relative difference up to 1e-06)" in text
    status, text = command("--format", "csv", "--tolerance", "0")
    assert status == 1
    assert [(row["kind"], row["line"]) for row in csv.DictReader(io.StringIO(text))] == [
        ("different", "2"),
        ("different", "3"),
        ("missing", "4"),
    ]
    status, text = command("--format", "json")
    document = json.loads(text)
    assert (document["compared"], document["differences"][0]["recorded"]) == (3, 0.25)
    file.write_text("name,step,value\nloss,0,0.5\n")
    assert command() == (0, f"{file}: 1 of 1 value is as recorded (relative difference up to 1e-06)\n")

"""What a result prints, saves, draws and puts into a run."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from recording import events, scalars
from torch import nn

import statsbridge
from statsbridge import ConfigError
from statsbridge.debug import Result
from statsbridge.debug.result import named, shown


def made(**changes: object) -> Result:
    fields = {
        "name": "some_test",
        "passed": False,
        "numbers": {"loss": 0.123456, "steps": 7, "optimizer": "Adam <b>", "limit": None, "last": math.inf},
        "explanation": "It failed, since " + "so much was wrong that the line is too long for one " * 2 + "\nTry more.",
        **changes,
    }
    return Result(**fields)  # type: ignore[arg-type]


def test_a_terminal_shows_the_outcome_the_numbers_and_the_explanation() -> None:
    lines = str(made()).splitlines()
    assert lines[0] == "✗ some_test: failed"
    assert lines[1:6] == [
        "    loss       0.1235",
        "    steps      7",
        "    optimizer  Adam <b>",
        "    limit      –",
        "    last       inf",
    ]
    assert len(lines) == 9
    assert all(len(line) <= 100 for line in lines)
    assert lines[-1] == "  Try more."


@pytest.mark.parametrize(("passed", "first"), [(True, "✓ t: passed"), (None, "– t: undecided")])
def test_the_other_outcomes(passed: bool | None, first: str) -> None:
    assert str(made(name="t", passed=passed, numbers={}, explanation="")) == first


def test_a_file_has_the_table_or_else_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "it.csv"
    made(table={"step": [0, 1, 2], "loss": [1.5, None, math.nan]}).to_csv(path)
    assert list(csv.reader(path.open())) == [["step", "loss"], ["0", "1.5"], ["1", ""], ["2", "nan"]]
    made().to_csv(str(path))
    rows = list(csv.reader(path.open()))
    assert rows[:2] == [["name", "value"], ["loss", "0.123456"]]
    assert rows[3:] == [["optimizer", "Adam <b>"], ["limit", ""], ["last", "inf"]]


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"to_csv: .*nowhere.* cannot be written: No such file"):
        made().to_csv(tmp_path / "nowhere" / "it.csv")


def test_a_run_gets_numbers_outcome_figure_and_explanation(tmp_path: Path) -> None:
    with statsbridge.init(nn.Linear(2, 2), dir=tmp_path) as run:
        run.step(loss=1.0)
        made().log_to(run)
        made(name="other", passed=None).log_to(run)
    assert run.path is not None
    data = statsbridge.load(run.path)
    found = {name for name in data.scalars["name"].to_pylist() if "/" in name}
    assert found == {
        "some_test/passed",
        *(f"{test}/{name}" for test in ("some_test", "other") for name in ("loss", "steps", "last")),
    }
    assert scalars(data.scalars, "some_test/loss") == {0: 0.123456}
    assert scalars(data.scalars, "some_test/passed") == {0: 0.0}
    assert scalars(data.scalars, "some_test/last") == {0: math.inf}
    notes = [event["message"] for event in events(data, "note")]
    assert notes[0].startswith("some_test: failed. It failed, since so much was wrong")
    assert notes[0].endswith("Try more.")
    figures = [event for event in data.events.to_pylist() if event["kind"] == "figure"]
    assert len(figures) == 2


def test_the_figure_of_numbers_shows_them_as_text() -> None:
    figure = made(name="<i>test").figure()
    assert figure.layout.title.text == "&lt;i&gt;test: failed"
    names, values = figure.data[0].cells.values
    assert list(names) == ["loss", "steps", "optimizer", "limit", "last"]
    assert list(values) == ["0.12346", "7", "Adam &lt;b&gt;", "–", "inf"]


def test_words_for_numbers_and_names() -> None:
    assert [shown(value) for value in (None, 1.0, 12345.678, 1e-9, math.nan, 5, "text")] == [
        "–",
        "1",
        "1.235e+04",
        "1e-09",
        "nan",
        "5",
        "text",
    ]
    assert named("ab") == "a, b"
    assert named(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from statsbridge.cli import app
from statsbridge.log import list_runs


def query(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["query", *arguments, "--dir", str(folder)])


def said(result: Result) -> str:
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


SQL = "SELECT step, name, value FROM scalars ORDER BY step, name"


def test_table_json_csv_and_markdown_say_the_same(runs: Path) -> None:
    listed = json.loads(said(query(runs, "newer", SQL, "--format", "json")))
    assert listed == [
        {"step": 0, "name": "loss", "value": 2.5},
        {"step": 0, "name": "lr", "value": 0.1},
        {"step": 10, "name": "loss", "value": "NaN"},
        {"step": 10, "name": "lr", "value": 0.1},
        {"step": 20, "name": "loss", "value": "Infinity"},
        {"step": 20, "name": "lr", "value": 0.1},
    ]
    rows = list(csv.DictReader(io.StringIO(said(query(runs, "newer", SQL, "--format", "csv")))))
    assert rows == [{name: str(value) for name, value in row.items()} for row in listed]
    header, *lines = said(query(runs, "newer", SQL)).splitlines()
    assert header.split() == ["step", "name", "value"]
    assert lines[0].split() == ["0", "loss", "2.5"]
    header, rule, *lines = said(query(runs, "newer", SQL, "--format", "markdown")).splitlines()
    assert (header, rule, lines[0]) == ("| step | name | value |", "| --- | --- | --- |", "| 0 | loss | 2.5 |")


def test_several_runs_are_one_table_with_the_run(runs: Path) -> None:
    sql = "SELECT run, count(*) AS rows FROM scalars GROUP BY run ORDER BY run"
    found = json.loads(said(query(runs, "older", "newer", "older", sql, "--format", "json")))
    assert found == [
        {"run": run.id, "rows": {"older": 2, "newer": 6}[run.name]} for run in list_runs(runs)
    ]  # a run named twice counts once


def test_times_decimals_and_lists_are_plain(runs: Path) -> None:
    sql = "SELECT sum(count) AS total, min(time) AS first, [1, 2] AS list, NULL AS nothing FROM stats"
    (row,) = json.loads(said(query(runs, "newer", sql, "--format", "json")))
    # 3 steps of 10 + 64 + 64 + 0 + 10 + 9 + 90 elements.
    assert row == {"total": 741, "first": "2023-11-14T22:13:20+00:00", "list": [1, 2], "nothing": None}


def test_a_long_table_is_cut_and_says_so(runs: Path) -> None:
    sql = "SELECT range FROM range(1000)"
    lines = said(query(runs, "newer", sql)).splitlines()
    assert lines[-1] == "and 800 more rows: --format csv has them all"
    assert len(said(query(runs, "newer", sql, "--format", "csv")).splitlines()) == 1001


def test_text_from_a_run_is_shown_and_not_obeyed(runs: Path) -> None:
    sql = "SELECT '[red]x[/red] | <b> ' || chr(27) || '[31m' AS evil"
    assert "[red]x[/red] | <b> \\x1b[31m" in said(query(runs, "newer", sql))
    line = said(query(runs, "newer", sql, "--format", "markdown")).splitlines()[2]
    assert line == r"| [red]x[/red] \| \<b> \x1b[31m |"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["newer", "SELEC 1"], 'Parser Error: syntax error at or near "SELEC"'),
        (["newer", "SELECT stdd FROM stats"], 'Candidate bindings: "std"'),
        (["newer", "DELETE FROM stats"], "one SELECT, and nothing that writes"),
        (["newer", "SELECT * FROM '/etc/hostname'"], "does not exist"),
        (["newest", "SELECT 1"], "no run 'newest'"),
        (["newer", "SELECT 1", "--format", "xml"], "unknown format xml: Choices: table, json, csv, markdown"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(runs: Path, arguments: list[str], text: str) -> None:
    result = query(runs, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert text in result.stderr


def test_columns_of_one_name_are_all_there(runs: Path) -> None:
    sql = "SELECT one.step, two.value, 7 AS step_1, two.step FROM scalars one JOIN scalars two USING (seq) LIMIT 1"
    (row,) = json.loads(said(query(runs, "newer", sql, "--format", "json")))
    assert list(row) == ["step", "value", "step_1", "step_2"]
    assert row["step"] == row["step_2"]
    header = said(query(runs, "newer", sql, "--format", "csv")).splitlines()[0]
    assert header == "step,value,step_1,step_2"

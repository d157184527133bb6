import csv
import io
import json
from pathlib import Path
from typing import Any

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


#: What DuckDB returns → what JSON has of it.
VALUES: dict[str, Any] = {
    "DATE 'infinity'": "infinity",
    "DATE '-infinity'": "-infinity",
    "DATE '2020-02-29'": "2020-02-29",
    "DATE '290000-01-01'": "+290000-01-01",
    "DATE '0044-03-15 (BC)'": "-0043-03-15",
    "'infinity'::TIMESTAMP": "infinity",
    "'-infinity'::TIMESTAMPTZ": "-infinity",
    "'infinity'::TIMESTAMP_S": "infinity",
    "'-infinity'::TIMESTAMP_NS": "-infinity",
    "TIMESTAMP '1999-12-31 23:59:59'": "1999-12-31T23:59:59",
    "TIMESTAMP '200000-01-01 00:00:00.5'": "+200000-01-01T00:00:00.500000",
    "'290000-01-01 00:00:00'::TIMESTAMP_S": "+290000-01-01T00:00:00",
    "'1990-01-01 00:00:00.123456789'::TIMESTAMP_NS": "1990-01-01T00:00:00.123456789",
    "to_timestamp(2147.483647)": "1970-01-01T00:35:47.483647+00:00",
    "TIME '24:00:00'": "24:00:00",
    "TIME '12:34:56.789'": "12:34:56.789000",
    "INTERVAL 1 MONTH": "1 month",
    "-INTERVAL 14 MONTH": "-1 year -2 months",
    "INTERVAL '1 month 2 days -3 hours'": "1 month 2 days -03:00:00",
    "INTERVAL 0 DAY": "00:00:00",
    "TIMESTAMP '2020-01-03 00:00:01' - TIMESTAMP '2020-01-01'": "2 days 00:00:01",
    "170141183460469231731687303715884105727::HUGEINT": 170141183460469231731687303715884105727,
    "18446744073709551615::UBIGINT": 18446744073709551615,
    "1.5::DECIMAL(4, 1)": 1.5,
    "12345678901234567890123456789012345.678::DECIMAL(38, 3)": 12345678901234567890123456789012345.678,
    "[1, NULL, 3]": [1, None, 3],
    "[1, 2]::INTEGER[2]": [1, 2],
    "[[DATE 'infinity'], NULL]": [["infinity"], None],
    "{'a': 'infinity'::TIMESTAMP, 'b': [INTERVAL 1 DAY], 'c': 1.50}": {"a": "infinity", "b": ["1 day"], "c": 1.5},
    "{'a': 'nan'::DOUBLE}": {"a": "NaN"},
    "MAP {'x': 1, 'y': NULL}": [["x", 1], ["y", None]],
    "MAP {DATE 'infinity': {'a': INTERVAL 1 YEAR}}": [["infinity", {"a": "1 year"}]],
    "'\\xAA\\x00'::BLOB": "aa00",
    "'12345678-1234-1234-1234-123456789abc'::UUID": "12345678-1234-1234-1234-123456789abc",
    "'a'::ENUM('a', 'b')": "a",
    "1::UNION(number INTEGER, text VARCHAR)": 1,
    "'{\"a\": 1}'::JSON": '{"a": 1}',
    "true": True,
    "NULL": None,
}


@pytest.mark.parametrize("expression", VALUES)
def test_every_value_prints_in_every_format(runs: Path, expression: str) -> None:
    value, sql = VALUES[expression], f"SELECT {expression} AS x"
    (row,) = json.loads(said(query(runs, "newer", sql, "--format", "json")))
    assert row == {"x": value}
    ((cell,),) = list(csv.reader(io.StringIO(said(query(runs, "newer", sql, "--format", "csv")))))[1:]
    shown = said(query(runs, "newer", sql)).split("\n", 1)[1].strip()
    markdown = said(query(runs, "newer", sql, "--format", "markdown")).splitlines()[2]
    if isinstance(value, dict | list):
        assert json.loads(cell) == value
        assert json.loads(shown) == value
        assert markdown.replace("\\", "") == f"| {json.dumps(value)} |"
    elif not isinstance(value, bool):
        assert cell == ("" if value is None else cell if isinstance(value, float) else str(value))
        assert shown == ("" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value))
        assert markdown == f"| {shown} |"


def test_csv_has_all_digits_of_a_decimal(runs: Path) -> None:
    sql = "SELECT 12345678901234567890123456789012345.678::DECIMAL(38, 3) AS x, [1.25, 3.00] AS list"
    assert said(query(runs, "newer", sql, "--format", "csv")).splitlines()[1] == (
        '12345678901234567890123456789012345.678,"[1.25, 3]"'
    )


def test_whole_numbers_of_any_length(runs: Path) -> None:
    sql = "SELECT x::BIGNUM AS x FROM (VALUES ('-5'), ('0'), ('123456789012345678901234567890')) AS t(x)"
    result = query(runs, "newer", sql, "--format", "json")
    if "Type with name BIGNUM does not exist" in result.stderr:
        pytest.skip("a DuckDB before 1.4")
    assert [row["x"] for row in json.loads(said(result))] == [-5, 0, 123456789012345678901234567890]

import csv
import io
import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from statsbridge.cli import app
from statsbridge.cli.ls import size
from statsbridge.log import list_runs


def ls(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["ls", *arguments])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def test_the_newest_run_comes_first(runs: Path) -> None:
    header, newer, older = ls(str(runs)).splitlines()
    assert header.split() == [
        "id", "name", "started", "(UTC)", "state", "steps", "sampled", "rows", "size",
    ]  # fmt: skip
    assert newer.split()[1] == "newer"
    # 3 steps of 7 rows of stats and 2 scalars each, and 14 events.
    assert newer.split()[4:8] == ["finished", "3", "3", "41"]
    assert older.split()[1] == "older"
    assert older.split()[4:8] == ["finished", "1", "0", "2"]


def test_json_says_what_the_log_says(runs: Path) -> None:
    listed = json.loads(ls(str(runs), "--format", "json"))
    summaries = list_runs(runs)[::-1]
    assert [one["id"] for one in listed] == [summary.id for summary in summaries]
    for one, summary in zip(listed, summaries, strict=True):
        assert one["rows"] == dict(summary.rows)
        assert one["bytes"] == summary.bytes
        assert one["started"] == summary.created.isoformat()
        assert one["path"] == str(summary.path)


def test_csv_says_the_same(runs: Path) -> None:
    listed = json.loads(ls(str(runs), "--format", "json"))
    rows = list(csv.DictReader(io.StringIO(ls(str(runs), "--format", "csv"))))
    assert [row["id"] for row in rows] == [one["id"] for one in listed]
    assert [int(row["rows_stats"]) for row in rows] == [one["rows"]["stats"] for one in listed] == [21, 0]


def test_an_empty_folder_is_no_error_and_says_what_to_do(tmp_path: Path) -> None:
    assert ls(str(tmp_path)).startswith(f"no runs in {tmp_path}: train with statsbridge.init(")
    assert json.loads(ls(str(tmp_path), "--format", "json")) == []


def test_before_the_first_run_the_default_folder_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ls().startswith("no runs in statsbridge-runs: ")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "no folder nowhere: "),
        ([".", "--format", "xml"], "unknown format xml: Choices: table, json, csv"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["ls", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert said in result.stderr


def test_a_run_that_cannot_be_read_is_named_and_the_others_listed(runs: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(runs, tmp_path / "copy"))
    damaged, healthy = sorted(copy.iterdir())
    (damaged / "run.json").write_text("{")
    result = CliRunner().invoke(app, ["ls", str(copy)])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["id", healthy.name]
    assert len(result.stderr.splitlines()) == 1
    assert str(damaged / "run.json") in result.stderr


def test_a_run_whose_folder_the_disk_withholds_is_named_and_the_others_listed(runs: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(runs, tmp_path / "copy"))
    damaged, healthy = sorted(copy.iterdir())
    shutil.rmtree(damaged / "stats", ignore_errors=True)
    (damaged / "stats").mkdir()
    (damaged / "stats" / "rank=0").symlink_to("rank=0")
    result = CliRunner().invoke(app, ["ls", str(copy)])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["id", healthy.name]
    assert len(result.stderr.splitlines()) == 1
    assert f"{damaged} cannot be read" in result.stderr


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1_234_567, "1.23 MB"),
        (999_999, "1 MB"),
        (5 * 10**12, "5 TB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text

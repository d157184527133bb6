"""`statsbridge check` and `compact`, as a user calls them."""

import json
from pathlib import Path

import pytest
from log_rows import new_run, stats_rows, write_run
from typer.testing import CliRunner

from statsbridge.cli import app
from statsbridge.log import load
from statsbridge.log.parts import list_parts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = new_run(tmp_path, name="mine")
    write_run(run, *({"stats": stats_rows(step)} for step in range(6)))
    return run


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_compact_then_check(run: Path):
    before = load(run).stats.to_pylist()
    status, text = call("compact", run)
    assert (status, len(list_parts(run, "stats"))) == (0, 1)
    assert "6 -> 1 part, 30 rows merged" in text
    assert load(run).stats.to_pylist() == before
    status, text = call("check", "mine", "--dir", run.parent)
    assert status == 0
    assert "no row is missing" in text


def test_check_says_what_is_damaged_and_repair_puts_it_aside(run: Path):
    part = list_parts(run, "stats")[2]
    part.path.write_bytes(b"nothing")
    status, text = call("check", run)
    assert status == 1
    assert part.path.name in text
    assert "10-14" in text
    assert "--repair" in text
    status, text = call("check", run, "--format", "json")
    assert [(entry["kind"], entry["first"]) for entry in json.loads(text)] == [("damaged", 10), ("missing", 10)]
    assert call("check", run, "--format", "csv")[1].splitlines()[0] == "kind,file,first,last,message"
    status, text = call("check", run, "--repair")
    assert status == 1
    assert (run / "damaged" / part.name).read_bytes() == b"nothing"
    status, text = call("check", run)
    assert status == 0
    assert "set_aside" in text


@pytest.mark.parametrize("command", ["check", "compact"])
def test_what_is_no_run_and_what_is_no_format(command: str, tmp_path: Path, run: Path):
    status, text = call(command, tmp_path / "none")
    assert status == 2
    assert "no run" in text
    assert call("check", run, "--format", "xml")[0] == 2

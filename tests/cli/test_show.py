import csv
import io
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import statsbridge
from statsbridge.cli import app
from statsbridge.cli.facts import first_and_last
from statsbridge.log import Writer

from .conftest import LONG_NAME, STEPS, scalars, stats_of_step, write_run

FLOW = ["stem", LONG_NAME, "head", "", "lost"]


def show(runs: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["show", "--dir", str(runs), *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def table_rows(output: str) -> list[list[str]]:
    """The cells of the table, the header first: columns are two spaces or more apart."""
    lines = output.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("depth"))
    end = lines.index("", start)
    return [re.split(r"\s{2,}", line.strip()) for line in lines[start:end]]


def test_the_table_lies_in_data_flow_order_with_the_recorded_numbers(runs: Path) -> None:
    header, *rows = table_rows(show(runs, "newer", "--step", "10"))
    assert header == [
        "depth", "module", "type", "mean", "std", "std over steps", "zero_fraction", "abs_max", "notes",
    ]  # fmt: skip
    assert rows[0] == ["1", "stem", "Conv2d", "-0.25", "1.5", "█▅▁", "0", "4"]
    assert rows[1] == ["2", LONG_NAME, "ReLU", "0.333", "0.5", "▄▄▄", "0.969", "1", "!! dead"]
    assert rows[2] == ["3", "head", "Linear", "10.1", "1.5", "▄▄▄", "0", "3.5", "!! large"]
    assert rows[3][:3] == ["3", "(model)", "Net"]
    assert rows[3][-1] == "!! nan"
    assert rows[4] == ["lost", "Conv2d", "(no_grad)"]


def test_the_header_says_which_run_and_step(runs: Path) -> None:
    first, second = show(runs, "newer").splitlines()[:2]
    run = statsbridge.load(sorted(runs.iterdir())[1])
    assert first == f"run {run.id}  name newer  finished"
    assert second == "activation at step 20  3 sampled steps (0 to 20)  loss 2.5 → inf"


def test_the_rules_that_marked_something_are_spelled_out(runs: Path) -> None:
    output = show(runs, "newer")
    assert "!! dead: zero_fraction > 0.8, most ReLU units are dead\n" in output
    assert "!! nan: nan_count > 0, some elements are NaN\n" in output
    assert "collapsed" not in output


def test_the_first_ten_alerts_and_how_many_more(runs: Path) -> None:
    lines = show(runs, "newer").splitlines()
    alerts = [line for line in lines if "internal_error" in line]
    assert len(alerts) == 10
    assert alerts[0] == r"!! internal_error at step 1 stem: number 1\nand a second line"
    assert alerts[1].startswith("! internal_error at step 2 ")
    assert lines[-1] == "and 3 more events of severity warning or critical"


def test_a_statistic_comes_with_its_course_and_its_change(runs: Path) -> None:
    header, *rows = table_rows(show(runs, "newer", "--statistic", "std, mean"))
    assert header[3:] == [
        "std", "std over steps", "change", "mean", "mean over steps", "change", "notes",
    ]  # fmt: skip
    assert rows[0][3:6] == ["1", "█▅▁", "-50%"]
    assert rows[2][6:9] == ["20.1", "▁▅█", "+2e+04%"]


def test_gradients_show_the_ratio_of_the_first_to_the_last_layer(runs: Path) -> None:
    output = show(runs, "newer", "--site", "parameter_grad")
    assert table_rows(output)[0] == [
        "depth", "module", "tensor", "type", "l2", "l2 over steps", "abs_mean", "std", "notes",
    ]  # fmt: skip
    ratio = "mean |gradient| of stem / head: 0.000667  !! vanishing: gradient ratio < 0.001"
    assert ratio in output


def test_json_holds_what_was_recorded_to_the_last_digit(runs: Path) -> None:
    document = json.loads(show(runs, "newer", "--format", "json", "--statistic", "mean,std"))
    data = statsbridge.load(sorted(runs.iterdir())[1])
    assert document["run"] == {
        "id": data.id,
        "name": "newer",
        "path": str(data.path),
        "state": "finished",
        "attempts": [],
    }
    assert [row["module"] for row in document["rows"]] == FLOW
    assert document["steps"] == list(STEPS)
    for row in document["rows"]:
        for statistic, trend in row["trends"].items():
            recorded = data.series(row["module"], "activation", statistic, tensor="")["value"].to_pylist()
            assert trend["values"] == recorded
            assert row["values"][statistic] == recorded[-1]
    assert document["rows"][1]["marks"] == [
        {
            "name": "dead",
            "severity": "critical",
            "statistic": "zero_fraction",
            "value": 0.96875,
            "threshold": 0.8,
        }
    ]
    assert document["rows"][-1]["status"] == "no_grad"
    assert len(document["events"]) == 13


def test_numbers_that_json_lacks_are_strings_that_float_reads(runs: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = show(runs, "newer", "--format", "json")
    document = json.loads(text, parse_constant=refuse)
    assert document["loss"] == {"first": 2.5, "last": "Infinity"}
    assert float(document["loss"]["last"]) == math.inf
    assert math.isnan(float(document["events"][0]["value"]))


def test_csv_holds_what_was_recorded_to_the_last_digit(runs: Path) -> None:
    text = show(runs, "newer", "--format", "csv", "--statistic", "mean", "--step", "10")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["module"] for row in rows] == FLOW
    assert list(rows[0]) == [
        "step", "depth", "order", "module", "type", "call", "tensor", "status", "marks",
        "mean", "mean_first", "mean_last", "mean_change",
    ]  # fmt: skip
    assert float(rows[1]["mean"]) == 1 / 3
    assert [float(rows[2][name]) for name in ("mean", "mean_first", "mean_last")] == [10.1, 0.1, 20.1]
    assert rows[1]["marks"] == "dead"
    assert (rows[4]["mean"], rows[4]["depth"], rows[4]["status"]) == ("", "", "no_grad")


@pytest.mark.parametrize(
    ("sort", "modules"),
    [
        ("depth", FLOW),
        ("value", ["head", LONG_NAME, "stem", "", "lost"]),
        ("change", ["head", "stem", LONG_NAME, "", "lost"]),
    ],
)
def test_sorts(runs: Path, sort: str, modules: list[str]) -> None:
    text = show(runs, "newer", "--format", "json", "--statistic", "mean", "--sort", sort)
    assert [row["module"] for row in json.loads(text)["rows"]] == modules


def test_only_modules_that_match(runs: Path) -> None:
    rows = json.loads(show(runs, "newer", "--format", "json", "--modules", "*e*d*"))["rows"]
    assert [row["module"] for row in rows] == [LONG_NAME, "head"]


@pytest.mark.parametrize("spelling", ["newer", "latest", "id", "beginning", "path", ""])
def test_every_way_to_name_a_run(runs: Path, spelling: str) -> None:
    run = max(runs.iterdir())
    name = {"id": run.name, "beginning": run.name[:-3], "path": str(run)}.get(spelling, spelling)
    text = show(runs, *([name] if name else []), "--format", "json")
    assert json.loads(text)["run"]["id"] == run.name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "no run 'nothing' in"),
        (["20"], "fits 2 runs"),
        (["older"], "no statistics in this run yet"),
        (["newer", "--dir", "nowhere"], "there are no runs in 'nowhere'"),
        (["newer", "--site", "activaton"], "unknown site activaton: did you mean activation?"),
        (["newer", "--statistic", "std,sdt"], "unknown statistic sdt: did you mean std?"),
        (["newer", "--step", "15"], "unknown step 15 (not sampled): Choices: 10, 20, 0"),
        (["newer", "--step", "last"], "step last is not a whole number"),
        (["newer", "--sort", "dept"], "unknown sort dept: did you mean depth?"),
        (["newer", "--format", "jsn"], "unknown format jsn: did you mean json?"),
        (["newer", "--modules", "steam"], "unknown module steam: did you mean stem?"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(runs: Path, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["show", "--dir", str(runs), *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("statsbridge: ")
    assert said in result.stderr


def copy_of_newer(runs: Path, directory: Path) -> Path:
    return Path(shutil.copytree(max(runs.iterdir()), directory / max(runs.iterdir()).name))


def test_a_run_that_cannot_be_read_is_one_line_and_status_2(runs: Path, tmp_path: Path) -> None:
    run = copy_of_newer(runs, tmp_path)
    (run / "run.json").write_text("{")
    result = CliRunner().invoke(app, ["show", str(run)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert "run.json cannot be read" in result.stderr


def test_a_damaged_part_is_named_on_stderr_and_the_rest_shown(runs: Path, tmp_path: Path) -> None:
    run = copy_of_newer(runs, tmp_path)
    (part,) = (run / "events").rglob("*.parquet")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    result = CliRunner().invoke(app, ["show", str(run), "--format", "json"])
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["rows"]) == 5
    assert len(result.stderr.splitlines()) == 1
    assert part.name in result.stderr


def test_a_step_with_nothing_finite_is_a_cross_not_a_gap(tmp_path: Path) -> None:
    steps = [stats_of_step(step) for step in STEPS]
    steps[1] |= {"std": [math.nan] * 7, "nan_count": [10, 0, 0, 0, 2, 0, 0]}
    write_run(tmp_path, "nan", [{"stats": stats} for stats in steps])
    rows = table_rows(show(tmp_path, "--statistic", "std"))
    assert rows[1][1:6] == ["stem", "Conv2d", "1", "█ ▁", "-50%"]
    assert rows[3][1:6] == ["head", "Linear", "1.5", "▄×▄", "+0%"]


def test_what_has_no_row_at_the_step_is_counted(tmp_path: Path) -> None:
    later = {name: values[:3] if isinstance(values, list) else values for name, values in stats_of_step(10).items()}
    write_run(tmp_path, "fewer", [{"stats": stats_of_step(0)}, {"stats": later}])
    assert "recorded at other steps, not at step 10: 2\n" in show(tmp_path)
    assert "recorded at other steps" not in show(tmp_path, "--step", "0")


def test_the_loss_of_the_lowest_rank_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path, "two", [{"scalars": scalars(step, 1.0 + step)} for step in STEPS])
    writer = Writer(run, rank=1)
    writer.submit(lambda: {"scalars": scalars(30, 99.0), "stats": stats_of_step(0)})
    assert writer.close()
    assert first_and_last(statsbridge.load(run), "loss") == (1.0, 21.0)
    assert first_and_last(statsbridge.load(run), "accuracy") is None
    assert "loss 1 → 21" in show(tmp_path)


def test_names_cannot_command_the_terminal(tmp_path: Path) -> None:
    stats = stats_of_step(0)
    stats["module"] = ["[red]a[/red]", "b\x1b[31m", "c\nd", "e", "f", "g", "h"]
    write_run(tmp_path, "evil\x1b]0;title\x07", [{"stats": stats}])
    output = show(tmp_path)
    assert "\x1b" not in output
    assert "[red]a[/red]" in output
    assert r"b\x1b[31m" in output
    assert r"c\nd" in output

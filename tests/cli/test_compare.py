import json
from pathlib import Path

import pytest
from log_rows import stats_rows, write_run
from typer.testing import CliRunner, Result

from statsbridge.cli import app
from statsbridge.log import create_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run, another like it, and one whose module m2 grows from step 3 on."""
    directory = tmp_path_factory.mktemp("compared")
    for name, rate in (("good", 0.1), ("alike", 0.1), ("bad", 0.5)):
        works = []
        for step in range(8):
            numbers = {column: [1.0] * 5 for column in ("std", "abs_mean", "min", "max", "zero_fraction")}
            if name == "bad" and step >= 3:
                numbers["std"] = [1.0, 1.0, 70.0, 90.0, 1.0]
            modules = ["m0", "m1", "[bold]m2[/bold]|", "m3", "m4"]
            works.append({"stats": stats_rows(step, 5, module=modules, **numbers)})
        write_run(create_run(directory, name=name, config={"lr": rate}, information={}), *works)
    return directory


def compare(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", *arguments, "--dir", str(folder)])


def said(result: Result) -> str:
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def test_the_first_step_and_module_and_what_was_set_differently(folder: Path) -> None:
    lines = said(compare(folder, "good", "bad")).splitlines()
    assert lines[0].endswith("name bad")
    assert lines[1] == "parts at step 3: std of activation of [bold]m2[/bold]| leaves the good range"
    assert lines[3].split() == ["3", "[bold]m2[/bold]|", "activation", "std", "70", "0.2", "to", "5", "2"]
    assert lines[5].split() == ["config.lr", "0.1", "0.5"]


def test_a_run_that_does_not_part_says_so_and_the_status_is_0_either_way(folder: Path) -> None:
    text = said(compare(folder, "good", "alike", "bad"))
    assert "does not part from the good range from step 0 to step 7" in text
    assert text.index("does not part") < text.index("parts at step 3")


def test_modules_that_only_one_side_has_are_counted(tmp_path: Path) -> None:
    for name, modules in (("good", ["m0", "m1", "m2"]), ("other", ["m0", "m3", "m4"])):
        numbers = {column: [1.0] * 3 for column in ("std", "abs_mean", "min", "max", "zero_fraction")}
        works = [{"stats": stats_rows(step, 3, module=modules, **numbers)} for step in range(4)]
        traced = {"modules": {"step": 0, "module": modules, "type": "Linear", "call": 0, "leaf": True}}
        write_run(create_run(tmp_path, name=name, config={}, information={}), traced, *works)
    text = said(compare(tmp_path, "good", "other"))
    assert "from step 0 to step 3; 4 modules that only one side has could not be compared" in text


def test_a_wide_factor_or_a_second_good_run_forgives(folder: Path) -> None:
    assert "does not part" in said(compare(folder, "good", "bad", "--factor", "100"))
    assert "does not part" in said(compare(folder, "good", "bad", "--also-good", "bad"))


def test_json_and_markdown(folder: Path) -> None:
    alike, bad = json.loads(said(compare(folder, "good", "alike", "bad", "--format", "json")))
    assert alike["partings"] == []
    (parting,) = bad["partings"]
    assert (parting["step"], parting["module"], parting["value"]) == (3, "[bold]m2[/bold]|", 70.0)
    assert bad["settings"] == [{"name": "config.lr", "good": [0.1], "other": 0.5}]
    lines = said(compare(folder, "good", "bad", "--format", "markdown")).splitlines()
    assert lines[4] == r"| 3 | [bold]m2[/bold]\| |  | activation | std | 70 | 0.2 to 5 | 2 |"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["good", "worse"], "no run 'worse'"),
        (["good", "bad", "--factor", "0.5"], "factor=0.5: give a number from 1 on"),
        (["good", "bad", "--format", "csv"], "unknown format csv: Choices: table, json, markdown"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(folder: Path, arguments: list[str], text: str) -> None:
    result = compare(folder, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert text in result.stderr


def test_the_headline_and_the_table_say_the_same(tmp_path: Path) -> None:
    for name, first, nan in (("good", 0, 0), ("late", 50, 0), ("broken", 50, 1)):
        numbers = {column: [1.0] * 2 for column in ("std", "abs_mean", "min", "max", "zero_fraction")}
        works = [{"stats": stats_rows(first + step, 2, nan_count=[0, nan], **numbers)} for step in range(4)]
        write_run(create_run(tmp_path, name=name, config={}, information={}), *works)
    text = said(compare(tmp_path, "good", "late"))
    assert "nothing to compare: the runs share no module, site and step" in text
    text = said(compare(tmp_path, "good", "broken"))
    assert "parts at step 50: nan_count of activation of m1 is not finite" in text
    assert "nothing to compare" not in text

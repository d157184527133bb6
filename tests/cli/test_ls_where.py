import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from statsbridge.cli import app
from statsbridge.log import create_run, list_runs
from statsbridge.log.writer import Writer

CONFIGS: list[dict[str, object]] = [
    {"lr": 0.1, "model": {"width": 8}, "name": "a", "seed": 1},
    {"lr": 1, "model": {"width": 16}, "sizes": [1, 2]},
    {"lr": "warm", "big": 10**30},
    {"nothing": {}},
]


EVENTS = {"kind": "note", "severity": ["critical", "warning", "warning"], "message": "x"}


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs, of which only the configs and the events differ."""
    folder = tmp_path_factory.mktemp("configured")
    for number, config in enumerate(CONFIGS):
        run = create_run(folder, name=f"run{number}", config=config, information={"versions": {"torch": "2.6"}})
        writer = Writer(run)
        assert writer.submit(lambda: {"scalars": {"step": 0, "name": ["loss"], "value": [1.0]}})
        if number == 1:
            assert writer.submit(lambda: {"events": EVENTS})
        assert writer.close()
    return folder


def names(folder: Path, where: str) -> list[str]:
    result = CliRunner().invoke(app, ["ls", str(folder), "--where", where, "--format", "json"])
    assert result.exit_code == 0, result.output
    return [run["name"] for run in json.loads(result.stdout)]


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("true", ["run3", "run2", "run1", "run0"]),
        ("events_critical = 0", ["run3", "run2", "run0"]),
        ("events_warning = 2 AND events_info = 0", ["run1"]),
        ("TRY_CAST(config.lr AS DOUBLE) > 0.5", ["run1"]),
        ("config.model.width >= 8 AND config.seed IS NOT NULL", ["run0"]),
        ("config.big = '1000000000000000000000000000000'", ["run2"]),
        ("config.sizes = '[1, 2]' -- a list is JSON", ["run1"]),
        ("name LIKE 'run%' AND rows_scalars = 1 AND state = 'finished' AND started > '2020-01-01'",
         ["run3", "run2", "run1", "run0"]),
        ("versions.torch <> '2.6'", []),
    ],
)  # fmt: skip
def test_only_runs_that_meet_the_condition(configured: Path, where: str, found: list[str]) -> None:
    assert names(configured, where) == found


def test_numbers_of_one_kind_compare_as_numbers(runs: Path) -> None:
    assert names(runs, "config.lr > 0.01 AND events_critical = 0") == ["older"]
    assert len(list_runs(runs)) == 2


def test_where_none_does_it_says_so(configured: Path) -> None:
    result = CliRunner().invoke(app, ["ls", str(configured), "--where", "steps > 5"])
    assert (result.exit_code, result.stdout) == (0, f"no runs in {configured} that meet this condition\n")


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("config.rate > 1", "rate"),
        ("lr > 1", "lr"),
        ("steps >", "syntax error"),
        (" ", "the condition is empty"),
        ("true) UNION SELECT place FROM runs --", "syntax error"),
        ("name IN (SELECT * FROM read_text('/etc/hostname'))", "Permission Error"),
    ],
)
def test_a_condition_that_is_none_is_one_line_and_status_2(configured: Path, where: str, text: str) -> None:
    result = CliRunner().invoke(app, ["ls", str(configured), "--where", where])
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert text in result.stderr
    assert "the condition" in result.stderr


@pytest.mark.parametrize("config", ["text", [1], 7])
def test_a_config_that_somebody_has_made_no_mapping_bars_no_other_run(config: object, tmp_path: Path) -> None:
    for name, given in (("good", {"lr": 0.1}), ("odd", {})):
        run = create_run(tmp_path, name=name, config=given, information={"versions": {"torch": "2.6"}})
    file = run / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "config": config, "versions": config}))
    assert names(tmp_path, "config.lr > 0") == ["good"]
    assert names(tmp_path, "versions.torch IS NULL") == ["odd"]

"""`statsbridge policy`: what is in force, what would leave, what has left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from log_rows import scalar_rows, write_run
from typer.testing import CliRunner

from statsbridge.cli import app
from statsbridge.log import create_run
from statsbridge.mirror import Destination, Selection
from statsbridge.mirror import policy as policy_module
from statsbridge.mirror.audit import Audit
from statsbridge.mirror.state import MirrorState

POLICY = """
[[destinations]]
backend = "mlflow"
url = "https://mlflow.lab.example"
channels = ["metrics", "alerts", "artifacts"]
sites = ["activation*"]
scalars = ["loss", "val/*"]
names = "hashed"
"""
LAB = "mlflow:https://mlflow.lab.example"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STATSBRIDGE_POLICY", raising=False)
    monkeypatch.setattr(policy_module, "system_file", lambda: tmp_path / "etc" / "policy.toml")
    return tmp_path


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["policy", *arguments])
    assert result.exit_code in (0, 1), result.output
    assert result.stderr == ""
    return result.exit_code, result.stdout


def facts(*arguments: str) -> tuple[int, dict[str, Any]]:
    status, text = command(*arguments, "--format", "json")
    return status, json.loads(text)


def restricted_run(folder: Path, address: str) -> Path:
    run = create_run(folder / "statsbridge-runs", name="mine", config=None, information={"restricted": True})
    write_run(run, {"scalars": scalar_rows(0, loss=1.0)})
    destination = Destination("mlflow", address, explicit=True)
    state = MirrorState(backend="mlflow", options={}, destination=destination, selection=Selection())
    (run / "mirrors").mkdir()
    state.save(run)
    audit = Audit(run, state.name, destination, policy="abc")
    audit.record("metrics", rows=3, fields=["loss"], first_step=4, last_step=6)
    audit.record("metrics", rows=2, fields=["val/loss"], first_step=2, last_step=2)
    audit.record("alerts", rows=1, fields=["vanishing"], first_step=None, last_step=None)
    return run


def test_without_a_policy(folder: Path) -> None:
    status, text = command()
    assert status == 0
    assert "no policy is in force: a run goes anywhere, a restricted one to the local record only" in text
    assert str(folder / "etc" / "policy.toml") in text
    assert facts() == (0, {"files": [], "destinations": []})
    assert command(LAB, "--unrestricted")[0] == 0
    status, text = command(LAB)
    assert status == 1
    assert "a restricted run to mlflow at https://mlflow.lab.example: forbidden" in text
    assert 'destinations = [{backend = "mlflow", url = "https://mlflow.lab.example"}]' in text


def test_each_rule_with_its_file(folder: Path) -> None:
    (folder / "statsbridge-policy.toml").write_text(POLICY)
    (folder / "etc").mkdir()
    (folder / "etc" / "policy.toml").write_text('applies_to = "all"\nsites = ["activation", "update"]\n')
    status, text = command()
    assert status == 0
    first, second = text.splitlines()[1:3]
    assert first.split()[:4] == ["system", str(folder / "etc" / "policy.toml"), "all", "runs"]
    assert "sites: activation, update" in first
    assert second.split()[:3] == ["project", str(folder / "statsbridge-policy.toml"), "1"]
    assert "mlflow at https://mlflow.lab.example" in second
    assert "names: hashed" in second
    _, found = facts()
    system, project = found["files"]
    assert (system["place"], system["applies_to"], system["destinations"]) == ("system", "all", None)
    assert project["destinations"][0]["limits"]["scalars"] == ["loss", "val/*"]


def test_what_would_leave_to_a_tracker(folder: Path) -> None:
    (folder / "statsbridge-policy.toml").write_text(POLICY)
    status, found = facts(LAB)
    assert status == 0
    (verdict,) = found["destinations"]
    assert verdict["channels"] == ["alerts", "metrics"]
    assert verdict["sites"] == ["activation", "activation_grad"]
    assert verdict["tables"] == ["scalars", "stats", "events"]
    assert verdict["scalars"] == [["loss", "val/*"]]
    assert verdict["names"] == "hashed"
    assert "artifacts" in verdict["withheld"][0]
    _, text = command(LAB)
    assert "allowed\n  channels: alerts, metrics\n  tables: all\n  sites: activation, activation_grad\n" in text


@pytest.mark.parametrize(
    ("subject", "told"),
    [
        ("mlflow:https://mlflow.lab.example.evil.com", "its host is mlflow.lab.example.evil.com"),
        ("mlflow", "must name its destination"),
        ("wandb:https://api.wandb.ai", "none of its 1 [[destinations]] is for wandb"),
    ],
)
def test_what_is_forbidden_is_status_1_and_says_why(folder: Path, subject: str, told: str) -> None:
    (folder / "statsbridge-policy.toml").write_text(POLICY)
    status, found = facts(subject)
    assert status == 1
    assert found["destinations"][0]["allowed"] is False
    assert told in found["destinations"][0]["reason"]
    status, text = command(subject)
    assert status == 1
    assert told in text


def test_what_has_left_a_run(folder: Path) -> None:
    (folder / "statsbridge-policy.toml").write_text(POLICY)
    run = restricted_run(folder, "https://mlflow.lab.example")
    status, found = facts("mine")
    assert status == 0
    assert (found["run"]["id"], found["run"]["restricted"]) == (run.name, True)
    metrics, alerts = found["run"]["left"]
    assert {name: metrics[name] for name in ("channel", "deliveries", "rows", "first_step", "last_step")} == {
        "channel": "metrics", "deliveries": 2, "rows": 5, "first_step": 2, "last_step": 6,
    }  # fmt: skip
    assert metrics["fields"] == ["loss", "val/loss"]
    assert metrics["policies"] == ["abc"]
    assert (alerts["channel"], alerts["first_step"]) == ("alerts", None)
    status, text = command(str(run))
    assert status == 0
    assert f"run {run.name} (mine), restricted" in text
    assert "a restricted run to mlflow at https://mlflow.lab.example: allowed" in text
    assert "loss, val/loss" in text


def test_a_run_that_went_where_the_policy_does_not_let_it_now(folder: Path) -> None:
    (folder / "statsbridge-policy.toml").write_text(POLICY)
    restricted_run(folder, "https://elsewhere.example")
    status, text = command("latest")
    assert status == 1
    assert "mlflow at https://elsewhere.example: forbidden" in text
    assert "its host is elsewhere.example, not mlflow.lab.example" in text


def test_a_run_of_which_nothing_left(folder: Path) -> None:
    run = create_run(folder / "statsbridge-runs", name=None, config=None, information={})
    status, text = command(run.name)
    assert status == 0
    assert "not restricted" in text
    assert text.endswith("nothing has left\n")
    assert command("local")[1].endswith("stays where it is\n")


def test_a_damaged_mirror_is_named_and_the_others_are_judged(folder: Path) -> None:
    (folder / "statsbridge-policy.toml").write_text(POLICY)
    run = restricted_run(folder, "https://mlflow.lab.example")
    broken = run / "mirrors" / "wandb-0123456789ab.json"
    broken.write_text("{")
    status, found = facts("mine")
    assert status == 1
    assert [one["allowed"] for one in found["destinations"]] == [True]
    (reason,) = found["run"]["damaged_mirrors"]
    assert reason.startswith(f"{broken} cannot be read")
    status, text = command("mine")
    assert status == 1
    assert "a restricted run to mlflow at https://mlflow.lab.example: allowed" in text
    assert str(broken) in text
    assert "loss, val/loss" in text


REPORT = """
[[destinations]]
backend = "report"
path = "{folder}/reports"
channels = ["metrics", "figures"]
statistics = ["count", "mean"]
names = "hashed"
"""


def test_a_report_is_a_destination_too(folder: Path) -> None:
    (folder / "statsbridge-policy.toml").write_text(REPORT.format(folder=folder))
    (folder / "reports").mkdir()
    file = folder / "reports" / "mine.html"
    status, found = facts(f"report:{file}")
    assert status == 0
    (verdict,) = found["destinations"]
    assert (verdict["backend"], verdict["address"], verdict["allowed"]) == ("report", str(file), True)
    assert (verdict["channels"], verdict["statistics"]) == (["figures", "metrics"], ["count", "mean"])
    # What is answered is what happens.
    run = create_run(folder / "statsbridge-runs", name="mine", config=None, information={"restricted": True})
    write_run(run, {"scalars": scalar_rows(0, loss=1.0)})
    assert CliRunner().invoke(app, ["report", "mine", "-o", str(file)]).exit_code == 0
    status, text = command("report:reports/mine.html")
    assert status == 0
    assert f"a restricted run to report at {file}: allowed\n  channels: figures, metrics\n" in text


def test_a_report_without_a_file_is_one_in_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "statsbridge-policy.toml").write_text(REPORT.format(folder=folder))
    status, text = command("report")
    assert status == 1
    assert f"a restricted run to report at {folder}/<run id>.html: forbidden" in text
    assert "it is another folder" in text
    assert CliRunner().invoke(app, ["policy", "report:"]).exit_code == 2
    assert command("report", "--unrestricted")[0] == 0
    (folder / "reports").mkdir()
    monkeypatch.chdir(folder / "reports")
    assert command("report")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "no run 'nowhere'"),
        (["nowhere"], "Nor is it an installed tracker: "),
        (["--format", "xml"], "unknown format xml"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["policy", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert told in result.stderr


def test_a_broken_policy_is_named(folder: Path) -> None:
    (folder / "statsbridge-policy.toml").write_text("destination = []")
    result = CliRunner().invoke(app, ["policy"])
    assert result.exit_code == 2
    assert "unknown key 'destination': did you mean 'destinations'?" in result.stderr

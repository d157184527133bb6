import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from log_rows import scalar_rows, stats_rows, write_run
from typer.testing import CliRunner, Result

import statsbridge
from statsbridge.cli import app
from statsbridge.errors import ConfigError, PolicyError
from statsbridge.log import Writer, create_run
from statsbridge.log.figures import KIND, FigureFiles
from statsbridge.mirror.audit import read_audit
from statsbridge.mirror.hashing import Namer, load_key
from statsbridge.view.report import write_report

SECRETS = ("secretblock", "SecretType", "secret_scalar", "secret name", "secret_value", "secret message")
POLICY = """
names = "hashed"
sites = ["activation", "parameter_grad"]
statistics = ["count", "nan_count", "mean", "l2"]

[[destinations]]
backend = "report"
path = "{folder}"
channels = ["metrics", "figures", "alerts"]
scalars = ["loss", "secret_s*"]
"""


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def figures(file: Path) -> dict[str, Any]:
    """The figures in a report, by the id of their place."""
    found = re.findall(r'<script type="application/json" id="([^"]+)-data">(.*?)</script>', file.read_text(), re.DOTALL)
    return {name: json.loads(text)["figure"] for name, text in found}


def values_of(step: int, site: str, **columns: Any) -> dict[str, Any]:
    return stats_rows(step, 3, module=["secretblock.0", "secretblock.1", ""], type="SecretType", site=site, **columns)


def record(folder: Path, *, restricted: bool, name: str = "secret name", loss: float = 1.0) -> Path:
    """Five steps of three modules; what must not leave has numbers of its own that occur nowhere else."""
    run = create_run(folder, name=name, config={"secret_value": 20260817}, information={"restricted": restricted})
    writer = Writer(run)
    modules = {
        "step": 0, "module": ["secretblock.0", "secretblock.1", ""], "type": "SecretType", "parent": "", "call": 0,
        "order": [0, 1, 2], "depth": [1, 2, 2], "leaf": [True, True, False], "parameters": [8643213, 2, 0],
        "order_source": "runtime",
    }  # fmt: skip
    for step in range(5):
        tables: dict[str, Mapping[str, Any]] = {
            "stats": values_of(step, "activation", kurtosis=[7654.321, 1.0, 2.0], nan_count=[0, step // 4, 0]),
            "scalars": scalar_rows(step, loss=loss / (step + 1), secret_scalar=step + 0.5, concealed=97531.24),
            "events": {
                "step": step, "time": 1.7e9, "kind": "internal_error", "severity": "warning",
                "module": "secretblock.0", "value": 86420.97, "message": "secret message",
            },
        }  # fmt: skip
        assert writer.submit(lambda tables=tables: tables)  # type: ignore[misc]
        for site in ("parameter_grad", "update"):
            rows = {"stats": values_of(step, site, tensor="weight", mean=[64.20864, 1, 2] if site == "update" else 0.5)}
            assert writer.submit(lambda rows=rows: rows)  # type: ignore[misc]
    assert writer.submit(lambda: {"modules": modules})
    assert writer.close()
    return run


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("plain"), restricted=False)


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy for reports into the test's folder, which is the working folder too."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "statsbridge-policy.toml"
    file.write_text(POLICY.format(folder=tmp_path))
    return file


def test_the_file_is_named_after_the_run_and_told(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = report("--dir", plain.parent)
    assert result.exit_code == 0, result.output
    file = tmp_path / f"{plain.name}.html"
    assert result.stdout == f"{file}  {file.stat().st_size / 1e6:.3g} MB\n"
    text = file.read_text()
    assert all(secret in text for secret in SECRETS)
    assert "7654.321" not in text  # nothing shows kurtosis, so its absence elsewhere would prove nothing
    assert [trace["y"][:2] for trace in figures(file)["run0-training"]["data"] if trace["name"] == "loss"] == [[1, 0.5]]


def test_a_restricted_run_goes_nowhere_without_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = record(tmp_path / "runs", restricted=True)
    result = report(run, "-o", "r.html")
    assert result.exit_code == 2
    assert 'destinations = [{backend = "report", path = ' in result.stderr
    assert not (tmp_path / "r.html").exists()
    with pytest.raises(PolicyError, match="restricted"):
        write_report(statsbridge.load(run), tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_a_restricted_run_goes_only_where_the_policy_says(tmp_path: Path, policy: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    policy.write_text(POLICY.format(folder=tmp_path / "reports"))
    run = record(tmp_path / "runs", restricted=True)
    result = report(run, "-o", elsewhere / "r.html")
    assert result.exit_code == 2
    assert "it is another folder" in result.stderr
    assert list(elsewhere.iterdir()) == []


def test_of_a_restricted_run_only_what_the_policy_lets_out_is_in_the_file(tmp_path: Path, policy: Path) -> None:
    run = record(tmp_path / "runs", restricted=True)
    result = report(run, "-o", "r.html")
    assert result.exit_code == 0, result.output
    assert "only what the policy lets out of the run is in it" in result.stdout
    text = (tmp_path / "r.html").read_text()
    for forbidden in (*SECRETS, str(run), "7654.321", "64.20864", "97531.24", "86420.97", "20260817", "concealed"):
        assert forbidden not in text, forbidden
    assert '"bdata"' not in json.dumps(figures(tmp_path / "r.html"))  # where no search for text would find a number
    assert "This run is restricted." in text
    assert "statistics that the policy does not list: inf_count, std, skewness" in text
    assert "sites that the policy does not list: update" in text
    assert "scalars that the policy does not list: 1 of 3" in text
    assert "the run&#39;s name, its config and versions" in text
    namer = Namer(load_key(run / "mirrors" / "policy.key"))
    hashed = namer.name("module", "secretblock.1")
    assert f'<td class="name">{hashed}</td>' in text or f">{hashed}</a></td>" in text
    assert any(hashed in label for label in figures(tmp_path / "r.html")["run0-heat-activation"]["data"][0]["y"])
    assert namer.scalar("secret_scalar") != "secret_scalar"
    # The finding that the NaN in it is.
    assert f"in <code>{hashed}</code>" in text


def test_what_leaves_in_a_report_is_in_the_audit(tmp_path: Path, policy: Path) -> None:
    run = record(tmp_path / "runs", restricted=True)
    assert report(run, "-o", "r.html").exit_code == 0
    audit = read_audit(run)
    assert set(audit["channel"].to_pylist()) == {"metrics", "figures", "alerts"}
    assert set(audit["destination"].to_pylist()) == {str(tmp_path / "r.html")}
    metrics = audit.filter(pc.equal(audit["channel"], "metrics")).to_pylist()[0]
    assert (metrics["rows"], metrics["first_step"], metrics["last_step"]) == (5 * 3 * 2 + 5 * 2, 0, 4)
    assert "stats/activation" in metrics["fields"]
    assert "scalars/loss" in metrics["fields"]
    assert "concealed" not in str(metrics["fields"])


def test_channels_that_are_shut_are_left_out_and_said(tmp_path: Path, policy: Path) -> None:
    policy.write_text(f'[[destinations]]\nbackend = "report"\npath = "{tmp_path}"\n')
    run = record(tmp_path / "runs", restricted=True)
    assert report(run, "-o", "r.html").exit_code == 0
    assert report(run, "-o", "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text()
    assert "<td>report</td><td>metrics</td>" in text  # the first one has left
    assert str(tmp_path) not in text
    assert figures(tmp_path / "r.html") == {}
    assert "secretblock.0" in text  # names are plain here
    assert "secret message" not in text
    assert "findings withheld" in text
    assert "pictures: the policy does not open the channel &#39;figures&#39;" in text


def test_figures_that_the_user_logged_leave_only_where_all_may(tmp_path: Path, policy: Path) -> None:
    run = create_run(tmp_path / "runs", name="mine", config=None, information={})
    files = FigureFiles(run, 0)
    number = files.store(b'{"data": [{"type": "scatter", "y": [13579.5]}], "layout": {"title": {"text": "own"}}}')
    told = {"step": 3, "time": 1.7e9, "kind": KIND, "severity": "info", "value": number, "message": "my figure"}
    write_run(run, {"events": told})
    every = 'channels = ["metrics", "histograms", "alerts", "figures", "artifacts", "config"]'
    for limit, there in (("", True), ('statistics = ["mean"]', False)):
        rule = f'[[destinations]]\nbackend = "report"\npath = "{tmp_path}"\n{every}\n{limit}\n'
        policy.write_text(f'applies_to = "all"\n{rule}')
        assert report(run, "-o", "r.html").exit_code == 0
        text = (tmp_path / "r.html").read_text()
        assert ("13579.5" in text) == there
        assert ("figures that the training logged: they could show" in text) != there


def test_a_policy_for_all_runs_binds_others_too(tmp_path: Path, policy: Path) -> None:
    policy.write_text('applies_to = "all"\nnames = "hashed"\n')
    run = record(tmp_path / "runs", restricted=False)
    assert report(run, "-o", "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text()
    assert "secretblock" not in text
    assert "This run is restricted." not in text
    assert "hashes stand for them" in text


def test_an_unreadable_policy_stops_every_report(plain: Path, tmp_path: Path, policy: Path) -> None:
    policy.write_text("names = 3")
    result = report(plain, "-o", "r.html")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "r.html").exists()


def test_a_report_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    run = create_run(tmp_path, name="empty", config=None, information={})
    file = tmp_path / "r.html"
    for _ in range(2):
        assert report(run, "-o", file).exit_code == 0
    file.write_text("somebody's thesis")
    result = report(run, "-o", file)
    assert result.exit_code == 2
    assert "is no report of statsbridge: give another name, or --force" in result.stderr
    assert file.read_text() == "somebody's thesis"
    assert report(run, "-o", file, "--force").exit_code == 0
    assert file.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "nowhere/r.html"], "there is no folder"),
        (["-o", "."], "is a folder: give the name of a file"),
        (["--dir", "nowhere"], "there are no runs in 'nowhere'"),
        (["nothing"], "no run 'nothing' in"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = report("--dir", plain.parent, *arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert said in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("restricted", [False, True])
def test_a_damaged_part_is_named_in_the_report(tmp_path: Path, policy: Path, restricted: bool) -> None:
    run = create_run(tmp_path / "runs", name="damaged", config=None, information={"restricted": restricted})
    write_run(run, {"scalars": scalar_rows(0, loss=1.0)}, {"scalars": scalar_rows(1, loss=0.5)})
    part = max((run / "scalars").rglob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    result = report(run, "-o", "r.html")
    assert result.exit_code == 0
    assert part.name in result.stderr
    assert part.name in (tmp_path / "r.html").read_text()


def test_no_run_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give at least one"):
        write_report([], tmp_path / "r.html")


def test_several_runs_are_laid_over_each_other(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = record(tmp_path / "runs", restricted=False, name="<b>other</b>", loss=4.0)
    assert report(plain, other, "-o", "r.html").exit_code == 0
    drawn = figures(tmp_path / "r.html")
    losses = [trace["y"] for trace in drawn["shared-0"]["data"] if trace.get("y") and "smoothed" not in trace["name"]]
    assert [1, 0.5] in [loss[:2] for loss in losses]
    assert [4, 2] in [loss[:2] for loss in losses]
    text = (tmp_path / "r.html").read_text()
    assert '<section id="run1" class="run">' in text
    assert "&lt;b&gt;other&lt;/b&gt;" in text
    assert "<b>other" not in text


def test_of_many_runs_each_has_its_main_pictures(tmp_path: Path) -> None:
    losses = (1.0, 2.0, 3.0, 4.0, math.nan)
    runs = [create_run(tmp_path, name=f"of {loss}", config={"loss": loss}, information={}) for loss in losses]
    for run, loss in zip(runs, losses, strict=True):
        write_run(run, {"scalars": scalar_rows(0, loss=loss), "stats": stats_rows(0)})
    assert report(*runs, "-o", tmp_path / "r.html").exit_code == 0
    assert {*figures(tmp_path / "r.html")} == {
        "shared-0", *(f"run{number}-{name}" for number in range(5) for name in ("training", "heat-activation")),
    }  # fmt: skip
    text = (tmp_path / "r.html").read_text()
    assert "Of so many runs each has its main pictures only" in text
    assert '<td class="number">NaN</td>' in text  # the last loss of the last run


def test_an_empty_run_says_that_nothing_was_recorded(tmp_path: Path) -> None:
    run = create_run(tmp_path, name="empty", config=None, information={})
    assert report(run, "-o", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text()
    assert "No module has been recorded." in text
    assert "No rule found anything wrong in what was recorded." in text


@pytest.mark.slow
def test_300_modules_stay_under_10_megabytes(tmp_path: Path) -> None:
    run = create_run(tmp_path, name="large", config=None, information={})
    names = [f"transformer.h.{number // 12}.part_{number % 12}.projection" for number in range(300)]
    works = [
        {"stats": stats_rows(step, 300, module=names, site=site), "scalars": scalar_rows(step, loss=1.0 / (step + 1))}
        for step in range(0, 1000, 20)
        for site in ("activation", "activation_grad", "update")
    ]
    write_run(run, *works)
    assert report(run, "-o", tmp_path / "r.html").exit_code == 0
    assert (tmp_path / "r.html").stat().st_size < 10e6

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from markdown_it import MarkdownIt
from typer.testing import CliRunner
from zoo_broken_helpers import BROKEN
from zoo_healthy_helpers import HEALTHY
from zoo_helpers import mlp, record, supervised, vectors

import statsbridge
from statsbridge.analyze.diagnosis import diagnose
from statsbridge.analyze.rules.tree import QUESTIONS
from statsbridge.analyze.rules.words import WORDS
from statsbridge.cli import app
from statsbridge.log import Writer, create_run

CONFIG = {"note": "<img src=x onerror=alert(1)> | `x`"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run, one with a dead layer, and one with a NaN that is critical."""
    folder = tmp_path_factory.mktemp("diagnose")
    for name, make in (
        ("good", HEALTHY["MLP"]),
        ("dead", BROKEN["dead ReLU from the start"].make),
        ("nan", BROKEN["NaN in one batch"].make),
        ("detached", BROKEN["detach() in the middle"].make),
    ):
        torch.manual_seed(0)
        record(make(), folder, steps=16, name=name, config=CONFIG)
    return folder


def run_diagnose(runs: Path, *arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["diagnose", *arguments, "--dir", str(runs)])
    assert result.exit_code == status, result.output
    return result.stdout if status in (0, 1) else result.stderr


def test_a_healthy_run_is_one_line_and_status_0(runs: Path) -> None:
    assert run_diagnose(runs, "good").splitlines()[1:] == ["nothing is wrong, as far as the rules can see"]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (0, "nothing has been recorded, so nothing can be said"),
        (1, "nothing is wrong, as far as the rules can see; they have seen 1 sampled step, and most need 5"),
        (5, "nothing is wrong, as far as the rules can see"),
    ],
)
def test_silence_is_worth_what_was_seen(steps: int, said: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    record(supervised(mlp(16, 32, 4), vectors()), tmp_path, steps=steps)
    assert run_diagnose(tmp_path, "latest").splitlines()[1] == said


def test_a_warning_alone_is_status_0(runs: Path) -> None:
    output = run_diagnose(runs, "detached")
    assert "warning" in output
    assert "critical" not in output


def test_the_table_has_the_first_cause_first_and_says_what_to_try(runs: Path) -> None:
    lines = run_diagnose(runs, "nan", status=1).splitlines()
    assert lines[1].split() == ["severity", "step", "what", "module", "more", "value", "limit"]
    assert lines[2].split() == ["critical", "12", "nonfinite_activation", "0", "5", "32", "0"]
    assert "nonfinite_activation: the output of module 0 has 32 NaN of 2048 elements" in lines
    assert f"  try: {WORDS['nonfinite_activation'].suggestions[0]}" in lines
    assert len(lines) < 40


def test_json_is_the_findings_of_the_library(runs: Path) -> None:
    given = json.loads(run_diagnose(runs, "dead", "--format", "json", status=1))
    data = statsbridge.load(next(path for path in runs.iterdir() if statsbridge.load(path).info["name"] == "dead"))
    assert given == [finding.to_json() for finding in diagnose(data)]
    assert given[0]["kind"] == "dead_units"
    names = {"kind", "severity", "step", "module", "site", "tensor", "value", "threshold", "message", "causes"}
    assert names | {"suggestions"} <= given[0].keys()


def test_a_threshold_changes_what_is_found(runs: Path) -> None:
    options = ("--threshold", "persistence=50", "--threshold", "zero_fraction_critical=1.0", "--format", "json")
    found = json.loads(run_diagnose(runs, "dead", *options, status=1))
    assert [one["kind"] for one in found if one["severity"] == "critical"] == ["dead_units"]
    assert "zero_gradient" not in [one["kind"] for one in found]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("dead", "--threshold", "zero_fractoin=1"), "unknown threshold zero_fractoin: did you mean zero_fraction?"),
        (("dead", "--threshold", "zero_fraction"), "--threshold zero_fraction: give a name and a number"),
        (("dead", "--threshold", "zero_fraction=high"), "--threshold zero_fraction=high: give a name and a number"),
        (("dead", "--threshold", "zero_fraction=-1"), "threshold zero_fraction=-1.0: give a number of at least 0"),
        (("dead", "--threshold", "zero_fraction=nan"), "threshold zero_fraction=nan: give a number of at least 0"),
        (("dead", "--threshold", "skipped_steps=2.5"), "threshold skipped_steps=2.5: give a whole number from 0"),
        (("dead", "--threshold", "persistence=0"), "threshold persistence=0: give a whole number from 1"),
        (("dead", "--format", "xml"), "unknown format xml"),
        (("dead", "--baseline", "nobody"), "no run 'nobody'"),
        (("nobody",), "no run 'nobody'"),
    ],
)
def test_the_wrong_thing_is_one_line(runs: Path, arguments: tuple[str, ...], said: str) -> None:
    message = run_diagnose(runs, *arguments, status=2)
    assert message.startswith(f"statsbridge: {said}")
    assert message.count("\n") == 1


def test_a_run_is_judged_by_a_good_one(runs: Path) -> None:
    assert run_diagnose(runs, "good", "--baseline", "good").count("\n") == 2
    found = json.loads(run_diagnose(runs, "dead", "--baseline", "good", "--format", "json", status=1))
    assert found[0]["kind"] == "dead_units"
    assert "outside_baseline" in [one["kind"] for one in found]
    # What the good run did too is no finding.
    own = json.loads(run_diagnose(runs, "dead", "--baseline", "dead", "--format", "json"))
    assert {one["kind"] for one in own} <= {"identical_outputs"}


def test_a_good_run_of_another_model_is_no_silent_measure(runs: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("other", torch.nn.Linear(16, 4))
    with statsbridge.init(model, dir=tmp_path, name="apart", every=1) as run:
        for _ in range(6):
            model(torch.randn(4, 16)).sum().backward()
            run.step()
    good = str(next(path for path in runs.iterdir() if statsbridge.load(path).info["name"] == "good"))
    result = CliRunner().invoke(app, ["diagnose", good, "--baseline", str(run.path)])
    said = f"the good run {run.id} shares no module with this one, so nothing was judged by it"
    assert said in result.stderr
    assert "shares no module" not in CliRunner().invoke(app, ["diagnose", good, "--baseline", good]).stderr


def test_the_briefing_has_its_parts_and_obeys_no_name(runs: Path) -> None:
    page = run_diagnose(runs, "nan", "--baseline", "good", "--format", "markdown", status=1)
    heads = [line for line in page.splitlines() if line.startswith("## ")]
    assert heads == [
        "## Findings, first cause first",
        "## Decision tree followed",
        "## Curves",
        "## Against the good run",
        "## Model, in data-flow order",
        "## Settings",
    ]
    assert "### 1. nonfinite_activation (critical, from step 12 on)" in page
    assert "1. Is every number finite? **no**: nonfinite_activation" in page
    assert "3. Is each step of the right size? nothing says no" in page
    tokens = [one for token in MarkdownIt().enable("table").parse(page) for one in (token.children or [token])]
    assert [token.content for token in tokens if token.type.startswith(("html", "link", "image"))] == []
    # As code, whose quotes JSON has escaped.
    assert f"config: {json.dumps(CONFIG)}" in "".join(token.content for token in tokens)
    assert "| 1 | 0 | 0 | Linear | 544 | nonfinite_activation" in page


def test_the_briefing_of_a_run_with_notes_and_many_modules_and_of_an_empty_one(tmp_path: Path) -> None:
    path = create_run(tmp_path, name="large", config=None, information={})
    writer = Writer(path)
    modules = {"step": 0, "module": [f"layer{n}" for n in range(100)], "type": "Linear", "call": 0}
    modules |= {"order": list(range(100)), "depth": list(range(100)), "leaf": True, "parameters": 10}
    note = {"step": 3, "time": 1.7e9, "kind": "note", "severity": "info", "message": "halved the rate\n# not a head"}
    assert writer.submit(lambda: {"modules": modules, "events": note}, rows=101)
    assert writer.close()
    page = run_diagnose(tmp_path, "large", "--format", "markdown")
    assert "None: nothing has been recorded, so nothing can be said." in page
    assert "- step 3: halved the rate\\n# not a head" in page
    assert "60 of 100 module calls are left out." in page
    assert "| 99 | layer99 | 0 | Linear | 10 |  |" in page
    assert "no step was recorded" in page


def test_the_briefing_has_the_first_and_last_rate_of_a_long_run(tmp_path: Path) -> None:
    path = create_run(tmp_path, name="long", config=None, information={})
    names = [f"lr/0/{group}" for group in range(16)]
    steps, groups = np.repeat(np.arange(10_000), len(names)), np.tile(np.arange(len(names)), 10_000)
    rates = {
        "step": steps,
        "iteration": steps,
        "time": 1.7e9,
        "name": names * 10_000,
        "value": 1 / (1 + steps + groups),
    }
    writer = Writer(path)
    assert writer.submit(lambda: {"scalars": rates}, rows=len(steps))
    assert writer.close()
    page = run_diagnose(tmp_path, "long", "--format", "markdown")
    assert [line for line in page.splitlines() if line.startswith("- lr/0/") and line[7] in "07"] == [
        "- lr/0/0: first 1, last 0.0001",
        "- lr/0/7: first 0.125, last 9.99e-05",
    ]


def test_every_kind_has_its_question() -> None:
    asked = [kind for question in QUESTIONS for kind in question.kinds]
    assert sorted(asked) == sorted(WORDS)

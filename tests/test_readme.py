"""The code of README.md and docs/quickstart.md, run as it stands there, block after block, on a small model."""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from recording import rows, scalars
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import statsbridge
from statsbridge.cli import app

ROOT = Path(__file__).parents[1]
README, QUICKSTART = ROOT / "README.md", ROOT / "docs" / "quickstart.md"
#: What tests/run/test_frameworks.py runs.
ELSEWHERE = ("class Statsbridge(", "model, optimizer, loader = accelerator")
LOOP = """
for x, y in loader:
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""".strip()

pytestmark = pytest.mark.usefixtures("in_a_folder")


class Block(nn.Module):
    """What the pages call `blocks.1`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu1 = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.relu1(self.conv(x))


class Network(nn.Module):
    """Has every module that the pages name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.encoder(images)).flatten(1))


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs are found and made here, and MLflow's store too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors are faster so
    yield
    torch.set_num_threads(threads)


def names() -> dict[str, Any]:
    """What the pages take for given."""
    torch.manual_seed(0)
    model = Network()
    images, labels = torch.randn(84, 1, 6, 6), torch.randint(0, 3, (84,))
    return {
        "statsbridge": statsbridge,
        "torch": torch,
        "polars": polars,
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=1e-3),
        "criterion": nn.functional.cross_entropy,
        "loader": DataLoader(TensorDataset(images, labels), batch_size=4),
    }


def blocks(page: Path, language: str = "python") -> list[str]:
    """The code of the page, but what another test runs."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)
    return [code for of, code in found if of == language and not code.startswith(ELSEWHERE)]


def execute(code: str, given: dict[str, Any]) -> list[Any]:
    """Run it: the values of the lines that are mere expressions, as a notebook would show them."""
    values = []
    for line in ast.parse(code).body:
        if isinstance(line, ast.Expr):
            values.append(eval(compile(ast.Expression(line.value), "<page>", "eval"), given))
        else:
            exec(compile(ast.Module([line], []), "<page>", "exec"), given)
    return values


def train(run: statsbridge.Run, given: dict[str, Any]) -> None:
    """One step, recorded."""
    x, y = next(iter(given["loader"]))
    given["optimizer"].zero_grad()
    loss = given["criterion"](given["model"](x), y)
    loss.backward()
    given["optimizer"].step()
    run.step(loss=loss)


def test_the_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, read, before, _ = blocks(README)
    given = names()
    execute(record, given)
    (path,) = (tmp_path / "statsbridge-runs").iterdir()
    data = statsbridge.load(path)
    assert sorted(scalars(data.scalars, "loss")) == list(range(21))
    assert {row["step"] for row in rows(data)} == {0, 10, 20}
    updated = {row["module"] for row in rows(data, site="update")}
    assert updated == {"encoder.0", "blocks.0.conv", "blocks.1.conv", "head"}
    assert data.events.num_rows == 0

    stats, series, largest = execute(read, given)
    assert stats.num_rows == data.stats.num_rows
    assert len(series) == 3
    assert set(largest.to_pydict()["module"]) == updated
    (scan,) = [code for code in blocks(README, "") if code.startswith("polars")]
    (lazy,) = execute(scan.replace("<run>", path.name), given)
    assert lazy.collect().height == data.stats.num_rows

    weights = [parameter.clone() for parameter in given["model"].parameters()]
    execute(before, given)
    passed, *_, judged = capsys.readouterr().out.splitlines()
    assert passed == "✓ preflight: passed"
    assert judged
    assert all(map(torch.equal, weights, given["model"].parameters()))


def test_the_mirror_of_the_readme(tmp_path: Path) -> None:
    given = names()
    execute(blocks(README)[3], given)
    train(given["run"], given)
    given["run"].finish()
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        (value,) = store.execute("select value from metrics where key = 'statsbridge/loss'").fetchone()
    assert value == scalars(statsbridge.load(given["run"].path).scalars, "loss")[0]


def test_four_lines_are_all_that_is_added() -> None:
    lines = blocks(README)[0].splitlines()
    ours = [line for line in lines if re.search(r"\brun\b|statsbridge", line)]
    assert [line[-3:] for line in ours] == ["# 1", "# 2", "# 3", "# 4"]
    assert "\n".join(line for line in lines if line not in ours).strip() == LOOP


def test_the_quickstart() -> None:
    record, _, read, narrow, several = blocks(QUICKSTART)
    given = names()
    execute(record, given)
    data = statsbridge.load(given["run"].path)
    assert (data.info["name"], data.info["config"]) == ("first try", {"lr": 1e-3})
    assert sorted(scalars(data.scalars, "loss")) == list(range(21))
    printed, table, series, losses = execute(read, given)
    assert printed is None
    assert len(table) == data.stats.num_rows
    assert len(series) == 3
    assert losses.num_rows == 21
    (run,) = execute(narrow, given)
    train(run, given)
    run.finish()
    found = rows(statsbridge.load(run.path))
    assert {row["module"] for row in found} == {"encoder.0", "encoder.1", "head"}
    assert {row["site"] for row in found} == {"activation", "update"}
    assert {row["kurtosis"] for row in found} == {None}
    given |= {"g": nn.Linear(2, 3), "d": nn.Linear(3, 1)}
    execute(several, given)
    given["d"](given["g"](torch.randn(5, 2))).sum().backward()
    given["run"].step()
    given["run"].finish()
    assert {row["module"] for row in rows(statsbridge.load(given["run"].path))} == {"generator", "discriminator"}


def test_what_more_the_quickstart_records() -> None:
    more = blocks(QUICKSTART)[1]
    given = names()
    run = statsbridge.init(given["model"], every=1)
    train(run, given)
    x, y = next(iter(given["loader"]))
    scores = torch.randn(3, 3, requires_grad=True)
    loss = given["criterion"](given["model"](x), y) + scores.sum()
    loss.backward(retain_graph=True)
    given["optimizer"].step()
    execute(more, given | {"run": run, "x": x, "loss": loss, "scores": scores, "value": 0.5, "accuracy": 0.75})
    scores.sum().backward()
    train(run, given)
    run.finish()
    data = statsbridge.load(run.path)
    assert scalars(data.scalars, "samples") == {1: 4.0}
    assert scalars(data.scalars, "val/accuracy") == {1: 0.75}
    (logged,) = [row for row in data.scalars.to_pylist() if row["name"] == "val/loss"]
    assert (logged["epoch"], logged["kind"]) == (3.0, "epoch_mean")
    assert {row["site"] for row in rows(data, tensor="attention scores")} == {"tensor", "tensor_grad"}
    assert [event["message"] for event in data.events.to_pylist()] == ["learning rate lowered by hand"]


def test_the_commands_of_the_quickstart(tmp_path: Path) -> None:
    execute(blocks(QUICKSTART)[0], names())
    (page,) = [code for code in blocks(QUICKSTART, "") if code.startswith("statsbridge")]
    commands = [line.partition("#")[0].partition(">")[0] for line in page.splitlines()]
    assert len(commands) == 5
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, (command, done.output)
        assert "first try" in done.output or "blocks.1.conv" in done.output, command

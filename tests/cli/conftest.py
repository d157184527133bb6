"""Runs written by the real writer, with something in every column of the tables."""

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from statsbridge.log import Writer, create_run

LONG_NAME = "encoder." + "x" * 192

STEPS = (0, 10, 20)


def write_run(directory: Path, name: str, tables: Sequence[Mapping[str, Mapping[str, Any]]]) -> Path:
    """A finished run with these tables, one thunk for each."""
    path = create_run(directory, name=name, config={"lr": 0.1}, information={})
    writer = Writer(path)
    for table in tables:
        assert writer.submit(lambda table=table: table, rows=1)  # type: ignore[misc]
    assert writer.close()
    return path


def stats_of_step(step: int) -> dict[str, Any]:
    """Five rows of activations, in an order that is not the data flow's, and two of gradients."""
    return {
        "step": step,
        "iteration": step,
        "time": 1.7e9 + step,
        "module": ["head", "stem", LONG_NAME, "lost", "", "stem", "head"],
        "type": ["Linear", "Conv2d", "ReLU", "Conv2d", "Net", "Conv2d", "Linear"],
        "call": 0,
        "order": [2, 0, 1, None, 3, 0, 2],
        "depth": [3, 1, 2, None, 3, 1, 3],
        "site": ["activation"] * 5 + ["parameter_grad"] * 2,
        "tensor": ["", "", "", "", "", "weight", "weight"],
        "count": [10, 64, 64, 0, 10, 9, 90],
        "nan_count": [0, 0, 0, 0, 2, 0, 0],
        "inf_count": 0,
        "mean": [0.1 + step, -0.25, 1 / 3, math.nan, 0.1, 1e-5, 1e-3],
        "std": [1.5, 2.0 - step / 20, 0.5, math.nan, 1.5, 1e-5, 1e-3],
        "min": [-3.5, -2.0, 0.0, math.nan, -3.5, -1e-5, -1e-2],
        "max": [2.5, 4.0, 1.0, math.nan, 2.5, 1e-5, 1e-2],
        "abs_mean": [1.0, 1.0, 0.1, math.nan, 1.0, 2e-6, 3e-3],
        "l2": [5.0, 6.0, 7.0, math.nan, 5.0, 1e-4, 1e-1],
        "zero_fraction": [0.0, 0.0, 0.96875, math.nan, 0.0, 0.0, 0.0],
        "status": [None, None, None, "no_grad", None, None, None],
    }


def scalars(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "iteration": step, "time": 1.7e9, "name": ["loss", "lr"], "value": [loss, 0.1]}


def events(count: int) -> dict[str, Any]:
    return {
        "step": list(range(count)),
        "time": 1.7e9,
        "kind": "internal_error",
        "severity": ["info", *["critical", "warning"] * count][:count],
        "module": "stem",
        "value": math.nan,
        "message": [f"number {number}\nand a second line" for number in range(count)],
    }


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs: `older` with two rows of scalars alone, and `newer` with all tables."""
    directory = tmp_path_factory.mktemp("runs")
    write_run(directory, "older", [{"scalars": scalars(0, 1.0)}])
    losses = (2.5, math.nan, math.inf)
    steps = [
        {"stats": stats_of_step(step), "scalars": scalars(step, loss)} for step, loss in zip(STEPS, losses, strict=True)
    ]
    write_run(directory, "newer", [*steps, {"events": events(14)}])
    return directory


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, its output in pipes."""
    return subprocess.run(
        [sys.executable, "-c", "from statsbridge.cli import app; app()", *arguments],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        check=False,
        timeout=120,
    )

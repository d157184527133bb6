"""Helpers for the tests of the log: rows to write, runs to write them into, and programs that do."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from statsbridge.log import RunData, Writer, create_run, load

FLOATS = (
    "mean",
    "std",
    "skewness",
    "kurtosis",
    "min",
    "max",
    "abs_mean",
    "l2",
    "zero_fraction",
    "kl_unit_gaussian",
    "update_ratio",
)


def new_run(folder: Path, name: str | None = None) -> Path:
    return create_run(folder, name=name, config=None, information={})


def stats_rows(step: int, rows: int = 5, **columns: Any) -> dict[str, Any]:
    """`rows` rows of `stats` of one step, one a module `m0`, `m1`, …, with different numbers everywhere."""
    numbers = np.random.default_rng(step)
    return {
        "step": step,
        "iteration": step,
        "time": 1.7e9 + step,
        "module": [f"m{row}" for row in range(rows)],
        "type": "Linear",
        "call": 0,
        "order": np.arange(rows),
        "depth": np.arange(rows),
        "site": "activation",
        "tensor": "",
        "count": np.full(rows, 1000),
        "nan_count": 0,
        "inf_count": 0,
        **{name: numbers.normal(size=rows) for name in FLOATS},
        **columns,
    }


def scalar_rows(step: int, **values: float) -> dict[str, Any]:
    return {
        "step": step,
        "iteration": step,
        "time": 1.7e9 + step,
        "name": list(values),
        "value": list(values.values()),
    }


def write_run(run: Path, *works: dict[str, Any], rank: int = 0) -> None:
    """Each of `works` ({table: columns}) into parts of its own."""
    writer = Writer(run, rank=rank)
    for work in works:
        assert writer.submit(lambda work=work: work)
        assert writer.flush()
    assert writer.close()


def written(folder: Path, *works: dict[str, Any]) -> RunData:
    run = new_run(folder)
    write_run(run, *works)
    return load(run)


def start_program(source: str, *arguments: object) -> "subprocess.Popen[str]":
    """A Python process that runs `source`, for which this module's helpers are imported."""
    head = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from log_rows import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + source, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

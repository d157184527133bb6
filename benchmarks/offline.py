"""Answers from large runs: processor time, time on the clock and memory, each in a process of its own.

Makes two runs of 300 modules, five sites and 10,000 sampled steps (15 million rows, 900 MB, minutes each) unless it is
given them.

    python benchmarks/offline.py [--run PATH --other PATH] [--modules 300] [--steps 10000]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import statsbridge
from statsbridge.log import SCHEMAS, Writer, create_run
from statsbridge.log.compaction import compact_table
from statsbridge.log.parts import live_parts

CONSOLE = Console(width=110)
SITES = ("activation", "activation_grad", "parameter", "parameter_grad", "update")
TENSORS = ("", "", "weight", "weight", "weight")
TOGETHER = 50  # sampled steps in a part
#: Of each site what a healthy layer has, about.
USUAL = {
    "mean": (0, 0.05, 0, 0, 0),
    "std": (1, 0.01, 0.1, 0.01, 1e-3),
    "min": (-3, -0.05, -0.3, -0.05, -4e-3),
    "max": (3, 0.05, 0.3, 0.05, 4e-3),
    "abs_mean": (0.8, 0.008, 0.08, 0.008, 8e-4),
    "l2": (64, 0.6, 6.4, 0.6, 6.4e-3),
    "zero_fraction": (0.4, 0.4, 0, 0.1, 0),
    "skewness": (0.1,) * 5,
    "kurtosis": (0.2,) * 5,
    "kl_unit_gaussian": (0.05,) * 5,
}


def make_run(folder: Path, modules: int, steps: int, seed: int) -> Path:
    """A run as a long training leaves it: merged parts, and small ones of its last steps."""
    run = create_run(folder, name=f"large {seed}", config={"seed": seed}, information={"sites": SITES})
    writer = Writer(run)
    names = [f"blocks.{number // 10}.layers.{number % 10}" for number in range(modules)]
    order = np.arange(modules)
    called = {"module": names, "type": "Linear", "call": 0, "order": order, "depth": order, "step": 0}
    writer.submit(lambda: {"modules": {**called, "leaf": True, "parameters": 4160, "order_source": "runtime"}})
    for first in range(0, steps, TOGETHER):
        at = np.arange(first, min(first + TOGETHER, steps))
        rows = rows_of(names, at, np.random.default_rng([seed, first]))
        loss = {"step": at, "iteration": at, "time": 1.7e9 + at, "name": "loss", "value": np.exp(-at / steps)}
        assert writer.submit(lambda rows=rows, loss=loss: {"stats": rows, "scalars": loss})  # type: ignore[misc]
        assert writer.flush()
    assert writer.close()
    for table in SCHEMAS:
        compact_table(run, table, 0)
    return run


def rows_of(names: list[str], at: np.ndarray, random: np.random.Generator) -> dict[str, Any]:
    """The rows of some steps; numbers differ by a twentieth from step to step."""
    each, modules = len(names) * len(SITES), np.arange(len(names))
    size = len(at) * each
    updates = np.tile(np.array(SITES) == "update", len(at) * len(names))
    return {
        "step": np.repeat(at, each),
        "iteration": np.repeat(at, each),
        "time": np.repeat(1.7e9 + at, each),
        "module": np.tile(np.repeat(names, len(SITES)), len(at)),
        "type": "Linear",
        "call": 0,
        "order": np.tile(np.repeat(modules, len(SITES)), len(at)),
        "depth": np.tile(np.repeat(modules, len(SITES)), len(at)),
        "site": np.tile(SITES, len(at) * len(names)),
        "tensor": np.tile(TENSORS, len(at) * len(names)),
        "count": 4096,
        "nan_count": 0,
        "inf_count": 0,
        "update_ratio": np.where(updates, 1e-3 * (1 + 0.1 * random.normal(size=size)), np.nan),
        **{
            name: np.tile(usual, len(at) * len(names)) * (1 + 0.05 * random.normal(size=size))
            for name, usual in USUAL.items()
        },
    }


def answers(run: Path, other: Path) -> dict[str, Callable[[], object]]:
    """What is measured; each beginning with `load`."""

    def loaded() -> statsbridge.RunData:
        return statsbridge.load(run)

    return {
        "load": loaded,
        "a glance at it (its repr)": lambda: repr(loaded()),
        "series of one number of a module": lambda: loaded().series("blocks.1.layers.3", "activation", "std"),
        "all rows of one module, four columns": lambda: loaded().select(
            modules="blocks.1.layers.3", columns=["step", "site", "mean", "std"]
        ),
        "all modules at the last step (by_type)": lambda: loaded().by_type("activation", "std"),
        "gradient_flow at the last step": lambda: loaded().gradient_flow(),
        "one site of all modules over all steps (matrix)": lambda: loaded().matrix("activation", "std"),
        "one number of one site, all modules and steps (select)": lambda: loaded().select(
            sites="activation", columns=["step", "module", "l2"]
        ),
        "diagnose": lambda: statsbridge.diagnose(loaded()),
        "compare": lambda: statsbridge.compare(loaded(), statsbridge.load(other)),
    }


def measure(number: int, run: Path, other: Path) -> None:
    """Print what one answer takes, as JSON. What Python and the libraries take to be imported does not count."""
    answer = list(answers(run, other).values())[number]
    clock, processor = time.perf_counter(), time.process_time()
    answer()
    taken = [time.perf_counter() - clock, time.process_time() - processor]
    print(json.dumps([*taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a run that is there already")
    parser.add_argument("--other", type=Path, help="one to compare it with")
    parser.add_argument("--modules", type=int, default=300)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only is not None:
        measure(given.only, given.run, given.other)
        return
    with tempfile.TemporaryDirectory() as folder:
        run = given.run or make_run(Path(folder), given.modules, given.steps, 1)
        other = given.other or make_run(Path(folder), given.modules, given.steps, 2)
        rows = sum(part.rows for part in live_parts(run, "stats"))
        table = Table("what", "seconds", "of processor", "MB at most", title=f"{rows:,} rows")
        for number, name in enumerate(answers(run, other)):
            command = [sys.executable, __file__, "--only", str(number), "--run", str(run), "--other", str(other)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            clock, processor, memory = json.loads(printed)
            table.add_row(name, f"{clock:.2f}", f"{processor:.2f}", f"{memory:.0f}")
        CONSOLE.print(table)


if __name__ == "__main__":
    main()

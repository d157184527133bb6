"""Time that `run.step` spends because a mirror is attached: to a tracker that is up, and to one that hangs.

One process, interleaved: all copies of the model train in blocks of steps, a block of each in turning order. Only the
time inside `run.step` counts. The record is written, and so mirrored, several times in each block; between blocks all
come to rest, so that no mirror works during another's block. `local again` is the noise. The points per second of each
adapter are measured by `mirror_<adapter>.py` beside this file.

    python benchmarks/mirrors.py [--rounds 20] [--backend tensorboard]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import statsbridge
from statsbridge.mirror import Batch, Destination, Event, Reading, RunInfo, Series

STEPS = 200
EVERY = 10
FLUSH_SECONDS = 0.05
REST_SECONDS = 0.3


class Lines:
    """The plainest tracker: points as JSON, synced to the disk."""

    backend = "lines"
    keeps: Literal["all", "last"] = "all"
    requires = ""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def options(self) -> dict[str, Any]:
        return {"path": str(self.path)}

    def destination(self) -> Destination:
        return Destination(self.backend, str(self.path), explicit=True)

    def open(self, run: RunInfo, destination: Destination, memory: MutableMapping[str, str]) -> None:
        pass

    def key(self, series: Series) -> str:
        return series.name

    def stored(self, value: float) -> float:
        return value

    def send(self, batch: Batch) -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps([point.series.name, *point[1:]]) + "\n" for point in batch.points)
            file.flush()
            os.fsync(file.fileno())

    def alert(self, event: Event) -> None:
        pass

    def figure(self, name: str, figure: Any, step: int) -> None:
        pass

    def artifact(self, path: Path) -> None:
        pass

    def read_back(self, run: RunInfo, destination: Destination, memory: Mapping[str, str]) -> Iterator[Reading]:
        yield from ()

    def close(self, status: str) -> None:
        pass


class Hanging(Lines):
    """Its `send` never comes back."""

    backend = "hanging"

    def send(self, batch: Batch) -> None:
        threading.Event().wait()


@dataclass
class Variant:
    """One copy of the model in training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: statsbridge.Run

    def block(self) -> tuple[float, float]:
        """Seconds inside `run.step`, of some steps: median and mean."""
        seconds = []
        for _ in range(STEPS):
            loss = nn.functional.mse_loss(self.model(torch.randn(64, 64)), torch.randn(64, 1))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            begin = time.perf_counter()
            self.run.step(loss=loss)
            seconds.append(time.perf_counter() - begin)
        self.run._writer.flush()
        time.sleep(REST_SECONDS)
        return statistics.median(seconds), statistics.fmean(seconds)


def measure(rounds: int, backends: list[str]) -> None:
    """Print the table."""
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 1))
    folder = tempfile.TemporaryDirectory(prefix="statsbridge-bench-")
    os.chdir(folder.name)
    attached: dict[str, Any] = {"local": "local", "local again": "local", "lines": Lines(f"{folder.name}/lines")}
    attached["hanging"] = Hanging(f"{folder.name}/hanging")
    attached.update({name: name for name in backends})
    variants = {}
    for label, backend in attached.items():
        own = copy.deepcopy(model)
        run = statsbridge.init(
            own, backend=backend, every=EVERY, dir=f"{folder.name}/runs", flush_interval=FLUSH_SECONDS
        )
        variants[label] = Variant(own, torch.optim.SGD(own.parameters(), lr=1e-3), run)
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in variants}
    labels = list(variants)
    for number in range(rounds + 2):
        for place in range(len(labels)):
            label = labels[(number + place) % len(labels)]
            seconds = variants[label].block()
            if number >= 2:  # the first rounds warm up, and trackers are imported
                times[label].append(seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", statsbridge.StatsBridgeWarning)  # that of the hanging one is expected
        for label, variant in variants.items():
            variant.run.finish(timeout=1 if label == "hanging" else 60)
    table = Table(title=f"inside run.step, every={EVERY}, {rounds} rounds of {STEPS} steps")
    for column in ("mirror", "median step: µs", "ratio (quartiles)", "mean step: µs", "ratio (quartiles)"):
        table.add_column(column, justify="right")
    for label in labels:
        cells = []
        for which in (0, 1):
            ratios = [a[which] / b[which] for a, b in zip(times[label], times["local"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells.append(f"{statistics.median(block[which] for block in times[label]) * 1e6:.0f}")
            cells.append(f"{middle:.3f} ({low:.3f} … {high:.3f})")
        table.add_row(label, *cells)
    Console(width=110).print(table)
    os.chdir("/")
    folder.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--backend", action="append", default=[], help="an installed adapter too; several times")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    measure(arguments.rounds, arguments.backend)


if __name__ == "__main__":
    main()

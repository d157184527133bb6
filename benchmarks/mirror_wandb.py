"""Points a second through the W&B adapter, as a ratio to the fastest bare use of W&B's client for the same points.

Bare: one `run.log` of one dictionary a step, offline, timed until the last row is in W&B's run file on the disk, as an
acknowledgement of ours is. The two take turns in one run of this script, so that a busy machine slows both.

    python benchmarks/mirror_wandb.py [ROUNDS]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_CONSOLE": "off"}

from statsbridge_wandb import WandB

from statsbridge.mirror import Batch, Point, RunInfo, Series

SERIES, STEPS, BATCH = 500, 400, 100
"""A full budget of series; steps a round; steps a batch, as a relay that comes by every second has them."""


def points(first: int) -> list[list[Point]]:
    """The points of `STEPS` steps from `first`, one list a step."""
    curves = [Series(f"activation/std/blocks.{n}.conv", "statistic", "std", "activation") for n in range(SERIES)]
    return [
        [Point(curve, step, 1_750_000_000_000_000 + step, step + n / 7) for n, curve in enumerate(curves)]
        for step in range(first, first + STEPS)
    ]


def adapter_sends(folder: Path) -> tuple[Callable[[list[list[Point]]], None], Callable[[], None]]:
    """How the adapter delivers the points, and how it ends."""
    adapter = WandB("offline", dir=str(folder))
    run = RunInfo("bench", "bench", folder, datetime.now(UTC), {}, {}, restricted=False)
    adapter.open(run, adapter.destination(), {})

    def send(steps: list[list[Point]]) -> None:
        for start in range(0, len(steps), BATCH):
            adapter.send(Batch([point for step in steps[start : start + BATCH] for point in step]))

    return send, lambda: adapter.close("finished")


def bare_logs(folder: Path) -> tuple[Callable[[list[list[Point]]], None], Callable[[], None]]:
    """How W&B's client alone logs the points, and how it ends."""
    import wandb
    from statsbridge_wandb.records import RecordFile
    from statsbridge_wandb.worker import Recording

    settings = wandb.Settings(x_transaction_log_flush_interval=0.05, x_disable_stats=True)
    run = wandb.init(project="bench", dir=str(folder), mode="offline", settings=settings)
    file = Recording(run, RecordFile(Path(run.settings.sync_file)))

    def send(steps: list[list[Point]]) -> None:
        for step in steps:
            run.log({point.series.name: point.value for point in step}, step=step[0].step, commit=True)
        last = steps[-1][0].step
        file.wait(lambda: file.step >= last)

    return send, run.finish


def main(rounds: int) -> None:
    """Print the ratio of each round, and their median."""
    with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
        ways = {"adapter": adapter_sends(Path(ours)), "bare": bare_logs(Path(theirs))}
        ratios = []
        for number in range(rounds + 1):
            data, seconds = points(number * STEPS), {}
            for name in ways if number % 2 else reversed(ways):
                start = time.perf_counter()
                ways[name][0](data)
                seconds[name] = time.perf_counter() - start
            if number:  # the first round warms both
                rate = SERIES * STEPS / seconds["adapter"]
                ratios.append(seconds["bare"] / seconds["adapter"])
                print(f"round {number}: {rate:,.0f} points/s, ratio to bare {ratios[-1]:.2f}")
        for _, end in ways.values():
            end()
    print(f"median ratio {median(ratios):.2f} ({SERIES} series, {rounds} rounds of {STEPS} steps)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)

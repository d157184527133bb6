"""Points per second through the Aim adapter, as a ratio to bare use of Aim's client for the same points.

Two bare uses: one `run.track` a point, and one a dict of all points that share step and context. Blocks are interleaved
in one process, and each block ends when its points are stored; the ratio is that of the medians.

    python benchmarks/mirror_aim.py [--rounds 7] [--modules 100]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import aim
from statsbridge_aim import Aim
from statsbridge_aim.labels import label

from statsbridge.mirror import Batch, Point, RunInfo, Series

STATISTICS = (
    ("activation", "std"),
    ("activation", "mean"),
    ("activation", "zero_fraction"),
    ("update", "update_ratio"),
)


def make_points(modules: int, steps: Sequence[int]) -> list[Point]:
    series = [
        Series(f"{site}/{name}/block.{number}", "statistic", name, site, f"block.{number}", "Conv2d", depth=number)
        for number in range(modules)
        for site, name in STATISTICS
    ]
    return [Point(one, step, 0, step + number / 7) for step in steps for number, one in enumerate(series)]


def track_each(run: aim.Run, points: Sequence[Point]) -> None:
    for series, step, _, value in points:
        name, context = LABELS[series]
        run.track(value, name=name, step=step, context=context)


def track_dicts(run: aim.Run, points: Sequence[Point]) -> None:
    for (step, _), group in groupby(points, key=lambda point: (point.step, LABELS[point.series].context)):
        block = list(group)
        context = LABELS[block[0].series].context
        run.track({LABELS[series].name: value for series, _, _, value in block}, step=step, context=context)


LABELS = {point.series: label(point.series) for point in make_points(1000, [0])}


def measure(folder: str, modules: int, rounds: int) -> dict[str, float]:
    """Median seconds a point, for each way."""
    quiet = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}
    first, second = (aim.Run(repo=folder, **quiet) for _ in range(2))
    adapter = Aim(folder)
    info = RunInfo("bench", "bench", Path(folder), datetime.now(UTC), {}, {}, restricted=False)
    adapter.open(info, adapter.destination(), {})
    ways: dict[str, Callable[[list[Point]], None]] = {
        "run.track, a point each": lambda points: track_each(first, points),
        "run.track, dicts": lambda points: track_dicts(second, points),
        "adapter": lambda points: adapter.send(Batch(points)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds + 1):
        points = make_points(modules, range(5 * number, 5 * number + 5))
        for name in names[number % 3 :] + names[: number % 3]:
            begin = time.perf_counter()
            ways[name](points)
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - begin) / len(points))
    adapter.close("finished")
    first.close()
    second.close()
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    """Print one table."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--modules", type=int, default=100)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="statsbridge-bench-") as folder:
        medians = measure(folder, options.modules, options.rounds)
    for name, middle in medians.items():
        ratio = middle / medians["adapter"]
        print(f"{name:24} {middle * 1e6:7.1f} µs a point   adapter's rate to this one's: {ratio:.2f}")


if __name__ == "__main__":
    main()

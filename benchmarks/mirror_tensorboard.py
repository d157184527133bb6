"""Points per second through the TensorBoard adapter, as a ratio to TensorBoard's own file writer.

Bare: one event a step with all values of it in one Summary (float32, which takes less), through EventFileWriter,
flushed once at the end. Ours: the same points by `Adapter.send`, each batch on the disk (fsync) when it returns; a
batch a step is the worst that a mirror does, many steps a batch is what it does when it catches up. Rounds take
turns; medians. CPU is that of the whole process: none of it can be used by training at the same time.

    python benchmarks/mirror_tensorboard.py [--rounds 9] [--series 500] [--steps 40]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from statsbridge_tensorboard import TensorBoard
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from statsbridge.mirror import Batch, Point
from statsbridge.testing import made_batches, made_run


def bare(folder: Path, batches: Sequence[Batch]) -> None:
    """TensorBoard's writer by itself."""
    writer = EventFileWriter(str(folder), max_queue_size=1000)
    for batch in batches:
        event = Event(step=batch.points[0].step, wall_time=batch.points[0].time / 1e6)
        add = event.summary.value.add
        for point in batch.points:
            add(tag=point.series.name, simple_value=point.value)
        writer.add_event(event)
    writer.close()


def ours(folder: Path, batches: Sequence[Batch]) -> None:
    """The adapter, from opening to closing."""
    adapter = TensorBoard(folder)
    adapter.open(made_run(folder, restricted=True), adapter.destination(), {})
    for batch in batches:
        adapter.send(batch)
    adapter.close("finished")


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--series", type=int, default=500)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    points = [point for pair in made_batches(arguments.steps // 2, series=arguments.series) for point in pair.points]
    variants = {
        "bare": (bare, in_batches(points, arguments.series)),
        "a batch a step": (ours, in_batches(points, arguments.series)),
        "a batch in ten steps": (ours, in_batches(points, 10 * arguments.series)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    busy: dict[str, list[float]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory(prefix="statsbridge-bench-") as folder:
        for number in range(arguments.rounds + 1):
            for name in [*variants, *variants][number % 3 :][:3]:
                work, batches = variants[name]
                begin, cpu = time.perf_counter(), time.process_time()
                work(Path(folder) / f"{name}-{number}", batches)
                if number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - begin)
                    busy[name].append(time.process_time() - cpu)
    table = Table(title=f"{len(points):,} points of {arguments.series} curves")
    for heading in ("", "points/s", "ratio", "CPU µs a point"):
        table.add_column(heading, justify="right")
    base = statistics.median(seconds["bare"])
    for name, values in seconds.items():
        median = statistics.median(values)
        cpu = statistics.median(busy[name]) / len(points) * 1e6
        table.add_row(name, f"{len(points) / median:,.0f}", f"{base / median:.2f}", f"{cpu:.2f}")
    Console().print(table)


def in_batches(points: Sequence[Point], size: int) -> list[Batch]:
    """`size` points a batch."""
    return [Batch(points[first : first + size]) for first in range(0, len(points), size)]


if __name__ == "__main__":
    main()

"""The record: cost of a sampled step, rows a second written and read, bytes a row, and how all that grows.

Written rows are ratios to bare pyarrow doing the same table in turns: `pq.write_table` into memory, and to a file
without a sync. Growth writes a run of many sampled steps of 300 modules, five sites each, with merges beside it, and
says for each tenth of it what a step cost the writer. It writes some sixty steps a second, and waits for merges where
they fall behind by more than a training could make them.

    python benchmarks/log.py [--steps 10000] [--train 300]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table

import statsbridge
from statsbridge.cli.demo_model import ResidualNetwork
from statsbridge.log import SITES, Writer, create_run, load
from statsbridge.log.compaction import FAN_IN, compact_table
from statsbridge.log.parts import list_parts
from statsbridge.log.schema import SCHEMAS, to_table
from statsbridge.log.size import growth

MODULES = 300
ROWS = 5 * MODULES
ROUNDS = 15
FLOATS = [field.name for field in SCHEMAS["stats"] if field.type == pa.float64()]
CONSOLE = Console(width=110)


def step_columns(step: int) -> dict[str, Any]:
    """One sampled step: numbers that wander, as those of a training do, with noise in every digit."""
    noise = np.random.default_rng(step).normal(size=(len(FLOATS), ROWS))
    return {
        "step": step,
        "iteration": step,
        "time": 1.7e9 + step / 7,
        "module": [f"blocks.{row // 5 // 10}.layers.{row // 5 % 10}" for row in range(ROWS)],
        "type": "Linear",
        "call": 0,
        "order": np.repeat(np.arange(MODULES), 5),
        "depth": np.repeat(np.arange(MODULES), 5),
        "site": [SITES[row % 5] for row in range(ROWS)],
        "tensor": "",
        "count": np.full(ROWS, 4096),
        "nan_count": 0,
        "inf_count": 0,
        **{name: 1 + row * 0.01 for name, row in zip(FLOATS, noise, strict=True)},
    }


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def on_disk(run: Path) -> int:
    return sum(part.size for part in list_parts(run, "stats"))


def memory() -> float:
    """The most that this process has held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_writing(folder: Path) -> None:
    """Ours and bare pyarrow in turns, step by step."""
    writer = Writer(create_run(folder, name=None, config=None, information={}), flush_interval=3600)
    ours, bare, kept, submitting = [], [], [], []
    file = folder / "bare.parquet"
    for step in range(ROUNDS + 1):
        columns = step_columns(step)
        table = to_table("stats", columns)
        work = partial(dict, stats=columns)
        submitting.append(seconds(partial(writer.submit, work, rows=ROWS)))
        ours.append(seconds(writer.flush))
        bare.append(seconds(partial(pq.write_table, table, pa.BufferOutputStream(), compression="zstd")))
        kept.append(seconds(partial(pq.write_table, table, file, compression="zstd")))
    writer.close()
    table = Table(title=f"writing a sampled step of {ROWS} rows, median of {ROUNDS}")
    for column in ("what", "ms", "rows a second", "ratio to bare"):
        table.add_column(column, justify="right")
    middle = statistics.median(bare[1:])
    for name, times in (
        ("pyarrow into memory", bare),
        ("pyarrow to a file, no sync", kept),
        ("statsbridge: columns to a synced part", ours),
        ("training thread: handing it over", submitting),
    ):
        one = statistics.median(times[1:])
        table.add_row(name, f"{one * 1e3:.3f}", f"{ROWS / one:,.0f}", f"{one / middle:.3f}")
    CONSOLE.print(table)


def measure_bytes(folder: Path, steps: int) -> None:
    """A real training: what a row takes before and after compaction."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # bytes do not depend on them
    model = ResidualNetwork()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = torch.randn(512, 1, 8, 8), torch.randint(0, 10, (512,))
    run = statsbridge.init(model, dir=folder, every=1)
    for _ in range(steps):
        chosen = torch.randint(0, 512, (32,))
        loss = torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
    run.finish()
    rows = load(run.path).stats
    written = on_disk(run.path)
    pq.write_table(rows, folder / "bare.parquet")
    bare = (folder / "bare.parquet").stat().st_size
    compact_table(run.path, "stats", 0, fan_in=2)
    merged = on_disk(run.path)
    table = Table(title=f"bytes a row of a real training: {rows.num_rows} rows, {steps} steps")
    for column in ("what", "bytes a row", "ratio to bare"):
        table.add_column(column, justify="right")
    for name, size in (("pyarrow's defaults, one file", bare), ("as written", written), ("compacted", merged)):
        table.add_row(name, f"{size / rows.num_rows:.1f}", f"{size / bare:.3f}")
    CONSOLE.print(table)
    a_day = merged / rows.num_rows * ROWS * 8640
    CONSOLE.print(f"300 modules, 5 sites, a sampled step each 10 s: {a_day / 1e6:.0f} MB a day, compacted")


def measure_growth(folder: Path, steps: int) -> None:
    """A long run, step by step, merges beside it; then what readers wait for."""
    run = create_run(folder, name=None, config=None, information={})
    writer = Writer(run, flush_interval=3600)
    table = Table(title=f"growth: {steps} sampled steps of {ROWS} rows")
    for column in ("rows", "ms a step", "files", "MB on disk", "MB of memory"):
        table.add_column(column, justify="right")
    tenth, spent = max(steps // 10, 1), 0.0
    for step in range(steps):
        writer.submit(partial(dict, stats=step_columns(step)), rows=ROWS)
        spent += seconds(lambda: writer.flush(None))
        while len(list_parts(run, "stats")) > 3 * FAN_IN:
            time.sleep(0.05)  # a training flushes once a second at most, and merges keep up with that easily
        if step % tenth == tenth - 1:
            row = (spent / tenth * 1e3, len(list_parts(run, "stats")), on_disk(run) / 1e6, memory())
            table.add_row(f"{(step + 1) * ROWS:,}", *(f"{number:,.1f}" for number in row))
            spent = 0.0
    writer.close()
    CONSOLE.print(table)
    measure_reading(run, "as the run left it")
    CONSOLE.print(f"compact: {seconds(lambda: compact_table(run, 'stats', 0, fan_in=2)):.1f} s")
    measure_reading(run, "compacted")


def measure_reading(run: Path, title: str) -> None:
    module, sql = "blocks.7.layers.3", "SELECT module, site, avg(std), max(l2) FROM stats GROUP BY ALL"
    files = [part.path for part in list_parts(run, "stats")]
    series = statistics.median(seconds(lambda: load(run).series(module, "activation", "std")) for _ in range(3))
    aggregate = statistics.median(seconds(lambda: load(run).query(sql)) for _ in range(3))
    column = ["step", "std", "module", "site"]
    bare = statistics.median(
        seconds(lambda: pa.concat_tables([pq.read_table(file, columns=column, partitioning=None) for file in files]))
        for _ in range(3)
    )
    size = growth(load(run)).bytes
    CONSOLE.print(
        f"{title}: {len(files)} files, {size / 1e6:,.0f} MB; load + one series {series:.2f} s, whole-run aggregate "
        f"by SQL {aggregate:.2f} s; pyarrow reading four columns of all rows {bare:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--train", type=int, default=300)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="statsbridge-bench-") as name:
        measure_writing(Path(name))
        measure_bytes(Path(name), arguments.train)
        measure_growth(Path(name), arguments.steps)


if __name__ == "__main__":
    main()

"""Points a second through the MLflow adapter, as a ratio to MLflow's own client for the same points.

python benchmarks/mirror_mlflow.py [rounds]

Into a server on loopback (four workers, MLflow's default) and into an sqlite file. Bare: `MlflowClient.log_batch`,
1,000 metrics a call, one call after another and by four threads; the ratio is to the faster of the two. All take
turns within each round, each with a run of its own; the table gives medians.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import mlflow_helpers
from mlflow import MlflowClient
from mlflow.entities import Metric
from statsbridge_mlflow import MLflow

from statsbridge import testing
from statsbridge.mirror import Batch, Point

SERIES = 500
STEPS = 8


def main(rounds: int) -> None:
    """Print points a second, and the ratio."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        curves = [testing.made_series(f"blocks.{number}.conv", statistic=True) for number in range(SERIES)]
        points = [
            testing.made_point(curve, step, step + n / 7) for step in range(STEPS) for n, curve in enumerate(curves)
        ]
        with mlflow_helpers.running(Path(folder), workers=4) as server:
            for name, uri in (("server", server.uri), ("sqlite", f"sqlite:///{folder}/direct.db")):
                compare(name, uri, points, Path(folder), rounds)


def compare(name: str, uri: str, points: list[Point], folder: Path, rounds: int) -> None:
    """One line of the table."""
    kinds = {
        "bare": bare(uri, points, threads=1),
        "4 threads": bare(uri, points, threads=4),
        "ours": ours(uri, points, folder),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind, work in kinds.items():
            taken = work()
            if number:  # the first round warms up
                seconds[kind].append(taken)
    speed = {kind: len(points) / statistics.median(taken) for kind, taken in seconds.items()}
    fastest = [min(pair) for pair in zip(seconds["bare"], seconds["4 threads"], strict=True)]
    ratio = statistics.median(one / our for one, our in zip(fastest, seconds["ours"], strict=True))
    figures = "  ".join(f"{kind} {value:7.0f}/s" for kind, value in speed.items())
    print(f"{name:8}{figures}   ours / fastest bare {ratio:.2f}", flush=True)


def bare(uri: str, points: list[Point], *, threads: int) -> Callable[[], float]:
    """MLflow's client, given what it takes."""
    client = MlflowClient(uri)
    adapter = MLflow(uri)
    metrics = [Metric(adapter.key(series), value, moment // 1000, step) for series, step, moment, value in points]
    calls = [metrics[start : start + 1000] for start in range(0, len(metrics), 1000)]

    def work() -> float:
        run_id = client.create_run("0").info.run_id
        begin = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda call: client.log_batch(run_id, call, synchronous=True), calls))
        return time.perf_counter() - begin

    return work


def ours(uri: str, points: list[Point], folder: Path) -> Callable[[], float]:
    """The adapter, as the relay calls it."""

    def work() -> float:
        adapter = MLflow(uri)
        adapter.open(testing.made_run(folder), adapter.destination(), {})
        batch = Batch(points)
        begin = time.perf_counter()
        adapter.send(batch)
        return time.perf_counter() - begin

    return work


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)

"""For tests of `verify`: a run with something of everything, delivered by `sync`, and trackers with habits."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from log_rows import new_run, scalar_rows, stats_rows, write_run
from mirror_helpers import JsonLines

from statsbridge import MirrorError, Reject, Retry
from statsbridge.mirror import Batch, Destination, Reading, RunInfo
from statsbridge.mirror.sync import sync

STEPS = 6


def recorded(folder: Path) -> Path:
    """A finished run: two modules, a loss that breaks on the way, and two values logged late for one step."""
    run = new_run(folder)
    losses = (1.0, 1 / 3, math.nan, math.inf, 1e300, -0.0)
    steps = [
        {"stats": stats_rows(step, 2), "scalars": scalar_rows(step, loss=loss, lr=0.1)}
        for step, loss in zip(range(STEPS), losses, strict=True)
    ]
    late = [{"scalars": scalar_rows(1, val=v) | {"iteration": None, "time": 1.7e9 + v}} for v in (98.0, 99.0)]
    write_run(run, *steps, *late)
    return run


def deliver(run: Path, to: str) -> None:
    """Mirror all of the run."""
    (result,) = sync(run, to, report=lambda *_, **__: None, progress=lambda *_: None)
    assert (result.remaining, result.status) == (0, "finished"), result.reason


class Refusing(JsonLines):
    """Takes no NaN."""

    backend = "refusing"

    def send(self, batch: Batch) -> None:
        refused = [point for point in batch.points if math.isnan(point.value)]
        super().send(Batch([point for point in batch.points if not math.isnan(point.value)]))
        if refused:
            raise Reject("no NaN here", refused)


class Last(JsonLines):
    """Shows the last value of each key and step."""

    backend = "last"
    keeps: Literal["all", "last"] = "last"

    def read_back(self, run: RunInfo, destination: Destination, memory: Mapping[str, str]) -> Iterator[Reading]:
        kept = {(one.key, one.step): one for one in super().read_back(run, destination, memory)}
        yield from kept.values()


class Single(JsonLines):
    """Keeps float32, and no times."""

    backend = "single"

    def stored(self, value: float) -> float:
        return (
            math.copysign(math.inf, value)
            if abs(value) > 1e38
            else float(struct.unpack("f", struct.pack("f", value))[0])
        )

    def read_back(self, run: RunInfo, destination: Destination, memory: Mapping[str, str]) -> Iterator[Reading]:
        for one in super().read_back(run, destination, memory):
            yield Reading(one.key, one.step, None, self.stored(one.value))


class Torn(JsonLines):
    """Its store ends with a line that cannot be read."""

    backend = "torn"

    def read_back(self, run: RunInfo, destination: Destination, memory: Mapping[str, str]) -> Iterator[Reading]:
        for number, line in enumerate(self.path.read_text().splitlines(), start=1):
            try:
                name, step, time, value = json.loads(line)
            except ValueError:
                raise MirrorError(f"{self.path}, line {number}: cut short") from None
            yield Reading(name, step, time, float(value))


class Down(JsonLines):
    """Can be written but, today, not read."""

    backend = "down"

    def read_back(self, run: RunInfo, destination: Destination, memory: Mapping[str, str]) -> Iterator[Reading]:
        raise Retry("connection refused")


ADAPTERS = {
    "lines": "mirror_helpers:JsonLines",
    **{kind.backend: f"verify_helpers:{kind.__name__}" for kind in (Refusing, Last, Single, Torn, Down)},
}


def install(folder: Path) -> Path:
    """A folder for `sys.path` in which these adapters are installed."""
    information = folder / "verify_adapters-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: verify-adapters\nVersion: 1.0\n")
    points = "\n".join(f"{name} = {target}" for name, target in ADAPTERS.items())
    (information / "entry_points.txt").write_text(f"[statsbridge.adapters]\n{points}\n")
    return folder

"""Made-up runs, curves and values: what the checks send."""

from __future__ import annotations

import math
import string
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from statsbridge.mirror.contract import Batch, Event, Histogram, Point, RunInfo, Series

BEGIN = 1_750_000_000_123_456
"""Microseconds since the epoch of the first made-up value."""

HARD_VALUES = (
    math.nan,
    math.inf,
    -math.inf,
    1e300,
    -1e300,
    5e-324,
    sys.float_info.min,
    sys.float_info.max,
    -0.0,
    0.0,
    0.1,
    1 / 3,
    math.pi,
    16_777_217.0,  # 2**24 + 1: no float32
    9_007_199_254_740_991.0,  # 2**53 - 1
)

HARD_NAMES = (
    *(f"printable/{character}/x" for character in string.printable),
    *string.punctuation,
    "x" * 400,
    "x" * 399 + "y",
    "block/" * 80,
    "a.b",
    "a/b",
    "a_b",
    "a b",
    "a-b",
    "a:b",
    "a\\b",
    "a%2Fb",
    "A.B",
    "a..b",
    "a//b",
    "/a/b",
    "a/b/",
    ".",
    "..",
    "../a",
    "__a__",
    " a",
    "a ",
    "a\x00b",
    "größe/σ²",
    "gro\u0308ße/σ²",
    "勾配/ノルム",
    "🙂",
    "loss[0]",
    "loss(0)",
    "loss=0",
    "_step",
    "step",
)


def made_run(folder: Path, *, restricted: bool = False) -> RunInfo:
    """A run with an id of its own, whose files would lie below `folder`."""
    identity = f"made-up-{uuid.uuid4().hex[:12]}"
    path = Path(folder) / identity
    path.mkdir(parents=True)
    return RunInfo(
        id=identity,
        name="" if restricted else "made up",
        path=path,
        created=datetime.fromtimestamp(BEGIN / 1e6, UTC),
        config={} if restricted else {"lr": 0.001, "model": {"width": 64, "norm": None}, "tags": ["a", "b"]},
        versions={} if restricted else {"python": "3.11", "torch": "2.13"},
        restricted=restricted,
    )


def made_series(name: str, *, statistic: bool = False) -> Series:
    """The curve of a user's scalar called `name`, or of the standard deviation of a module called so."""
    if not statistic:
        return Series(name=name, kind="scalar")
    return Series(
        name=f"activation/std/{name}",
        kind="statistic",
        statistic="std",
        site="activation",
        module=name,
        type="Linear",
        depth=3,
    )


def made_point(series: Series, step: int, value: float, *, late: int = 0) -> Point:
    """A value recorded 10 ms after that of the step before; `late`: as many steps later still."""
    return Point(series, step, BEGIN + 10_000 * (step % 1_000_000 + late) + step % 7, value)


def made_batches(count: int, *, series: int = 5, first: int = 0) -> list[Batch]:
    """`count` batches of two steps each, from step `first`: scalars and statistics of modules, values all different."""
    curves = [made_series("loss"), *(made_series(f"blocks.{n}.conv", statistic=True) for n in range(series - 1))]
    return [
        Batch(
            points=[
                made_point(curve, step, math.sin(step * series + number + 1))
                for step in (first + 2 * batch, first + 2 * batch + 1)
                for number, curve in enumerate(curves)
            ]
        )
        for batch in range(count)
    ]


def made_histogram(step: int) -> Histogram:
    """Counts of 45 numbers between ten uneven edges of both signs."""
    edges = np.array([-4.0, -1.0, -0.25, -(2.0**-20), 0.0, 2.0**-20, 0.25, 1.0, 4.0, 1024.0])
    series = made_series("blocks.0.conv", statistic=True)
    return Histogram(series, step, BEGIN + 10_000 * step, np.arange(1, 10, dtype=np.int64), edges)


def made_event(step: int | None, kind: str = "loss_not_finite") -> Event:
    """A critical event, with all its fields, or one of the run as a whole, where `step` is None."""
    if step is None:
        return Event(
            0, None, BEGIN, kind, "info", None, None, None, None, None, "a note with <b>markup</b> | **signs**"
        )
    message = "activation of blocks.0.conv has 12 NaN & more < 13"
    return Event(1, step, BEGIN + step, kind, "critical", "blocks.0.conv", "activation", "", math.nan, 0.5, message)

"""What a tracker's adapter is, and what it is given. Everything here is public to authors of adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import plotly.graph_objects as go

CHANNELS = ("metrics", "histograms", "alerts", "figures", "artifacts", "config")
"""What can leave through an adapter; a policy allows or forbids each."""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a mirror. Equal series are the same curve.

    `name` is unique within a mirror and made for people: `loss`, `activation/std/blocks.0.conv1`,
    `by_type/activation/std/Conv2d`, `loss/smoothed`. The other fields say what it is made of.
    """

    name: str
    kind: Literal["scalar", "statistic", "aggregate"]
    statistic: str = ""  # a column of `stats`; "" for a scalar
    site: str = ""
    module: str | None = None  # None where there is none (scalars, aggregates)
    type: str = ""
    tensor: str = ""
    call: int = 0
    depth: int | None = None  # when the curve began
    smoothing: float | None = None  # weight of the bias-corrected moving average; None for raw values


class Point(NamedTuple):
    """One value of a curve. `time`: microseconds since the epoch (UTC), as recorded."""

    series: Series
    step: int
    time: int
    value: float


class Histogram(NamedTuple):
    """Counts of one tensor's elements, int64 of shape [bins], between `edges`, float64 of shape [bins + 1]."""

    series: Series
    step: int
    time: int
    counts: npt.NDArray[np.int64]
    edges: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one call of `Adapter.send` delivers, in order of recording.

    All points of a step come in one batch and next to each other, steps ascending; but a value that the user
    logged late for an earlier step comes when it was logged, in a batch of its own.

    `attempt`: 0, and one more each time that the run was resumed. All of a batch is of one attempt. A later one goes
    back to an earlier step, and repeats steps: what it says of them counts.
    """

    points: Sequence[Point] = ()
    histograms: Sequence[Histogram] = ()
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """A row of `events`. `time`: microseconds since the epoch (UTC)."""

    seq: int
    step: int | None
    time: int
    kind: str
    severity: str  # info, warning, critical
    module: str | None
    site: str | None
    tensor: str | None
    value: float | None
    threshold: float | None
    message: str


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run as the adapter may know it: what the policy withholds is empty."""

    id: str
    name: str
    path: Path
    created: datetime
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    restricted: bool  # whatever the tracker captures by itself must be off, or `open` raises PolicyError
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Destination:
    """Where an adapter would send to. Made without importing the tracker and without any I/O.

    `address`: a URL, or the absolute path of a folder. `artifacts`: where files would go, if elsewhere
    (None: to `address`). `explicit`: named by code or by the command line, not found in a default or the
    environment. `details`: what `open` needs of the moment of `init()`, such as the user's active run; JSON.
    """

    backend: str
    address: str
    explicit: bool
    artifacts: str | None = None
    details: Mapping[str, str] = field(default_factory=dict)


class Reading(NamedTuple):
    """One value as it lies in the tracker's store; `time` in microseconds, None where it keeps none."""

    key: str
    step: int
    time: int | None
    value: float


class Adapter(Protocol):
    """One tracker. Found by the entry point group `statsbridge.adapters`: `mlflow = "package:Class"`.

    The class is called without arguments for `backend="mlflow"`, with one for `backend="mlflow:<target>"`,
    and with `options()` as keywords when a mirror is taken up again. Making it, `destination` and `options`
    happen in the thread that calls `statsbridge.init` and import no tracker; all else happens in one thread
    of the mirror's own. A method may raise `Retry`, `Reject`, `MirrorError` (the mirror ends, `statsbridge
    sync` can take it up) and `PolicyError`.

    The policy has judged `destination()` and lets through what the adapter is given; the rest is up to the
    adapter. In a restricted run it sends to that address alone: it follows no redirect, and raises `PolicyError`
    in `open` where it cannot refuse them, or where the tracker would keep files in a place that `destination()`
    did not tell. Of `RunInfo`, `path` is for its own use on this machine and is not to be sent.
    """

    backend: str
    """The name of its entry point."""

    keeps: Literal["all", "last"]
    """Of several values that one key has at one step, the tracker keeps all, or the last."""

    lacks: frozenset[str]
    """Those of `CHANNELS` that the tracker has no place for: nothing is prepared for them, nor counted as sent."""

    requires: str
    """The package it imports when it opens, "" for none: `init` looks whether it is installed, without importing it."""

    def options(self) -> dict[str, Any]:
        """Keywords, as JSON, that make this adapter again. No secrets: they are written to the run folder."""

    def destination(self) -> Destination:
        """Where it would send to, now."""

    def open(self, run: RunInfo, destination: Destination, memory: MutableMapping[str, str]) -> None:
        """Import the tracker, and attach to its run or make one.

        `memory` is kept with the mirror's cursor: put in what a later `open` needs to find the same run of
        the tracker. It is saved after `open`, and together with the cursor each time that moves (which may be
        after several batches): what comes again after a crash is all that was sent since this `memory`.
        """

    def key(self, series: Series) -> str:
        """The tracker's name of a curve: pure, and different for different curves."""

    def stored(self, value: float) -> float:
        """What the tracker is documented to make of `value`: itself, where it keeps it exactly."""

    def send(self, batch: Batch) -> None:
        """Deliver a batch. Returning means that it is durable on the tracker's side.

        A batch may come again after a crash: the second delivery must change nothing.
        """

    def alert(self, event: Event) -> None:
        """Show an event to whoever watches the dashboard. Nothing, where the tracker has no such thing."""

    def figure(self, name: str, figure: go.Figure, step: int) -> None:
        """Show a figure, replacing or following the last of its name."""

    def artifact(self, path: Path) -> None:
        """Keep a copy of the folder `path`."""

    def read_back(self, run: RunInfo, destination: Destination, memory: Mapping[str, str]) -> Iterator[Reading]:
        """All values of this mirror in the tracker's store, without changing it. Called on a fresh adapter.

        Raises MirrorError where the store cannot be read; what is damaged is named, the rest is read first.
        """

    def close(self, status: str) -> None:
        """End what `open` began, and nothing of the user's. `status`: finished, failed or stopped."""

"""Helpers for tests of the mirrors: a tracker that is a file of JSON lines, and one that fails by plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal

import statsbridge
from statsbridge.mirror import Batch, Destination, Event, Reading, RunInfo, Series


class JsonLines:
    """Durable: each batch is appended and synced. A batch that comes again is found in the file, and skipped."""

    backend = "lines"
    keeps: Literal["all", "last"] = "all"
    requires = ""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.status: str | None = None
        self.alerts: list[Event] = []
        self.figures: list[tuple[str, int]] = []
        self.artifacts: list[set[str]] = []
        self.opened: RunInfo | None = None
        self.threads: set[str] = set()
        self._seen: set[tuple[Any, ...]] = set()

    def options(self) -> dict[str, Any]:
        return {"path": str(self.path)}

    def destination(self) -> Destination:
        return Destination(self.backend, str(self.path.absolute()), explicit=True)

    def open(self, run: RunInfo, destination: Destination, memory: MutableMapping[str, str]) -> None:
        self.opened = run
        memory.setdefault("run", run.id)
        self._seen = {tuple(line) for line in lines(self.path)}

    def key(self, series: Series) -> str:
        return series.name

    def stored(self, value: float) -> float:
        return value

    def send(self, batch: Batch) -> None:
        self.threads.add(threading.current_thread().name)
        new = [(point.series.name, point.step, point.time, repr(point.value)) for point in batch.points]
        new = [line for line in new if line not in self._seen]
        with self.path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in new))
            file.flush()
            os.fsync(file.fileno())
        self._seen.update(new)

    def alert(self, event: Event) -> None:
        self.alerts.append(event)

    def figure(self, name: str, figure: Any, step: int) -> None:
        self.figures.append((name, step))

    def artifact(self, path: Path) -> None:
        self.artifacts.append({file.relative_to(path).parts[0] for file in path.rglob("*") if file.is_file()})

    def read_back(self, run: RunInfo, destination: Destination, memory: Mapping[str, str]) -> Iterator[Reading]:
        for name, step, time, value in lines(self.path):
            yield Reading(name, step, time, float(value))

    def close(self, status: str) -> None:
        self.status = status


class Planned(JsonLines):
    """Before each call of `send` (or `open`) the next thing of the plan happens; then all goes well.

    A plan holds exceptions, which are raised, and callables, which are called with the batch; None is nothing.
    """

    backend = "planned"

    def __init__(self, path: str | Path, plan: list[Any] | None = None, opening: list[Any] | None = None) -> None:
        super().__init__(path)
        self.plan: deque[Any] = deque(plan or [])
        self.opening: deque[Any] = deque(opening or [])
        self.calls = 0

    def open(self, run: RunInfo, destination: Destination, memory: MutableMapping[str, str]) -> None:
        if self.opening:
            happen(self.opening.popleft())
        super().open(run, destination, memory)

    def send(self, batch: Batch) -> None:
        self.calls += 1
        if self.plan:
            happen(self.plan.popleft(), batch)
        super().send(batch)


class Hanging(JsonLines):
    """Never comes back from `send` until it is let go."""

    backend = "hanging"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.let_go = threading.Event()
        self.hangs = threading.Event()

    def send(self, batch: Batch) -> None:
        self.hangs.set()
        self.let_go.wait()
        super().send(batch)


def happen(what: Any, *arguments: Any) -> None:
    if isinstance(what, BaseException):
        raise what
    if callable(what):
        what(*arguments)


def lines(path: str | Path) -> list[tuple[str, int, int, str]]:
    """All that lies in the store: series, step, time, value."""
    try:
        return [tuple(json.loads(line)) for line in Path(path).read_text().splitlines()]
    except FileNotFoundError:
        return []


def logged(run: Path, names: Callable[[str], bool] = lambda name: True) -> list[tuple[str, int, int, str]]:
    """The scalars of a run as they must lie in the store, straight from the record."""
    table = statsbridge.load(run).scalars.sort_by("seq")
    times = table["time"].cast("int64").to_pylist()
    rows = zip(
        table["name"].to_pylist(), table["step"].to_pylist(), times, map(repr, table["value"].to_pylist()), strict=True
    )
    return [row for row in rows if names(row[0])]


def stored_scalars(path: str | Path) -> list[tuple[str, int, int, str]]:
    """Of what lies in the store, what the user and the training logged: raw, in order."""
    return [line for line in lines(path) if not line[0].endswith("/smoothed") and not _statistic(line[0])]


def _statistic(name: str) -> bool:
    return name.split("/", maxsplit=1)[0] in {"by_type", *statsbridge.log.SITES}


def install(folder: Path) -> Path:
    """Make `folder` one that offers the adapters of this file, once it is on the path, as a package would."""
    package = folder / "lines_for_tests-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lines-for-tests\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[statsbridge.adapters]\nlines = mirror_helpers:JsonLines\nplanned = mirror_helpers:Planned\n"
        "hanging = mirror_helpers:Hanging\nbroken = mirror_helpers_that_is_not_there:Broken\n"
        "lacking = mirror_helpers:Lacking\n"
    )
    return folder


class Lacking(JsonLines):
    """An adapter whose tracker is not installed."""

    backend = "lacking"
    requires = "a_tracker_that_is_not_there"


def start_python(source: str, folder: Path, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A Python process that runs `source`, with the adapters that `install` put into `folder`."""
    path = os.pathsep.join([str(Path(__file__).parent), str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )

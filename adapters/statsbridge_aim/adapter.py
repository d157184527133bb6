"""Curves of a run in Aim: a folder of this machine, or a server (`aim://host:port`)."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from statsbridge.errors import ConfigError, MirrorError, Reject, StatsBridgeError
from statsbridge.mirror import Batch, Destination, Event, Point, Reading, RunInfo, Series

from .distribution import even_bins
from .labels import Label, key, label
from .process import Worker
from .repository import inside_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

_SLICE = 500
"""Points in one request: an answer within the timeout means that Aim still moves."""

_PATIENCE = 10.0
"""Times the timeout that opening or reading a run may last: Aim asks a server several questions for each curve."""

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.CRITICAL}


class Aim:
    """Mirrors a run to an Aim repository, as a run of its own.

    Aim's client runs in a process of its own, which is killed when it hangs.

    Args:
        repo: a folder (or the `.aim` in it), or `aim://host:port`. None: the nearest folder upwards from the
            working folder that has an `.aim`, else the working folder, as Aim itself does.
        experiment: the experiment in Aim; None for Aim's default one.
        artifacts: where copies of files go, `file:///folder` or `s3://bucket`. None: into the repository,
            where that is a folder of this machine.
        timeout: seconds that Aim may take to answer before its process is killed and the batch is sent again.

    Raises ConfigError for a target that Aim's client would not take, or that holds a password.
    """

    backend = "aim"
    keeps: Literal["all", "last"] = "last"
    lacks: frozenset[str] = frozenset()
    requires = "aim"

    def __init__(
        self,
        repo: str | os.PathLike[str] | None = None,
        *,
        experiment: str | None = None,
        artifacts: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        self._repo = None if repo is None else _address(os.fspath(repo))
        if artifacts is not None and not artifacts.startswith(("file:///", "s3://")):
            raise ConfigError(f"artifacts={artifacts!r}: give file:///folder or s3://bucket")
        if not timeout > 0:
            raise ConfigError(f"timeout={timeout!r}: give a number of seconds above 0")
        self._experiment = experiment
        self._artifacts = artifacts
        self._timeout = timeout
        self._worker: Worker | None = None
        self._opened: tuple[RunInfo, Destination, MutableMapping[str, str]] | None = None
        self._numbers: dict[Series, int] = {}
        self._keys: dict[Series, str] = {}

    def options(self) -> dict[str, Any]:
        """Keywords that make this adapter again."""
        return {
            "repo": self._repo,
            "experiment": self._experiment,
            "artifacts": self._artifacts,
            "timeout": self._timeout,
        }

    def destination(self) -> Destination:
        """The server, or the folder that has (or will have) the repository in it."""
        address = self._repo if self._repo is not None else _default_folder()
        return Destination("aim", address, explicit=self._repo is not None, artifacts=self._artifacts)

    def open(self, run: RunInfo, destination: Destination, memory: MutableMapping[str, str]) -> None:
        """Take up the run of Aim that `memory` names, or begin one.

        Raises Retry while the server or the run is not to be had, PolicyError where a restricted run would
        tell the host's name, and MirrorError where Aim is not installed or the run no longer exists.
        """
        _require_aim()
        self._opened = (run, destination, memory)
        self._begin()

    def key(self, series: Series) -> str:
        """Name and context, as one line of JSON."""
        if series not in self._keys:
            self._keys[series] = key(*label(series))
        return self._keys[series]

    def stored(self, value: float) -> float:
        """The value itself: Aim keeps every float64, NaN, infinities and the sign of zero included."""
        return value

    def send(self, batch: Batch) -> None:
        """Deliver a batch; a second time it overwrites itself.

        When it returns, all is with the operating system, and outlives the death of any process (Aim does not
        wait for the disk). Raises Reject for points that Aim refuses, Retry where it does not answer.
        """
        refused: list[Point] = []
        reasons: list[str] = []
        for start in range(0, len(batch.points), _SLICE):
            part = batch.points[start : start + _SLICE]
            for place, reason in self._track(part):
                refused.append(part[place])
                reasons.append(reason)
        for histogram in batch.histograms:
            even = even_bins(histogram.counts, histogram.edges)
            if even is not None:
                name, context = label(histogram.series)
                self._ask("distribution", name, context | {"kind": "histogram"}, histogram.step, *even)
        if refused:
            raise Reject(f"Aim refuses {len(refused)} points: {reasons[0]}", refused)

    def alert(self, event: Event) -> None:
        """Put the event among the messages of the run, once."""
        told = {name: getattr(event, name) for name in ("kind", "step", "module", "site", "tensor")}
        fields = {name: value for name, value in told.items() if value is not None}
        self._ask("message", event.message, _LEVELS[event.severity], event.time / 1e6, event.seq, fields)

    def figure(self, name: str, figure: go.Figure, step: int) -> None:
        """Show the figure at its step, after those before it."""
        self._ask("figure", label(Series(name, "scalar")).name, figure, step)

    def artifact(self, path: Path) -> None:
        """Copy the files of a folder. Raises Reject where a server was not told where to."""
        destination = self._require_opened()[1]
        if _artifacts(destination) is None:
            raise Reject(
                f"{destination.address} keeps no files itself: give artifacts='s3://bucket' or 'file:///folder'"
            )
        self._ask("artifact", str(path.resolve()))

    def read_back(self, run: RunInfo, destination: Destination, memory: Mapping[str, str]) -> Iterator[Reading]:
        """All values of this mirror, whether Aim has indexed them or not. Aim keeps when they came, not when they were.

        Raises MirrorError where there is no such run, and at the end where sequences are damaged, by name.
        """
        _require_aim()
        if "run" not in memory:
            raise MirrorError("this mirror has not begun a run in Aim yet")
        worker = Worker(self._timeout)
        try:
            for rows in worker.rows("read", destination.address, memory["run"], patience=_PATIENCE):
                for name, step, value in rows:
                    yield Reading(name, step, None, value)
        finally:
            worker.kill()

    def close(self, status: str) -> None:
        """End the run of Aim. Raises Retry where Aim did not answer: the run then stays "in progress" there."""
        worker, self._worker = self._worker, None
        if worker is not None:
            try:
                worker.ask("close", status)
            finally:
                worker.kill()

    def _begin(self) -> Worker:
        """The worker process, with our run open in it."""
        if self._worker is None:
            run, destination, memory = self._require_opened()
            worker = Worker(self._timeout, hide_host=run.restricted and "://" not in destination.address)
            memory["run"] = worker.ask(
                "open",
                destination.address,
                memory.get("run"),
                run.restricted,
                self._experiment,
                run.name,
                _attributes(run),
                _artifacts(destination),
                patience=_PATIENCE,
            )
            self._numbers.clear()
            self._worker = worker
        return self._worker

    def _ask(self, verb: str, *arguments: object) -> Any:
        worker = self._begin()
        try:
            return worker.ask(verb, *arguments)
        except StatsBridgeError:
            self._worker = None
            raise

    def _track(self, points: Sequence[Point]) -> list[tuple[int, str]]:
        self._begin()  # a new process knows no labels
        fresh: dict[int, Label] = {}
        rows = []
        for series, step, _, value in points:
            number = self._numbers.get(series)
            if number is None:
                number = self._numbers[series] = len(self._numbers)
                fresh[number] = label(series)
            rows.append((number, step, value))
        refused: list[tuple[int, str]] = self._ask("track", fresh, rows)
        return refused

    def _require_opened(self) -> tuple[RunInfo, Destination, MutableMapping[str, str]]:
        if self._opened is None:
            raise MirrorError("the adapter is not open")
        return self._opened


def _require_aim() -> None:
    if importlib.util.find_spec("aim") is None:
        raise MirrorError("Aim is not installed: pip install 'statsbridge[aim]' (Python 3.12 at most)")


def _address(repo: str) -> str:
    """The target in one spelling: a server, or the absolute folder that Aim would take it for."""
    if repo.startswith("aim://"):
        if "@" in repo:
            raise ConfigError("an aim:// address names no user: give aim://host:port")
        return repo.rstrip("/")
    if "://" in repo:
        raise ConfigError(f"{repo!r}: give a folder or aim://host:port")
    folder = os.path.expanduser(repo.strip()).rstrip("/")
    # Aim cuts off the ending, even of a folder's own name; so must we, to meet the user's own runs.
    return os.path.abspath(folder.removesuffix(inside_name()) or "/")


def _default_folder() -> str:
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / inside_name()).is_dir():
            return str(folder)
    return str(here)


def _artifacts(destination: Destination) -> str | None:
    if destination.artifacts is not None or "://" in destination.address:
        return destination.artifacts
    return f"file://{destination.address}/{inside_name()}/artifacts"


def _attributes(run: RunInfo) -> dict[str, Any]:
    """What Aim shows among the parameters of the run."""
    told = {
        "id": run.id,
        "attempt": run.attempt,
        "created": run.created.isoformat(),
        "versions": dict(run.versions),
    }
    return {"statsbridge": told} | ({"hparams": _plain(run.config)} if run.config else {})


def _plain(value: Any) -> Any:
    """`value` in the types that Aim stores; anything else as text. Aim breaks at an empty name."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return str(value)  # a seed may be that large
    if isinstance(value, Mapping):
        return {str(name) or "(empty)": _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)

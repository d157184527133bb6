"""`MLflow`: the mirror's side of MLflow. Attaches to the user's run, or makes one; MLflow is imported by `open`."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from statsbridge.errors import MirrorError, Reject, Retry
from statsbridge.mirror import Batch, Destination, Event, Point, Reading, RunInfo, Series

from . import names, places, runs
from .artifacts import upload
from .connection import connect, quiet
from .delivery import Delivery, Pace
from .store import Metric, RunState, Store

if TYPE_CHECKING:
    import plotly.graph_objects as go

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}

# MLflow's own limit. Where the user's calls wait for the lock of the same sqlite file, they wait for less.
_MOST_METRICS = 1000
_MOST_BESIDE_THE_USER = 250


class MLflow:
    """Mirror into MLflow: into the run that is active in the thread that calls `init`, else into one of its own.

    Args:
        tracking_uri: a server (`http://…`) or a database (`sqlite:///…`); what the user has set where None.
        experiment: name of the experiment that a run of its own is made in; what the user has set where None.
        run_id: the run to attach to, whatever is active.

    Raises ConfigError where the tracking URI holds credentials in a spelling that can be read in two ways.
    """

    backend = "mlflow"
    keeps: Literal["all", "last"] = "all"
    lacks = frozenset({"histograms"})
    requires = "mlflow"

    def __init__(
        self, tracking_uri: str | None = None, *, experiment: str | None = None, run_id: str | None = None
    ) -> None:
        self._tracking_uri = None if tracking_uri is None else places.absolute(tracking_uri)
        self._experiment = experiment
        self._run_id = run_id
        self._store: Store | None = None
        self._run: RunState | None = None
        self._own = False
        # A batch that comes again after Retry goes on where it was.
        self._sending: tuple[Batch, Delivery] | None = None
        self.options()  # raises ConfigError

    def options(self) -> dict[str, Any]:
        """The arguments, without credentials: for those set MLflow's environment variables."""
        uri = self._tracking_uri
        return {
            "tracking_uri": None if uri is None else places.without_secrets(uri),
            "experiment": self._experiment,
            "run_id": self._run_id,
        }

    def destination(self) -> Destination:
        """The tracking URI, absolute and without credentials; the run and experiment that the user has set now."""
        users = places.absolute(places.user_tracking_uri())
        uri = self._tracking_uri or users
        details: dict[str, str] = {}
        if run_id := self._run_id or (places.user_run() if uri == users else None):
            details["run_id"] = run_id
        elif self._experiment is not None:
            details["experiment"] = self._experiment
        elif uri == users:
            details |= places.user_experiment()
        explicit = self._tracking_uri is not None
        return Destination(self.backend, places.without_secrets(uri), explicit, details=details)

    def open(self, run: RunInfo, destination: Destination, memory: MutableMapping[str, str]) -> None:
        """Attach to the run of `memory` or of `destination`, else find or make one of this run's own.

        Raises MirrorError where the run does not exist or the server refuses the credentials, Retry where it
        cannot be reached, PolicyError where a restricted run would pass through a proxy or a redirect.
        """
        store = self._store = connect(self._tracking_uri, destination, restricted=run.restricted)
        own = memory.get("own") == "yes"
        with quiet():
            run_id = memory.get("run_id") or destination.details.get("run_id")
            if run_id is None:
                run_id, own = runs.own_run(store, run, destination.details), True
            memory.update(run_id=run_id, own="yes" if own else "no")
            found = runs.existing(store, run_id)
            if own and found.status != "RUNNING":
                store.set_status(run_id, "RUNNING", end=None)
            runs.describe(store, found, run)
        self._run, self._own, self._restricted, self._memory = found, own, run.restricted, memory
        self._sending = None
        shared = not own and places.sqlite_path(destination.address) is not None
        self._pace = Pace(_MOST_BESIDE_THE_USER if shared else _MOST_METRICS)

    def key(self, series: Series) -> str:
        """`statsbridge/<name>`; where MLflow does not allow that name, what it does allow and a hash of the name."""
        return names.key(series.name)

    def stored(self, value: float) -> float:
        """MLflow keeps ±infinity as ±1.797…e308 and -0.0 as 0.0; all else is exact, NaN too."""
        return math.copysign(sys.float_info.max, value) if math.isinf(value) else value + 0.0

    def send(self, batch: Batch) -> None:
        """Store the points, at most 1,000 a request. Histograms are left out: MLflow has none.

        A batch that comes again is harmless: MLflow keeps equal values of one time and step once.
        Raises Reject for the points that MLflow refuses, when all others are stored.
        """
        store, run = self._opened()
        if self._sending is None or self._sending[0] is not batch:
            self._sending = batch, Delivery([self._metric(point) for point in batch.points])
        delivery = self._sending[1]
        with quiet():
            delivery.run(store, run.id, self._pace, lambda: runs.existing(store, run.id))
        self._sending = None
        if refused := delivery.refused:
            reason = next(iter(refused.values()))
            raise Reject(
                f"MLflow refuses {len(refused)} of {len(batch.points)} values: {reason}",
                points=[batch.points[place] for place in sorted(refused)],
            )

    def alert(self, event: Event) -> None:
        """MLflow has no alerts: the last of each kind is a tag on the run's page, `statsbridge.alert.<kind>`."""
        where = "" if event.step is None else f" at step {event.step}"
        text = f"{event.severity}{where}: {event.message}"
        store, run = self._opened()
        with quiet():
            store.set_tags(run.id, {names.plain(f"statsbridge.alert.{event.kind}"): text[: names.LONGEST_TAG]})

    def figure(self, name: str, figure: go.Figure, step: int) -> None:
        """An interactive page, artifact `statsbridge/figures/<name>.html`, in place of the last one."""
        # MLflow's own log_figure makes a page that loads its script from the internet.
        page = figure.to_html(include_plotlyjs=True, include_mathjax=False, div_id="figure")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, f"{names.plain(name).replace('/', '.')}.html")
            file.write_text(page, encoding="utf-8")
            self._upload("figures", [(file, file.name)])

    def artifact(self, path: Path) -> None:
        """The folder's files, as artifacts `statsbridge/record/<folder>/…`."""
        files = sorted(file for file in path.rglob("*") if file.is_file())
        self._upload("record", [(file, file.relative_to(path.parent).as_posix()) for file in files])

    def read_back(self, run: RunInfo, destination: Destination, memory: Mapping[str, str]) -> Iterator[Reading]:
        """All metrics of the run whose names begin with `statsbridge/`; times to the millisecond."""
        file = places.sqlite_path(destination.address)
        if "run_id" not in memory or (file is not None and not file.is_file()):
            raise MirrorError(f"there is no MLflow run of this mirror at {destination.address}")
        damaged: list[str] = []
        store = connect(self._tracking_uri, destination, restricted=run.restricted)
        with quiet():
            state = runs.existing(store, memory["run_id"])
        for key in sorted(key for key in state.metrics if key.startswith(names.PREFIX)):
            try:
                with quiet():
                    values = list(store.history(state.id, key))
            except Retry:
                raise
            except (MirrorError, ValueError) as error:
                damaged.append(f"{key} ({error})")
                continue
            for value in values:
                yield Reading(value.key, value.step, value.time * 1000, value.value + 0.0)
        if damaged:
            raise MirrorError(f"MLflow cannot read {len(damaged)} of its metrics: {', '.join(damaged[:10])}")

    def close(self, status: str) -> None:
        """End the run if it is one of our own; the user's stays as it is."""
        if self._run is not None and self._own:
            store, run = self._opened()
            with quiet():
                store.set_status(run.id, _STATUS[status], end=time.time_ns() // 1_000_000)

    def _metric(self, point: Point) -> Metric:
        name = point.series.name
        key = names.key(name)
        if key != names.PREFIX + name:  # whoever meets the new name can look up the old one there
            self._memory[f"name of {key}"] = name
        return Metric(key, point.value, point.time // 1000, point.step)

    def _opened(self) -> tuple[Store, RunState]:
        if self._store is None or self._run is None:
            raise MirrorError("open() has not been called")
        return self._store, self._run

    def _upload(self, folder: str, files: Sequence[tuple[Path, str]]) -> None:
        store, run = self._opened()
        with quiet():
            upload(
                store,
                run,
                [(file, f"statsbridge/{folder}/{path}") for file, path in files],
                restricted=self._restricted,
            )

"""Rows inside the user's own run: `WandB(attach=True)`.

Every `log()` of ours is without a commit, so that it uses up no step of the user's: it joins the row that their next
`log()` completes. Two of our steps in one row would overwrite each other, so each waits for a row of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statsbridge.errors import MirrorError, Retry
from statsbridge.mirror import Batch, Destination, Reading

from .keys import PREFIX, STEP, histogram_key, histogram_value, series_key
from .records import Row
from .target import active_run

if TYPE_CHECKING:
    import plotly.graph_objects as go

PATIENCE = 5.0
"""Seconds to wait for the user's next row before the relay is asked to come again."""

_POLL = 0.05  # each look asks W&B's service


class AttachedRun:
    """The user's run, as the mirror writes into it.

    Raises MirrorError where there is none, or another than at `statsbridge.init`.
    """

    def __init__(self, run: Any, destination: Destination, memory: MutableMapping[str, str]) -> None:
        wanted = destination.details["user_run"]
        if run is None or not wanted:
            raise MirrorError("WandB(attach=True) needs your own run: call wandb.init() before statsbridge.init()")
        if run.id != wanted:
            raise MirrorError(f"WandB(attach=True) began in your run {wanted}, which is not open in this process")
        self._run = run
        self._joined = -1  # the user's step at which the last row of ours joined
        self._batch: tuple[object, ...] | None = None  # the batch of which a part has been handed over
        self._done = 0  # rows of it that have
        memory["id"], memory["file"] = run.id, os.path.abspath(run.settings.sync_file)
        run.define_metric(PREFIX + "*", step_metric=STEP)

    def send(self, batch: Batch) -> None:
        """Hand each step to W&B's client; Retry where the user's run has no row for it yet."""
        some = batch.points[0] if batch.points else batch.histograms[0]
        begun = (len(batch.points), some.step, some.time)
        if begun != self._batch:
            self._batch, self._done = begun, 0
        for row in _rows(batch)[self._done :]:
            self._wait_for_a_row()
            self._log(row)
            self._joined = self._step()
            self._done += 1
        self._batch = None

    def alert(self, title: str, text: str, level: str) -> None:
        """Send an alert of the user's run."""
        self._call(self._run.alert, title, text, level=level, wait_duration=timedelta(milliseconds=1))

    def figure(self, key: str, figure: go.Figure) -> None:
        """Add a Plotly panel to the user's current row."""
        import wandb

        self._log({key: wandb.Plotly(figure)})

    def artifact(self, name: str, path: Path) -> None:
        """Add an artifact to the user's run."""
        import wandb

        artifact = wandb.Artifact(name, type="statsbridge")
        artifact.add_dir(str(path))  # copied: the folder may be gone before it is uploaded
        self._call(self._run.log_artifact, artifact)

    @staticmethod
    def readings(row: Row) -> Iterator[Reading]:
        """Our values in a row of the user's run."""
        if STEP in row.values:
            step = int(row.values[STEP])
            for key, value in row.values.items():
                if key.startswith(PREFIX) and key != STEP:
                    yield Reading(key, step, None, value)

    def _wait_for_a_row(self) -> None:
        end = time.monotonic() + PATIENCE
        while self._joined >= 0 and self._step() <= self._joined:
            if time.monotonic() > end:
                raise Retry(f"your W&B run is still at step {self._joined}, whose row holds an earlier step of ours")
            time.sleep(_POLL)

    def _step(self) -> int:
        if active_run() is not self._run:
            raise MirrorError("your W&B run has ended: it takes nothing any more")
        try:
            return int(self._run.step)
        except TimeoutError as error:
            raise Retry(f"the W&B client of your run does not answer: {error}") from error

    def _log(self, row: dict[str, Any]) -> None:
        self._call(self._run.log, row, commit=False)

    def _call(self, function: Any, *arguments: Any, **keywords: Any) -> None:
        import wandb

        try:
            function(*arguments, **keywords)
        except (wandb.errors.UsageError, ConnectionError) as error:
            raise MirrorError(f"your W&B run has ended: it takes nothing any more ({error})") from error


def _rows(batch: Batch) -> list[dict[str, Any]]:
    """One dictionary a step, in order of appearance; another where a key has a second value at that step."""
    import wandb

    rows: list[dict[str, Any]] = []
    newest: dict[int, dict[str, Any]] = {}  # step → its last row

    def put(step: int, key: str, value: Any) -> None:
        row = newest.get(step)
        if row is None or key in row:
            row = newest[step] = {STEP: step}
            rows.append(row)
        row[key] = value

    for point in batch.points:
        put(point.step, series_key(point.series.name, attached=True), point.value)
    for histogram in batch.histograms:
        counted: Any = histogram_value(histogram.counts, histogram.edges)
        key = histogram_key(histogram.series.name, attached=True)
        put(histogram.step, key, wandb.Histogram(np_histogram=counted))
    return rows

"""Figures that the user logs: stored first in the run's folder, then told of, so that mirrors find them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..log.figures import KIND, FigureFiles
from ..log.writer import Writer
from ..reporting import Reporter

#: Beyond this a figure is no picture any more but a data set; what waits to be written must stay small.
LARGEST = 32 << 20

# One figure weighs as much in the writer's queue as so many bytes of rows would.
_BYTES_A_ROW = 200


class FigureLog:
    """Takes figures in the training thread and stores them in the writer's."""

    def __init__(self, path: Path, rank: int, writer: Writer, reporter: Reporter) -> None:
        self._files = FigureFiles(path, rank)
        self._writer = writer
        self._reporter = reporter

    def log(self, name: str, figure: object, step: int) -> None:
        """Store a Plotly figure as it is now; anything else is a problem, which is said."""
        convert = getattr(figure, "to_json", None)
        if not type(figure).__module__.startswith("plotly.") or not callable(convert):
            self._refuse(
                "bad_figure",
                f"log_figure({name!r}): {type(figure).__module__}.{type(figure).__name__} is no Plotly figure; not "
                "recorded. Save one of Matplotlib with its own savefig(), or draw it with Plotly",
                name,
                step,
            )
            return
        data = str(convert()).encode(errors="backslashreplace")
        if len(data) > LARGEST:
            self._refuse(
                "figure_too_large",
                f"log_figure({name!r}): it takes {len(data) / 2**20:.0f} MiB as JSON and may take {LARGEST >> 20}; not "
                "recorded. Draw fewer points",
                name,
                step,
            )
        elif self._writer.full:
            self._refuse("record_full", f"log_figure({name!r}): the record has reached max_bytes; not kept", name, step)
        else:
            now = time.time_ns() // 1000
            work = partial(self._store, name, data, step, now)
            if not self._writer.submit(work, rows=1 + len(data) // _BYTES_A_ROW):
                why = "too much waits for the disk (is it hanging?), or another process has the run now"
                self._refuse("figure_lost", f"log_figure({name!r}): {why}; not kept", name, step)

    def _store(self, name: str, data: bytes, step: int, now: int) -> Mapping[str, Mapping[str, Any]]:
        """Write it; the event that tells of it. In the writer's thread."""
        try:
            number = self._files.store(data)
        except OSError as error:
            self._refuse("figure_lost", f"figure {name!r} could not be written: {error}", name, step)
            return {}
        told = {"kind": KIND, "severity": "info", "message": name, "value": float(number), "step": step, "time": now}
        return {"events": {column: [value] for column, value in told.items()}}

    def _refuse(self, kind: str, message: str, name: str, step: int) -> None:
        self._reporter.problem(kind, message, cause=f"{kind} {name}", step=step)

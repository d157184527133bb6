"""Figures that the user logged: each a file of Plotly's JSON in the run's folder, told of by an event `figure`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import LogError
from .files import make_folder, write_durably

FOLDER = "figures"

#: The kind of event that tells of one: `message` is its name, `value` the number of its file.
KIND = "figure"

_NAME = re.compile(r"([0-9]+)\.json")


@dataclass(frozen=True, slots=True)
class StoredFigure:
    """A figure as it lies on disk. `name` is the user's text; `file` holds it as Plotly's JSON."""

    name: str
    step: int | None
    file: Path

    def read(self) -> Mapping[str, Any]:
        """What `plotly.graph_objects.Figure` takes. Raises LogError where the file cannot be read."""
        try:
            figure = json.loads(self.file.read_bytes())
        except (OSError, ValueError) as error:
            raise LogError(f"figure {self.name!r} cannot be read: {self.file}: {error}") from error
        if not isinstance(figure, Mapping):
            raise LogError(f"figure {self.name!r} cannot be read: {self.file} is no JSON object")
        return figure


class FigureFiles:
    """Stores the figures of one rank of a run. Used by the writer's thread only."""

    def __init__(self, run: Path, rank: int) -> None:
        self._folder = figure_folder(run, rank)
        self._next: int | None = None

    def store(self, data: bytes) -> int:
        """Write a figure, durably; the number of its file. Raises OSError."""
        make_folder(self._folder)
        if self._next is None:  # an earlier attempt at the run may have left some
            names = (_NAME.fullmatch(file.name) for file in self._folder.iterdir())
            self._next = 1 + max((int(name[1]) for name in names if name), default=-1)
        write_durably(self._folder / _file_name(self._next), data)
        self._next += 1
        return self._next - 1


def stored_figures(run: Path, events: pa.Table, *, rank: int | None = None) -> list[StoredFigure]:
    """The figures that rows of `events` tell of, in their order.

    `events`: of the run at `run`, as `RunData.events`, or without the column `rank`: then of the one given.
    """
    told = events.filter(pc.equal(events["kind"].cast(pa.string()), KIND))
    ranks = told["rank"].to_pylist() if rank is None else [rank] * told.num_rows
    rows = zip(told["message"].to_pylist(), told["step"].to_pylist(), told["value"].to_pylist(), ranks, strict=True)
    return [
        StoredFigure(name or "", step, figure_folder(run, of_rank) / _file_name(int(number)))
        for name, step, number, of_rank in rows
        if number is not None and number >= 0
    ]


def figure_folder(run: Path, rank: int) -> Path:
    """Where the figures of a rank lie."""
    return run / FOLDER / f"rank={rank}"


def _file_name(number: int) -> str:
    return f"{number:06d}.json"

"""What a test of the toolkit found: whether it passed, its numbers, and what to try."""

from __future__ import annotations

import csv
import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ..run import Run

Number = float | int | str | None

_COLUMNS = 100
_MARKS = {True: "✓", False: "✗", None: "–"}
_WORDS = {True: "passed", False: "failed", None: "undecided"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One test and its outcome; `print` it, draw it, save it, or log it to a run.

    `name`: the test, which begins the names it is logged under. `passed`: None where the test could not tell, or has
    nothing to pass. `numbers`: what was measured, by name; None for what could not be. `explanation`: what they
    mean and what to try, in sentences. `table`: columns of equal length, such as a loss by step; empty where the test
    has none.
    """

    name: str
    passed: bool | None
    numbers: dict[str, Number]
    explanation: str
    table: Mapping[str, Sequence[Number]] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        """What a terminal shows: the outcome, the numbers, the explanation."""
        width = max(map(len, self.numbers), default=0)
        lines = [f"{_MARKS[self.passed]} {self.name}: {_WORDS[self.passed]}"]
        lines += [f"    {name.replace('_', ' '):<{width}}  {shown(value)}" for name, value in self.numbers.items()]
        for line in self.explanation.splitlines():
            lines += textwrap.wrap(line, _COLUMNS, initial_indent="  ", subsequent_indent="  ")
        return "\n".join(lines)

    def figure(self) -> go.Figure:
        """The result as a plotly figure. Raises ConfigError where plotly is not installed."""
        from ..view.figures_debug import numbers_figure

        return numbers_figure(self.name, self.passed, self.numbers)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write `table`, or the numbers by name where there is none. Missing is empty; a text is quoted.

        Raises ConfigError where the file cannot be written.
        """
        if self.table:
            header, rows = list(self.table), list(zip(*self.table.values(), strict=True))
        else:
            header, rows = ["name", "value"], list(self.numbers.items())
        try:
            with Path(path).open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(header)
                writer.writerows(rows)
        except OSError as error:
            raise ConfigError(f"to_csv: {os.fspath(path)} cannot be written: {error.strerror or error}") from error

    def log_to(self, run: Run) -> None:
        """Record it in a run, at the last closed step: numbers as scalars, the figure, and the explanation as a note.

        The numbers are called `<name>/<number>`, the outcome `<name>/passed` (1 or 0). A curve goes into the figure:
        its axis is none of training steps. Raises ConfigError, after the numbers, where plotly is not installed.
        """
        run.log(self.scalars())
        run.note(f"{self.name}: {_WORDS[self.passed]}. {' '.join(self.explanation.split())}")
        run.log_figure(self.name, self.figure())

    def scalars(self) -> dict[str, float]:
        """The numbers as a run records them: `<name>/<number>`, and `<name>/passed` as 1 or 0 where it is known."""
        outcome: dict[str, Number] = {} if self.passed is None else {"passed": int(self.passed)}
        return {
            f"{self.name}/{name}": float(value)
            for name, value in {**outcome, **self.numbers}.items()
            if isinstance(value, (int, float))
        }


def shown(value: Any) -> str:
    """A number to four digits, a text as it is, a dash for what is missing."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return str(value)


def named(names: Iterable[str], most: int = 3) -> str:
    """The first few names, and how many more."""
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")

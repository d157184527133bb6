"""What is wrong with a recorded training, offline, by the rules that a live one is watched with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..log.reader import RunData
from .findings import Finding
from .run_data import RunData as RunDataOfAnalyze
from .thresholds import Thresholds, make_thresholds
from .watch import COLUMNS, Watch

if TYPE_CHECKING:
    from .baseline import Baseline

#: Rows of `stats` that are looked at together: their columns are copied.
_ROWS = 200_000
#: Rows of `stats` that are read together.
_WINDOW = 4_000_000


def diagnose(
    data: RunData,
    *,
    thresholds: Thresholds | Mapping[str, float] | None = None,
    baseline: Baseline | None = None,
) -> list[Finding]:
    """What is wrong with a run, first cause first; empty for a healthy one.

    Args:
        data: the run. Rows of several ranks are merged first.
        thresholds: the limits of the rules, or some of them by name; None for the usual ones.
        baseline: the ranges of a good run: what it had too is no finding, what stays outside of them is one.

    Raises:
        ConfigError: a threshold does not exist, or is no number of at least 0.
    """
    watch = Watch(make_thresholds(thresholds), baseline=baseline)
    others = {
        "modules": _of_lowest_rank(data.modules),
        "scalars": data.merged("scalars"),
        "events": data.events,
    }
    for piece, below in _windows(data):
        taken = {name: table.filter(_inside(table["step"], below)) for name, table in others.items()}
        others = {name: table.filter(pc.invert(_inside(table["step"], below))) for name, table in others.items()}
        for tables in _pieces(piece, taken):
            watch.add(tables)
    return watch.findings()


def _windows(data: RunData) -> Iterator[tuple[pa.Table, int | None]]:
    """`stats` in windows of steps that memory holds easily, each with the step that the next begins with."""
    if "stats" in data.__dict__ or not isinstance(data, RunDataOfAnalyze):
        yield data.merged("stats"), None
        return
    steps = data.select(columns=("step",))["step"].to_numpy()
    begins = [None]
    if len(steps) > _WINDOW and not (np.diff(steps) < 0).any():
        begins += np.unique(steps[_WINDOW::_WINDOW]).tolist()
    # Of a large run not the columns that no rule looks at.
    for begin, end in zip(begins, [*begins[1:], None], strict=True):
        yield data.select(columns=COLUMNS, steps=(begin, None if end is None else end - 1)), end


def _of_lowest_rank(table: pa.Table) -> pa.Table:
    return table.filter(pc.equal(table["rank"], pc.min(table["rank"]))) if table.num_rows else table


def _pieces(stats: pa.Table, others: Mapping[str, pa.Table]) -> Iterator[dict[str, pa.Table]]:
    """The tables in pieces of whole steps; in one piece where the steps do not rise."""
    steps = stats["step"].to_numpy()
    if len(steps) <= _ROWS or (np.diff(steps) < 0).any():
        yield {"stats": stats, **others}
        return
    starts = np.flatnonzero(np.diff(steps)) + 1
    wanted = np.searchsorted(starts, np.arange(_ROWS, len(steps), _ROWS))
    cuts = [0, *np.unique(starts[wanted[wanted < len(starts)]]).tolist(), len(steps)]
    for begin, end in pairwise(cuts):
        below = None if end == len(steps) else int(steps[end])
        piece = {name: table.filter(_inside(table["step"], below)) for name, table in others.items()}
        others = {name: table.filter(pc.invert(_inside(table["step"], below))) for name, table in others.items()}
        yield {"stats": stats.slice(begin, end - begin), **piece}


def _inside(steps: pa.ChunkedArray, below: int | None) -> pa.ChunkedArray:
    """Which steps lie below a limit; those without a step belong to the last piece."""
    if below is None:
        return pc.fill_null(pc.equal(steps, steps), True)
    return pc.fill_null(pc.less(steps, below), False)

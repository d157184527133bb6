"""What is wrong with a recorded training, offline, by the rules that a live one is watched with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import DamagedPart
from ..log.reader import RunData, in_turn
from .blocks import COLUMNS
from .findings import Finding
from .gathering import NotInOrderError, blocks_of
from .run_data import RunData as RunDataOfAnalyze
from .thresholds import Thresholds, make_thresholds
from .watch import Watch

if TYPE_CHECKING:
    from .baseline import Baseline

#: Rows of `stats` that are looked at together: their columns are copied.
_ROWS = 200_000
#: Rows of `stats` that are read together, where ranks have to be merged.
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
    limits = make_thresholds(thresholds)
    large = in_turn(data)
    if large is not None:
        with suppress(NotInOrderError, DamagedPart):  # then the other way puts it in order, and says what is damaged
            watch, others = Watch(limits, baseline=baseline, whole=True), _Others(data)
            for block, below in blocks_of(*large, watch.known):
                watch.add_block(block, others.take(below))
                del block  # before the next takes its memory
            return watch.findings()
    watch, others = Watch(limits, baseline=baseline, whole=True), _Others(data)
    for stats, below in _pieces(data):
        watch.add({"stats": stats, **others.take(below)})
    return watch.findings()


class _Others:
    """The tables beside `stats`, of which each row is taken once."""

    def __init__(self, data: RunData) -> None:
        self._tables = {
            "modules": _of_lowest_rank(data.modules),
            "scalars": data.merged("scalars"),
            "events": data.events,
        }

    def take(self, below: int | None) -> Mapping[str, pa.Table]:
        """The rows of steps below a limit, that were not taken; without a limit all others."""
        there = self._tables
        if below is None:
            self._tables = {name: table.slice(0, 0) for name, table in there.items()}
            return there
        inside = {name: pc.fill_null(pc.less(table["step"], below), False) for name, table in there.items()}
        self._tables = {name: table.filter(pc.invert(inside[name])) for name, table in there.items()}
        return {name: table.filter(inside[name]) for name, table in there.items()}


def _of_lowest_rank(table: pa.Table) -> pa.Table:
    return table.filter(pc.equal(table["rank"], pc.min(table["rank"]))) if table.num_rows else table


def _pieces(data: RunData) -> Iterator[tuple[pa.Table, int | None]]:
    """`stats` in pieces of whole steps, each with the step that the next begins with, None for the last."""
    for stats, end in _windows(data):
        steps = stats["step"].to_numpy()
        cuts = [0, len(steps)]
        if len(steps) > _ROWS and not (np.diff(steps) < 0).any():
            starts = np.flatnonzero(np.diff(steps)) + 1
            wanted = np.searchsorted(starts, np.arange(_ROWS, len(steps), _ROWS))
            cuts = [0, *np.unique(starts[wanted[wanted < len(starts)]]).tolist(), len(steps)]
        for first, last in pairwise(cuts):
            yield stats.slice(first, last - first), end if last == len(steps) else int(steps[last])


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

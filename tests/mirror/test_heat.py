"""What the heat maps remember: extremes, in bounded memory, however the rows were cut; and when they are due."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from selector_helpers import Step, chunk, stats_row

from statsbridge.mirror import Selection
from statsbridge.mirror.heat import MOST_COLUMNS
from statsbridge.mirror.selector import Selector


def steps(count: int, attempt: int = 0, first: int = 0, **spikes: float) -> list[Step]:
    """Two modules, std 1 and 2, but for the steps in `spikes` (`step_7=…`), where `a` has another."""
    return [
        Step(
            step,
            stats=[
                stats_row("b", std=2.0, depth=2),
                stats_row("a", std=spikes.get(f"step_{step}", 1.0), depth=1),
            ],
            attempt=attempt,
        )
        for step in range(first, first + count)
    ]


def drawn(selector: Selector, final: bool = True) -> dict[str, go.Figure]:
    return {name: figure for name, figure, _ in selector.figures(final)}


def cells(figure: go.Figure) -> np.ndarray:
    return np.array(figure.data[0].z, np.float64)


def test_one_figure_a_site_rows_by_depth() -> None:
    selector = Selector(Selection())
    rows = [stats_row("a", "activation", std=10.0, depth=2), stats_row("b", "activation", std=100.0, depth=1)]
    rows.append(stats_row("a", "update", update_ratio=0.01, tensor="weight"))
    selector.add(chunk([Step(4, stats=rows)]))
    ((first, activation, step), (second, update, _)) = selector.figures(final=True)
    assert (first, second, step) == ("heatmap/activation", "heatmap/update", 4)
    assert list(activation.data[0].y) == ["1 · b", "2 · a"]
    assert cells(activation).tolist() == [[2.0], [1.0]]
    assert list(update.data[0].y) == ["1 · a.weight"]
    assert cells(update).tolist() == [[-2.0]]


def test_a_spike_survives_any_number_of_steps() -> None:
    selector = Selector(Selection())
    selector.add(chunk(steps(5 * MOST_COLUMNS, step_777=1e4, step_1503=1e-4)))
    figure = drawn(selector)["heatmap/activation"]
    grid = cells(figure)
    assert grid.shape[0] == 2
    assert MOST_COLUMNS / 2 <= grid.shape[1] <= MOST_COLUMNS
    edges = np.array(figure.data[0].x)
    assert len(edges) == grid.shape[1] + 1
    for step, value in ((777, 4.0), (1503, -4.0)):
        assert grid[0, np.searchsorted(edges, step, side="right") - 1] == value
    assert (np.abs(grid[0]) > 0).sum() == 2


def test_a_step_that_was_broken_stays_marked() -> None:
    selector = Selector(Selection())
    record = steps(2 * MOST_COLUMNS)
    broken = [stats_row("a", std=1.0, nan_count=1, depth=1), stats_row("b", std=2.0, depth=2)]
    record[301] = Step(301, stats=broken)
    selector.add(chunk(record))
    figure = drawn(selector)["heatmap/activation"]
    marks = np.array(figure.data[1].z, np.float64)
    assert (marks == 1).sum() == 1
    assert np.isnan(marks[1]).all()


def test_the_cut_into_chunks_changes_no_figure() -> None:
    record = [*steps(2 * MOST_COLUMNS + 3, step_5=1e3), *steps(100, attempt=1, first=650)]
    whole, pieces = Selector(Selection()), Selector(Selection())
    whole.add(chunk(record))
    for at in range(0, len(record), 37):
        pieces.add(chunk(record[at : at + 37]))
    assert drawn(whole)["heatmap/activation"].to_json() == drawn(pieces)["heatmap/activation"].to_json()


def test_a_resumed_run_supersedes_what_came_after() -> None:
    selector = Selector(Selection())
    selector.add(chunk([*steps(10, step_7=1e3), *steps(3, attempt=1, first=5)]))
    figure = drawn(selector)["heatmap/activation"]
    assert list(figure.data[0].x) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert (cells(figure)[0] == 0).all()


def test_figures_are_due_when_the_steps_have_doubled_and_at_the_end() -> None:
    selector = Selector(Selection())
    due = []
    for step in steps(40):
        selector.add(chunk([step]))
        if selector.figures(final=False):
            due.append(step.step + 1)
    assert due == [8, 16, 32]
    assert len(selector.figures(final=True)) == 1
    assert selector.figures(final=True) == []


def test_no_figures_where_none_are_wanted_or_nothing_was_measured() -> None:
    off, empty = Selector(Selection(figures=False)), Selector(Selection())
    off.add(chunk(steps(10)))
    empty.add(chunk([Step(0, stats=[stats_row(std=None)])]))
    assert off.figures(final=True) == empty.figures(final=True) == []


def test_without_plotly_there_are_no_figures_and_no_error() -> None:
    program = (
        f"import sys; sys.modules['plotly'] = None; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from selector_helpers import *\n"
        "selector = Selector(Selection())\n"
        "selector.add(chunk([Step(0, stats=[stats_row(std=1.0)])]))\n"
        "assert selector.figures(final=True) == []\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

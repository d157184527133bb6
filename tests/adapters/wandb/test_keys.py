"""Names of curves, histograms and figures, and what becomes of histograms and events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsbridge_wandb.keys import (
    alert_text,
    alert_title,
    figure_key,
    histogram_key,
    histogram_value,
    series_key,
)

from statsbridge.mirror import Event

HARD = ["", "_step", "~_step", "step", "~step", "histograms/a", "~histograms/a", "figures/a", "\ud800"]
NAMES = st.text(st.characters(), max_size=12) | st.sampled_from([*HARD, '"\\ud800"', '~"\\ud800"'])


@given(st.sets(NAMES, min_size=2, max_size=30), st.booleans())
def test_different_names_have_different_keys_that_can_be_stored(names: set[str], attached: bool) -> None:
    keys = [series_key(name, attached=attached) for name in names]
    keys += [histogram_key(name, attached=attached) for name in names]
    assert len(set(keys)) == len(keys)
    for key in keys:
        key.encode()
        assert not key.startswith("_")
        assert key not in {"", "statsbridge/step"}
        assert key.startswith("statsbridge/") or not attached


def test_plain_names_are_kept() -> None:
    for name in ("loss", "activation/std/blocks.0.conv1", "lr/Adam/0", "größe/σ²", "x" * 400):
        assert series_key(name, attached=False) == name
        assert series_key(name, attached=True) == f"statsbridge/{name}"


def test_a_figure_key_can_be_a_file_name() -> None:
    names = ["depth × step/activation.std", "a:b", "a*b", "a\0b", "../../etc", "x" * 300, "x" * 301]
    keys = [figure_key(name, attached=False) for name in names]
    assert keys[0] == "figures/depth × step/activation.std"
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert len(key) < 150
        assert not set(key) & set(':*\0?"<>|')
        assert ".." not in key


@pytest.mark.parametrize("bins", [1, 197, 512, 513, 1200])
def test_a_histogram_of_any_size_keeps_its_counts_within_its_edges(bins: int) -> None:
    generator = np.random.default_rng(bins)
    counts, edges = generator.integers(0, 100, bins), np.sort(generator.normal(size=bins + 1))
    merged, merged_edges = histogram_value(counts, edges)
    assert len(merged) <= 512
    assert len(merged_edges) == len(merged) + 1
    assert sum(merged) == counts.sum()
    assert (merged_edges[0], merged_edges[-1]) == (edges[0], edges[-1])
    for edge, total in zip(merged_edges[1:], np.cumsum(merged), strict=True):
        assert total == counts[edges[1:] <= edge].sum()


def test_infinite_outer_edges_become_finite() -> None:
    _, edges = histogram_value(np.array([1, 2, 3]), np.array([-np.inf, -4.0, 8.0, np.inf]))
    assert edges == [-8.0, -4.0, 8.0, 16.0]


def test_an_alert_says_what_is_known() -> None:
    event = Event(7, 30, 0, "dead_units", "warning", "blocks.0", "activation", "", 0.9, 0.5, "90 % are zero")
    assert alert_title(event) == "dead_units: blocks.0"
    assert (
        alert_text(event) == "90 % are zero\nstep: 30\nmodule: blocks.0\nsite: activation\nvalue: 0.9\nthreshold: 0.5"
    )
    bare = Event(0, None, 0, "note", "info", None, None, None, None, None, "hello")
    assert (alert_title(bare), alert_text(bare)) == ("note", "hello")

"""Rows of a step in data-flow order: also where the step before had others, or others places."""

import pytest
import torch

from statsbridge.collect.calls import Place
from statsbridge.collect.filters import SITES, Filters
from statsbridge.collect.modules import ModuleEntry
from statsbridge.collect.rows import Key, Rows
from statsbridge.collect.shards import Layout
from statsbridge.collect.statistics import STATISTICS, Wanted, measure
from statsbridge.collect.step_columns import StepNumbers, step_columns

ALL = Filters(frozenset(SITES), ("*",), frozenset(STATISTICS))


def entry(index: int, name: str, kind: str = "Linear") -> ModuleEntry:
    return ModuleEntry(index, name, kind, "", True, 3, False)


def made(keys: dict[Key, float], orders: list[int], entries: list[ModuleEntry], filters: Filters = ALL) -> StepNumbers:
    """A step whose rows are tensors of one number each: a row's mean tells which it is."""
    rows = Rows(Wanted(kl=False))
    for key, value in keys.items():
        rows.add(key, measure(torch.full((3,), value), Wanted(kl=False)))
    rows.hand_over()()
    places = [Place(orders[key.module], orders[key.module], "runtime") for key in keys]
    return step_columns(rows, places, entries, filters, Layout(), whole=True)


KEYS = {Key(0, 0, "activation", ""): 1.0, Key(1, 0, "parameter", "weight"): 2.0, Key(1, 0, "update", "weight"): 4.0}
ENTRIES = [entry(0, "a"), entry(1, "b")]


def test_the_same_step_again_has_the_same_columns() -> None:
    first, second = (made(KEYS, [0, 1], ENTRIES) for _ in range(2))
    for step in (first, second):
        assert list(step.stats["module"]) == ["a", "b", "b"]
        assert step.stats["mean"].tolist() == [1, 2, 4]
        assert step.stats["update_ratio"].tolist()[2] == 2
        assert step.scalars["update_ratio"] == pytest.approx(2)


def test_what_has_changed_since_the_step_before_is_seen() -> None:
    made(KEYS, [0, 1], ENTRIES)
    moved = made(KEYS, [1, 0], ENTRIES)
    assert list(moved.stats["module"]) == ["b", "b", "a"]
    assert list(moved.stats["order"]) == [0, 0, 1]
    assert moved.stats["mean"].tolist() == [2, 4, 1]
    renamed = made(KEYS, [1, 0], [entry(0, "a", "Conv2d"), entry(1, "b")])
    assert list(renamed.stats["type"]) == ["Linear", "Linear", "Conv2d"]
    fewer = made({key: value for key, value in KEYS.items() if key.module == 0}, [0, 1], ENTRIES)
    assert list(fewer.stats["module"]) == ["a"]
    assert fewer.scalars == {}
    filtered = made(KEYS, [0, 1], ENTRIES, Filters(frozenset({"update"}), ("*",), frozenset(STATISTICS)))
    assert list(filtered.stats["site"]) == ["update"]
    assert filtered.stats["mean"].tolist() == [4]

"""The collector and the log may not import each other, and must mean the same sites and statistics."""

from __future__ import annotations

from statsbridge.collect.filters import SITES
from statsbridge.collect.statistics import STATISTICS
from statsbridge.log import SCHEMAS
from statsbridge.log import SITES as LOGGED_SITES


def test_both_rooms_know_the_same_sites() -> None:
    assert sorted(SITES) == sorted(LOGGED_SITES)


def test_every_statistic_has_its_column() -> None:
    assert set(STATISTICS) <= set(SCHEMAS["stats"].names)

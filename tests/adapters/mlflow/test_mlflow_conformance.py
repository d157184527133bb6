"""The kit that any adapter must pass, on both stores, and what the kit cannot know of MLflow."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow_helpers
import pytest
from statsbridge_mlflow import MLflow

from statsbridge import testing
from statsbridge.mirror import Batch

QUICK = (
    testing.check_key,
    testing.check_names,
    testing.check_values,
    testing.check_steps,
    testing.check_order,
    testing.check_channels,
    testing.check_replay,
)


@pytest.mark.parametrize("check", QUICK, ids=lambda check: check.__name__)
def test_conformance(check: Callable[..., None], make: Callable[..., MLflow], tmp_path: Path) -> None:
    check(make) if check is testing.check_key else check(make, tmp_path)


@pytest.mark.slow
def test_crash(make: Callable[..., MLflow], tmp_path: Path) -> None:
    testing.check_crash(make, tmp_path)


def test_destination_imports_nothing(sqlite: Any) -> None:
    testing.check_destination(sqlite.make)
    testing.check_destination(MLflow)


def test_what_lies_in_the_database(place: Any, tmp_path: Path) -> None:
    """Read by sqlite alone: names, steps, milliseconds and float64 values, bit for bit."""
    values = [0.1, -1e300, 5e-324, math.nan, math.inf, -math.inf, 1 / 3]
    curve = testing.made_series("blocks.0.conv1", statistic=True)
    session = testing.Session(place.make(), testing.made_run(tmp_path))
    session.send(Batch([testing.made_point(curve, step, value) for step, value in enumerate(values)]))
    session.close()
    largest = sys.float_info.max
    assert mlflow_helpers.rows(place.database, session.memory["run_id"]) == [
        ("statsbridge/activation/std/blocks.0.conv1", step, 1_750_000_000_123 + 10 * step, value)
        for step, value in enumerate([0.1, -1e300, 5e-324, None, largest, -largest, 1 / 3])
    ]


def test_equal_values_of_one_millisecond_are_one(place: Any, tmp_path: Path) -> None:
    """Which is what makes replays harmless; different values of one step and millisecond are both kept."""
    curve = testing.made_series("loss")
    point = testing.made_point(curve, 1, 0.5)
    session = testing.Session(place.make(), testing.made_run(tmp_path))
    session.send(Batch([point, point._replace(time=point.time + 1), point._replace(value=0.75)]))
    session.close()
    found = mlflow_helpers.rows(place.database, session.memory["run_id"])
    assert sorted(value for *_, value in found) == [0.5, 0.75]


def test_a_thousand_modules_in_requests_of_bounded_size(server: Any, tmp_path: Path) -> None:
    """3,000 points with the longest names that there are; more than one megabyte, in several requests at once."""
    curves = [testing.made_series(f"{'σ' * 230}.{number}", statistic=True) for number in range(1000)]
    points = [testing.made_point(curve, step, step + n / 7) for step in range(3) for n, curve in enumerate(curves)]
    session = testing.Session(server.make(), testing.made_run(tmp_path))
    session.send(Batch(points))
    session.close()
    found = mlflow_helpers.rows(server.database, session.memory["run_id"])
    assert len({key for key, *_ in found}) == 1000
    assert sorted(value for *_, value in found) == sorted(point.value for point in points)


def test_renamed_curves_can_be_looked_up(sqlite: Any, tmp_path: Path) -> None:
    session = testing.Session(sqlite.make(), testing.made_run(tmp_path))
    session.send(Batch([testing.made_point(testing.made_series(name), 0, 1.0) for name in ("loss", "loss [nats]")]))
    session.close()
    (renamed,) = (key for key in session.memory if key.startswith("name of "))
    assert session.memory[renamed] == "loss [nats]"
    assert {key for key, *_ in mlflow_helpers.rows(sqlite.database, session.memory["run_id"])} == {
        "statsbridge/loss",
        renamed.removeprefix("name of "),
    }

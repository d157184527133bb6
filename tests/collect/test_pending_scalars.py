"""Scalars reach the writer in the order of the steps, also where a sampled step comes between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from statsbridge.collect.scalars import PendingScalars, ScalarGroup

Work = Callable[[], Mapping[str, Mapping[str, Any]]]


def group(step: int) -> ScalarGroup:
    return ScalarGroup(step, step, 0, {"loss": float(step)})


def test_what_comes_after_a_sampled_step_is_written_after_it() -> None:
    """The writer may begin with the first request while training is two steps further on."""
    queue: list[Work] = []
    pending = PendingScalars(queue.append)
    pending.add(group(1))
    pending.seal()
    queue.append(lambda: {"scalars": {"step": [2]}})
    pending.add(group(3))
    pending.add(group(4))
    assert [work()["scalars"]["step"] for work in queue] == [[1], [2], [3, 4]]


def test_one_request_covers_all_that_gathers_until_it_is_served() -> None:
    queue: list[Work] = []
    pending = PendingScalars(queue.append)
    for step in range(3):
        pending.add(group(step))
    assert len(queue) == 1
    assert queue.pop()()["scalars"]["step"] == [0, 1, 2]
    pending.add(group(3))
    assert queue.pop()()["scalars"]["step"] == [3]

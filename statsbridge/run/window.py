"""The tables of one sampled step, made in the writer's thread from what its hooks have left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..collect.facts import Fact
from ..collect.scalars import ScalarGroup, scalar_columns
from ..collect.step_columns import StepNumbers
from ..reporting import Reporter

Tables = dict[str, Mapping[str, Any]]


def step_tables(
    group: ScalarGroup, calls: Mapping[str, Any] | None, numbers: Callable[[], StepNumbers], reporter: Reporter
) -> Tables:
    """What is written of a sampled step whose scalars are `group`. Waits for accelerators; raises nothing.

    `calls`: the `modules` table without its step, where it has changed. What fails is reported, the rest is there.
    """
    tables: Tables = {} if calls is None else {"modules": {**calls, "step": group.step}}
    try:
        made = numbers()
    except Exception as error:  # the step's scalars are fine: they must not be lost with it
        reporter.trouble("finishing the statistics of a step", "", error, step=group.step)
    else:
        group.values.update(made.scalars)
        when = [group.time] * len(made.stats["site"])
        tables["stats"] = {**made.stats, "step": group.step, "iteration": group.iteration, "time": when}
        if made.facts:
            tables["events"] = _events(made.facts, group)
    try:
        tables["scalars"] = scalar_columns([group])
    except Exception as error:  # nor its statistics with the scalars
        reporter.trouble("fetching the scalars of a step", "", error, step=group.step)
    return tables


def _events(facts: Sequence[Fact], group: ScalarGroup) -> Mapping[str, Any]:
    rows = [asdict(fact) for fact in facts]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {**columns, "severity": "info", "step": group.step, "time": [group.time] * len(rows)}

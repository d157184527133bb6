"""Delivering a record later: what its mirrors have not got yet, or all of it to a new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..backends import LOCAL, make_adapters
from ..errors import ConfigError, LogError, MirrorError, StatsBridgeError
from ..log.runs import read_info, run_state
from .mirrors import ask_policy, new_plan, old_plan, remaining
from .policy import Policy, load_policy
from .relay import Relay, Report
from .selection import Selection
from .sending import Plan
from .state import Damaged, MirrorState, mirror_name, readable_states

# A tracker that cannot be reached for so long is left for another time.
PATIENCE = 60.0

_LOOK_SECONDS = 0.1

# How a run ended → as what its tracker's run ends.
_STATUS = {"finished": "finished", "stopped": "stopped", "running": "stopped"}


@dataclass(frozen=True, slots=True)
class Delivered:
    """What `sync` did for one mirror. `points`, `rejected`: this time. `remaining`: rows of the record.

    `status`: as `MirrorState` has it; `damaged` where its file cannot be read, and then `remaining` is None for nobody
    knows, and `address` is empty; `refused` where it cannot be taken up here and now. `reason` says why.
    """

    name: str
    backend: str
    address: str
    points: int
    rejected: int
    remaining: int | None
    status: str
    reason: str | None


def sync(
    run: Path,
    to: str | None,
    *,
    report: Report,
    progress: Callable[[int, int], None],
) -> list[Delivered]:
    """Deliver what is on disk to the mirrors of the run at `run`, or to the one that `to` names.

    `to`: `"backend"` or `"backend:target"`: a mirror there is made, or taken up again. `progress` hears of rows
    that are delivered, of how many in all. A tracker that cannot be reached for `PATIENCE` seconds is left.

    A mirror whose file is damaged, whose tracker is not installed or which the policy forbids bars no other one: what
    is wrong with it is its result.

    Raises ConfigError where there is no mirror and no `to`; where none of the mirrors can be taken up
    UnknownBackendError, PolicyError, LogError, and MirrorError where other processes serve all of them. Nothing has
    been sent then.
    """
    plans, left_out = _plans(run, to)
    state = run_state(run)
    waiting = {plan.state.name: remaining(run, plan.state.cursor) for plan in plans}
    relays = [Relay(plan, report, patience=PATIENCE) for plan in plans if waiting[plan.state.name] or not _done(plan)]
    total = sum(waiting.values())
    refused: dict[str, str] = {}
    try:
        for relay in relays:
            try:
                relay.start()
            except (MirrorError, LogError, OSError) as error:
                refused[relay.plan.state.name] = str(error)
            else:
                relay.begin_finish(_STATUS.get(state, "failed"), final=state != "running")
        if refused and len(refused) == len(plans) and not left_out:
            raise MirrorError("; ".join(refused.values()))
        started = [relay for relay in relays if relay.plan.state.name not in refused]
        progress(0, total)
        while not all(relay.join(_LOOK_SECONDS) for relay in started):
            progress(sum(relay.rows_done for relay in started), total)
        progress(sum(relay.rows_done for relay in started), total)
    finally:
        for relay in relays:
            relay.give_up("it was interrupted")
    now = {relay.plan.state.name: relay.state for relay in started}
    done = [_delivered(run, plan.state, now.get(plan.state.name), refused.get(plan.state.name)) for plan in plans]
    return sorted([*done, *left_out], key=lambda one: one.name)


def _plans(run: Path, to: str | None) -> tuple[list[Plan], list[Delivered]]:
    """The mirrors to serve, and what to say of those that cannot be; raises where there are none to serve."""
    policy = load_policy()
    states, damaged = readable_states(run)
    if to is None:
        return _all_plans(run, policy, states, damaged)
    adapters = make_adapters(to)
    if not adapters:
        raise ConfigError(f"the record is local already: give a tracker's name instead of {LOCAL!r}")
    info = read_info(run)
    allowed = ask_policy(adapters, restricted=bool(info.get("restricted")))
    destination = allowed.destinations[0]
    name = mirror_name(destination)
    for state in states:
        if state.name == name:
            return [old_plan(run, state, policy)], []
    for one in damaged:
        if one.name == name:
            raise LogError(one.reason)
    selection = Selection.from_json(info.get("mirror") or {})
    return [new_plan(run, adapters[0], destination, selection, policy)], []


def _all_plans(
    run: Path, policy: Policy, states: Sequence[MirrorState], damaged: Sequence[Damaged]
) -> tuple[list[Plan], list[Delivered]]:
    if not states and not damaged:
        raise ConfigError(f"run {run.name} has no mirror yet: say where to deliver it, with --to BACKEND[:TARGET]")
    plans: list[Plan] = []
    left_out = [Delivered(one.name, one.backend, "", 0, 0, None, "damaged", one.reason) for one in damaged]
    errors: list[StatsBridgeError] = [LogError(one.reason) for one in damaged]
    for state in states:
        try:
            plans.append(old_plan(run, state, policy))
        except StatsBridgeError as error:
            left_out.append(_delivered(run, replace(state, status="refused"), None, str(error)))
            errors.append(error)
    if not plans:
        raise errors[-1] if len(errors) == 1 else type(errors[-1])("; ".join(map(str, errors)))
    return plans, left_out


def _done(plan: Plan) -> bool:
    return plan.state.status == "finished" and plan.state.reason is None


def _delivered(run: Path, before: MirrorState, after: MirrorState | None, refused: str | None) -> Delivered:
    now = after or before
    return Delivered(
        name=now.name,
        backend=now.backend,
        address=now.destination.address,
        points=now.counts.points - before.counts.points,
        rejected=now.counts.rejected - before.counts.rejected,
        remaining=remaining(run, now.cursor),
        status=now.status,
        reason=refused or now.reason,
    )

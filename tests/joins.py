"""The join that the design promises: every row of `stats` finds its call in the last trace not after its step."""

from __future__ import annotations

import statsbridge

PREFIXES = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def check_joins(data: statsbridge.RunData, wrapped: bool = True) -> int:
    """Fail where a row has no call in `modules`, another order, depth or type there; the number of rows checked.

    `wrapped`: no part of a name may be the prefix of a wrapper (a model may have a module of such a name itself).
    """
    traces: dict[tuple[int, int], dict[int, dict[tuple[str, int], dict[str, object]]]] = {}
    for m in data.modules.to_pylist():
        calls = traces.setdefault((m["rank"], m["attempt"]), {}).setdefault(m["step"], {})
        assert (m["module"], m["call"]) not in calls, f"{m['module']!r} call {m['call']} is twice in one trace"
        calls[m["module"], m["call"]] = m
    for steps in traces.values():
        for calls in steps.values():
            names = {module for module, _ in calls}
            assert all((name, 0) in calls for name in names), "every module has a row with call 0"
            assert not wrapped or not any(part in PREFIXES for name in names for part in name.split(".")), names
            orders = [m["order"] for m in calls.values() if m["order"] is not None]
            assert sorted(orders) == list(range(len(orders))), "positions in execution have no gap"  # type: ignore[type-var]
            assert all(m["parent"] is None or m["parent"] in names for m in calls.values())
    checked = 0
    for row in data.stats.to_pylist():
        if row["site"] in ("tensor", "tensor_grad"):
            continue
        steps = traces[row["rank"], row["attempt"]]
        latest = max(step for step in steps if step <= row["step"])
        known = steps[latest].get((row["module"], row["call"]))
        assert known is not None, (row["step"], row["module"], row["call"], row["site"])
        for name in ("type", "order", "depth"):
            assert row[name] == known[name], (name, row["step"], row["module"], row["call"])
        checked += 1
    return checked

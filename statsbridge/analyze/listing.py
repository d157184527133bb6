"""Runs chosen by a condition over what is known of each: its state, size, events, config and versions."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa

from ..errors import ConfigError, LogError
from ..log.parts import glance, live_parts
from ..log.query import select_from
from ..log.runs import RunSummary, read_info
from ..log.schema import as_texts
from .findings import SEVERITIES


def matching(runs: Sequence[RunSummary], condition: str) -> list[RunSummary]:
    """Those of `runs` that meet a condition in DuckDB's SQL, in the same order.

    Its columns: id, name, started, state, steps, sampled_steps, attempts, bytes, path, rows_<table>, events_<severity>,
    and the structs config and versions, with a field for each key that one of the runs has.

    Raises ConfigError where DuckDB (extra `statsbridge[sql]`) is missing or does not take the condition.
    """
    if not condition.strip():
        raise ConfigError("the condition is empty: give one such as 'steps > 100', or none at all")
    facts = facts_of(runs)
    # On lines of their own: a comment at the end of the condition ends there.
    sql = f"SELECT place FROM runs WHERE (\n{condition}\n) ORDER BY place"
    places = select_from(sql, "runs", facts, f"the condition {condition!r}")["place"].to_pylist()
    return [runs[place] for place in places]


def facts_of(runs: Sequence[RunSummary]) -> pa.Table:
    """What is known of each run, one row a run, with its number in the column place."""
    rows = [_facts(place, run) for place, run in enumerate(runs)]
    arrays = {name: _column([row[name] for row in rows]) for name in rows[0]}
    return pa.table(arrays)


def _facts(place: int, run: RunSummary) -> dict[str, Any]:
    info: dict[str, Any] = {}
    with suppress(LogError):  # it was there when the runs were listed
        info = read_info(run.path)
    events = _severities(run)
    return {
        "place": place,
        "id": run.id,
        "name": run.name,
        "started": run.created,
        "state": run.state,
        "steps": run.steps,
        "sampled_steps": run.sampled_steps,
        "attempts": run.attempts,
        "bytes": run.bytes,
        "path": str(run.path),
        **{f"rows_{table}": count for table, count in run.rows.items()},
        **{f"events_{severity}": events[severity] for severity in SEVERITIES},
        # One run whose config somebody has made a text of would make it no struct for all of them.
        **{name: found if isinstance(found := info.get(name), Mapping) else {} for name in ("config", "versions")},
    }


def _severities(run: RunSummary) -> Counter[str]:
    counts: Counter[str] = Counter()
    for part in live_parts(run.path, "events"):
        rows = glance(part, ["severity"])
        if rows is not None:
            counts.update(rows["severity"].to_pylist())
    return counts


def _column(values: Sequence[Any]) -> pa.Array:
    """Values of several runs as one column: of one type where they have one, else as text; mappings as structs."""
    there = [value for value in values if value is not None]
    if there and all(isinstance(value, Mapping) for value in there):
        keys = dict.fromkeys(key for value in there for key in value)
        if keys:
            fields = [_column([None if value is None else value.get(key) for value in values]) for key in keys]
            return pa.StructArray.from_arrays(fields, names=list(keys))
        return pa.nulls(len(values), pa.string())
    for kind, classes in ((pa.bool_(), (bool,)), (pa.int64(), (int,)), (pa.float64(), (int, float))):
        if there and all(
            isinstance(value, classes) and isinstance(value, bool) == (bool in classes) for value in there
        ):
            with suppress(OverflowError, pa.ArrowInvalid):  # whole numbers may be larger than 64 bits
                return pa.array(values, kind)
    if there and all(hasattr(value, "isoformat") for value in there):
        return pa.array(values, pa.timestamp("us", "UTC"))
    return as_texts([None if value is None else _text(value) for value in values])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

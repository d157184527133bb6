"""Makes a golden run: `python make.py FOLDER` with the version of statsbridge that it is to stand for.

Not run by any test: a golden run is made once for each version of the schema, and never again. `rows.json` beside the
run holds what was given to the writer, from Python alone.
"""

import json
import math
import socket
import sys
from pathlib import Path
from typing import Any

from statsbridge.log import SCHEMA_VERSION, SCHEMAS, Writer, create_run
from statsbridge.log.compaction import compact_table
from statsbridge.log.resume import next_attempt

FIRST_STEP = 2
MODULES = ("", "blocks.0", "größe")


def stats(step: int, rank: int) -> list[dict[str, Any]]:
    """One row a module, in every column a number that no other row has; one without numbers."""
    rows = []
    for place, module in enumerate(MODULES):
        size = 1 + step + 10 * place + 100 * rank
        numbers = {
            name: size / (number + 3)
            for number, name in enumerate(field.name for field in SCHEMAS["stats"] if field.type == "double")
        }
        row: dict[str, Any] = {
            "step": step,
            "iteration": step,
            "time": 1_700_000_000_000_000 + size,
            "module": module,
            "type": "Linear",
            "call": 0,
            "order": place,
            "depth": place,
            "site": "parameter",
            "tensor": "weight",
            "count": size,
            "nan_count": place,
            "inf_count": 0,
            **numbers,
            "histogram": [size, 0, place],
            "status": None,
            "shard": rank,
            "shards": 2,
        }
        if place == 2:
            row |= dict.fromkeys([*numbers, "order", "depth", "histogram", "shard", "shards"], None)
            row |= {"status": "not_called"}
        rows.append(row)
    return rows


def scalars(step: int, rank: int) -> list[dict[str, Any]]:
    """Infinite and missing values too, and one that the user logged outside of a step."""
    time = 1_700_000_000_000_000 + step
    values = {"loss": 1 / (1 + step + rank), "worst": math.inf if step % 2 else math.nan}
    rows: list[dict[str, Any]] = [
        {"step": step, "iteration": step, "time": time, "name": name, "value": value, "epoch": None, "kind": None}
        for name, value in values.items()
    ]
    late = {"iteration": None, "name": "val/loss", "value": -0.0, "epoch": step / 2, "kind": "epoch_mean"}
    rows.append({**rows[0], **late})
    return [{**row, "shard": None, "shards": None} for row in rows]


def modules(step: int) -> list[dict[str, Any]]:
    """One row a module."""
    return [
        {
            "step": step,
            "module": module,
            "type": "Linear",
            "parent": None if place == 0 else "",
            "call": 0,
            "order": place,
            "depth": None if place == 2 else place,
            "leaf": place > 0,
            "parameters": 7 * place,
            "order_source": "runtime",
        }
        for place, module in enumerate(MODULES)
    ]


def events(step: int | None) -> list[dict[str, Any]]:
    """One event."""
    about = {"module": "größe", "site": "update", "tensor": "weight", "value": math.nan, "threshold": 0.5}
    said = {"kind": "note", "severity": "warning", "message": "bemerkt: größer als erlaubt"}
    return [{"step": step, "time": 1_700_000_000_000_000, **about, **said}]


def work(step: int, rank: int) -> dict[str, list[dict[str, Any]]]:
    """All rows of a step."""
    made = {"stats": stats(step, rank), "scalars": scalars(step, rank)}
    if step in (0, FIRST_STEP):
        made |= {"modules": modules(step), "events": events(step or None)}
    return made


def columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def make(folder: Path) -> None:
    """Two ranks, 0 to 2 and then 2 to 3 as a second attempt; some parts of rank 0 are merged."""
    socket.gethostname = lambda: "golden"
    information = {"versions": {}, "sampling": {"every": 1, "first": 0}, "start_step": 0, "sites": ["parameter"]}
    run = create_run(folder, name="golden", config={"lr": 0.1}, information=information)
    given: dict[str, list[dict[str, Any]]] = {table: [] for table in SCHEMAS}

    def write(writer: Writer, rank: int, attempt: int, steps: range) -> None:
        for step in steps:
            made = work(step, rank)
            for table, rows in made.items():
                given[table] += [{"rank": rank, "attempt": attempt, **row} for row in rows]
            assert writer.submit(lambda made=made: {table: columns(rows) for table, rows in made.items()})
            assert writer.flush()

    for rank in range(2):
        writer = Writer(run, rank=rank)
        write(writer, rank, 0, range(3))
        assert writer.close(state="failed")
    compact_table(run, "stats", 0, fan_in=2)
    with next_attempt(run, FIRST_STEP, config={"lr": 0.01}, information=information):
        writers = [Writer(run, rank=rank, attempt=1) for rank in range(2)]
    for rank, writer in enumerate(writers):
        write(writer, rank, 1, range(FIRST_STEP, 4))
        assert writer.close()
    target = folder / f"v{SCHEMA_VERSION}"
    run.rename(target)
    (folder / f"v{SCHEMA_VERSION}.rows.json").write_text(json.dumps(given, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))

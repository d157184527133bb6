"""Runs that earlier versions wrote: they open, for ever, and say what they said."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from statsbridge.log import RunData, load
from statsbridge.log.check import check_run

GOLDEN = Path(__file__).parent / "golden"
FIRST_STEP = 2

VERSIONS = sorted(path.name for path in GOLDEN.glob("v*") if path.is_dir())


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """NaN as text, so that it equals itself, and the sign of a zero shown; times in microseconds."""
    return [{name: _plain(value) for name, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    return repr(value) if isinstance(value, float) and (math.isnan(value) or value == 0) else value


def found(data: RunData, table: str) -> list[dict[str, Any]]:
    rows = getattr(data, table)
    if "time" in rows.column_names:
        rows = rows.set_column(rows.column_names.index("time"), "time", rows["time"].cast("int64"))
    return rows.to_pylist()


@pytest.mark.parametrize("version", VERSIONS)
def test_opens_with_every_digit(version: str) -> None:
    given = json.loads((GOLDEN / f"{version}.rows.json").read_text(encoding="utf-8"))
    data = load(GOLDEN / version, attempts="all")
    assert data.damaged == ()
    for table, rows in given.items():
        expected = sorted(rows, key=lambda row: row["rank"])  # within a rank in the order of writing
        names = list(expected[0])
        read = [{name: row[name] for name in names} for row in found(data, table)]
        assert plain(read) == plain(expected), table
        assert [row["seq"] for row in found(data, table) if row["rank"] == 0] == list(
            range(sum(row["rank"] == 0 for row in rows))
        )


@pytest.mark.parametrize("version", VERSIONS)
def test_what_counts_of_it(version: str) -> None:
    given = json.loads((GOLDEN / f"{version}.rows.json").read_text(encoding="utf-8"))
    data = load(GOLDEN / version)
    for table, rows in given.items():
        counting = [row for row in rows if row["attempt"] == 1 or row["step"] is None or row["step"] < FIRST_STEP]
        assert getattr(data, table).num_rows == len(counting) < len(rows) + (table == "events"), table
    assert data.info["config"] == {"lr": 0.1}
    assert [(one.first_step, one.config) for one in data.attempts] == [(FIRST_STEP, {"lr": 0.01})]
    assert data.series("blocks.0", "parameter", "count")["step"].to_pylist() == list(range(4))
    assert check_run(GOLDEN / version) == []


def test_there_is_one() -> None:
    assert "v2" in VERSIONS

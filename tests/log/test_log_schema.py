"""The columns are the design's, and values come back from disk as they went in."""

import math
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from log_rows import stats_rows, written

from statsbridge.log import SCHEMAS
from statsbridge.log.schema import to_table

DESIGN = {
    "modules": "seq attempt step module type parent call order depth leaf parameters order_source",
    "stats": "seq attempt step iteration time module type call order depth site tensor "
    "count nan_count inf_count mean std skewness kurtosis min max abs_mean l2 zero_fraction "
    "kl_unit_gaussian update_ratio histogram status shard shards",
    "scalars": "seq attempt step iteration time name value epoch kind shard shards",
    "events": "seq attempt step time kind severity module site tensor value threshold message",
}
TEXT = "module type parent order_source site tensor status name kind severity message"
INTEGERS = "seq attempt step iteration call order depth count nan_count inf_count parameters shard shards"
OTHERS = {
    "time": pa.timestamp("us", "UTC"),
    "leaf": pa.bool_(),
    "histogram": pa.list_(pa.int64()),
}


@pytest.mark.parametrize("table", DESIGN)
def test_columns_and_types_are_the_designs(table: str) -> None:
    schema = SCHEMAS[table]
    assert schema.names == DESIGN[table].split()
    for field in schema:
        if field.name in TEXT.split():
            expected = pa.dictionary(pa.int32(), pa.string())
        elif field.name in INTEGERS.split():
            expected = pa.int64()
        else:
            expected = OTHERS.get(field.name, pa.float64())
        assert field.type == expected, field.name


def test_every_type_of_column_comes_back(tmp_path: Path) -> None:
    modules = {
        "step": [3, 3, 4],
        "module": ["", "encoder.0", "mödül"],
        "type": "Linear",
        "parent": [None, "", "encoder"],
        "call": np.array([0, 1, 2], np.int32),
        "order": np.array([np.nan, 1.0, 2.0]),
        "depth": [None, 5, 2**62],
        "leaf": np.array([False, True, True]),
        "parameters": [0, 10, 20],
        "order_source": "runtime",
    }
    times = np.array(["2024-05-06T07:08:09.123456", "2024-05-06T07:08:09.123457"], "datetime64[ns]")
    histogram = np.arange(6).reshape(2, 3) * 2**40
    stats = stats_rows(7, 2, time=times, histogram=histogram, status=[None, "integer"])
    event = {"time": 1700000000.25, "kind": "note", "severity": "info", "message": "a\nb", "threshold": None}
    run = written(tmp_path, {"modules": modules, "stats": stats, "events": event})

    rows = run.modules.to_pylist()
    assert [row["module"] for row in rows] == ["", "encoder.0", "mödül"]
    assert [row["parent"] for row in rows] == [None, "", "encoder"]
    assert [row["order"] for row in rows] == [None, 1, 2]
    assert [row["depth"] for row in rows] == [None, 5, 2**62]
    assert [row["leaf"] for row in rows] == [False, True, True]
    assert [row["type"] for row in rows] == ["Linear"] * 3
    assert [(row["seq"], row["rank"], row["attempt"]) for row in rows] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]

    assert run.stats["histogram"].to_pylist() == histogram.tolist()
    assert run.stats["status"].to_pylist() == [None, "integer"]
    for name in ("mean", "kurtosis", "update_ratio"):
        assert run.stats[name].to_pylist() == stats[name].tolist()
    assert run.stats["time"].to_pylist() == [
        datetime(2024, 5, 6, 7, 8, 9, 123456, UTC),
        datetime(2024, 5, 6, 7, 8, 9, 123457, UTC),
    ]
    [row] = run.events.to_pylist()
    assert row["time"] == datetime(2023, 11, 14, 22, 13, 20, 250000, UTC)
    assert (row["message"], row["module"], row["value"], row["step"]) == ("a\nb", None, None, None)


def test_nan_is_null_in_stats_and_true_in_the_value_of_a_scalar(tmp_path: Path) -> None:
    odd = [math.nan, math.inf, -math.inf, -0.0, None]
    stats = stats_rows(0, 4, std=np.array([math.nan, math.inf, -math.inf, -0.0]), skewness=[math.nan, None, 1, 2.5])
    scalars = {"step": 0, "name": list("abcde"), "value": odd, "epoch": [0.5, None, math.nan, 1, 2]}
    run = written(tmp_path, {"stats": stats, "scalars": scalars})

    assert run.stats["std"].to_pylist() == [None, math.inf, -math.inf, 0.0]
    assert math.copysign(1, run.stats["std"][3].as_py()) == -1
    assert run.stats["skewness"].to_pylist() == [None, None, 1.0, 2.5]
    values = run.scalars["value"].to_pylist()
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 0.0, None]
    assert run.scalars["epoch"].to_pylist() == [0.5, None, None, 1.0, 2.0]


@pytest.mark.parametrize("table", DESIGN)
def test_a_lone_surrogate_costs_nothing(table: str) -> None:
    """Python reads the name of a file that is no UTF-8 so; a text column that refused it would lose the whole part."""
    texts = [field.name for field in SCHEMAS[table] if field.name in TEXT.split()]
    values = ["caf\udce9", None, "naïve 🙂", "\ud800"]
    rows = to_table(table, {**dict.fromkeys(texts, values), "step": [0, 1, 2, 3]})
    for name in texts:
        assert rows[name].to_pylist() == ["caf\\udce9", None, "naïve 🙂", "\\ud800"], name
    single = to_table(table, {texts[0]: "\udcff", "step": [0, 1]})
    assert single[texts[0]].to_pylist() == ["\\udcff"] * 2


def test_seconds_and_microseconds_are_the_same_time() -> None:
    moments = [1.7e9 + 0.000001, 1_700_000_000_000_001, datetime.fromtimestamp(1.7e9 + 0.000001, UTC)]
    tables = [to_table("scalars", {"time": [moment], "name": "x"}) for moment in moments]
    tables.append(to_table("scalars", {"time": np.array([1_700_000_000_000_001]), "name": "x"}))
    assert {table["time"][0].value for table in tables} == {1_700_000_000_000_001}


@pytest.mark.parametrize(
    "columns",
    [
        {"step": 0, "name": ["a", "b"], "value": [1.0]},
        {"step": 0, "loss": [1.0]},
        {"seq": 3, "name": "a"},
        {"step": np.array([0.5]), "name": "a"},
        {"value": ["text"], "name": "a"},
    ],
)
def test_values_that_do_not_fit_are_refused(columns: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        to_table("scalars", columns)


def test_a_part_says_its_schema_and_version_to_any_reader(tmp_path: Path) -> None:
    run = written(tmp_path, {"stats": stats_rows(0)})
    [file] = run.path.glob("stats/rank=0/*.parquet")
    assert pq.read_schema(file).equals(SCHEMAS["stats"])
    metadata = pq.read_metadata(file)
    assert metadata.metadata[b"statsbridge.schema_version"] == b"2"
    group = metadata.row_group(0)
    encodings = {}
    for number in range(group.num_columns):
        column = group.column(number)
        assert column.compression == "ZSTD"
        encodings[column.path_in_schema] = column.encodings
    assert "BYTE_STREAM_SPLIT" in encodings["mean"]
    assert not any("DICTIONARY" in encoding for encoding in encodings["mean"])
    assert any("DICTIONARY" in encoding for encoding in encodings["module"])


def test_a_tuple_is_kept_and_gives_the_same_column_each_time() -> None:
    modules, calls = ["a", None, "a", "\udcff"], [0, None, 2, 3]
    expected = to_table("stats", {"module": modules, "call": calls, "site": ["x"] * 4})
    for _ in range(2):
        given = {"module": tuple(modules), "call": tuple(calls), "site": ("x",) * 4}
        assert to_table("stats", given).equals(expected)
    other = to_table("stats", {"module": ("a", None, "a", "b"), "call": tuple(calls), "site": ("x",) * 4})
    assert other["module"].to_pylist() == ["a", None, "a", "b"]

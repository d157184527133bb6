"""What a query returns: values that Arrow would not have whole come as text, the rest as they are."""

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from log_rows import scalar_rows, written

from statsbridge import ConfigError, RunData


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return written(tmp_path_factory.mktemp("runs"), *({"scalars": scalar_rows(step, loss=1)} for step in range(3)))


def asked(data: RunData, expression: str) -> tuple[pa.DataType, Any]:
    try:
        column = data.query(f"SELECT {expression} AS x")["x"]
    except ConfigError as error:
        if "does not exist" in str(error) or "not in the catalog" in str(error):
            pytest.skip("a DuckDB that has no such type yet")
        raise
    return column.type, column.to_pylist()[0]


LARGEST = "340282366920938463463374607431768211455"

#: What Arrow loses, or has as bytes that nothing but DuckDB reads → the same as text.
LOST = {
    f"{LARGEST}::UHUGEINT": LARGEST,
    "NULL::UHUGEINT": None,
    "INTERVAL '-9223372036854775807 microseconds'": "-2562047788:00:54.775807",
    "INTERVAL '9223372036854776 microseconds'": "2562047:47:16.854776",
    "INTERVAL '1 month 2 days -3 hours'": "1 month 2 days -03:00:00",
    "'12:00:00.123456+05:30'::TIMETZ": "12:00:00.123456+05:30",
    "'24:00:00+15:59:59'::TIMETZ": "24:00:00+15:59:59",
    "'10110'::BIT": "10110",
    "'POINT(0.1 2e300)'::GEOMETRY": "POINT (0.1 2e+300)",
    "{'a': 1, 'b': [NULL]}::VARIANT": "{'a': 1, 'b': [NULL]}",
}


@pytest.mark.parametrize("expression", LOST)
def test_what_arrow_does_not_have_whole_is_text(data: RunData, expression: str) -> None:
    assert asked(data, expression) == (pa.string(), LOST[expression])


NESTED = {
    f"[{LARGEST}::UHUGEINT, NULL]": [LARGEST, None],
    "[['10'::BIT], NULL]": [["10"], None],
    "['10'::BIT, '11'::BIT]::BIT[2]": ["10", "11"],
    "{'a \"b\"': INTERVAL 1 DAY, 'select': 2, 'c': 'x''y'::ENUM('x''y'), 'd': NULL, 'e': '[]'::JSON}": {
        'a "b"': "1 day",
        "select": 2,
        "c": "x'y",
        "d": None,
        "e": "[]",
    },
    "MAP {INTERVAL 1 DAY: {'a': [INTERVAL 2 DAY], 'b': 1.50}}": [("1 day", {"a": ["2 days"], "b": Decimal("1.50")})],
    "'12:00:00+05'::TIMETZ::UNION(number INTEGER, \"a time\" TIMETZ)": "12:00:00+05",
    '3::UNION(number INTEGER, "a time" TIMETZ)': 3,
    "row('10'::BIT, 2)": "(10, 2)",
}


@pytest.mark.parametrize("expression", NESTED)
def test_so_it_is_inside_of_others_whose_form_stays(data: RunData, expression: str) -> None:
    assert asked(data, expression)[1] == NESTED[expression]


#: The types of what our own tables have, and of what is computed from it.
KEPT = {
    "1.5::DOUBLE": pa.float64(),
    "1.5::FLOAT": pa.float32(),
    "9223372036854775807": pa.int64(),
    "18446744073709551615::UBIGINT": pa.uint64(),
    "170141183460469231731687303715884105727::HUGEINT": pa.decimal128(38, 0),
    "1.5::DECIMAL(38, 10)": pa.decimal128(38, 10),
    "'a'": pa.string(),
    "true": pa.bool_(),
    "'\\xAA'::BLOB": pa.binary(),
    "DATE '2020-02-29'": pa.date32(),
    "TIME '12:34:56.789'": pa.time64("us"),
    "TIMESTAMP '2020-02-29 12:00:00'": pa.timestamp("us"),
    "TIMESTAMPTZ '2020-02-29 12:00:00'": pa.timestamp("us", "UTC"),
    "'1990-01-01 00:00:00.123456789'::TIMESTAMP_NS": pa.timestamp("ns"),
    "'a'::ENUM('a', 'b')": pa.dictionary(pa.uint8(), pa.string()),
    "[1::BIGINT, NULL]": pa.list_(pa.field("l", pa.int64())),
    "{'a': 1.5::DOUBLE}": pa.struct({"a": pa.float64()}),
}


@pytest.mark.parametrize("expression", KEPT)
def test_other_types_stay_what_they_are(data: RunData, expression: str) -> None:
    assert asked(data, expression)[0] == KEPT[expression]


def test_columns_of_one_name_beside_text_keep_names_order_and_rows(data: RunData) -> None:
    table = data.query("""
        SELECT s.step, to_days(s.step::INTEGER) AS "a ""day"" ", t.step, to_days(t.step::INTEGER) AS "a ""day"" "
        FROM scalars s JOIN scalars t ON t.step = 2 - s.step ORDER BY s.step DESC
    """)
    assert table.column_names == ["step", 'a "day" ', "step", 'a "day" ']
    assert [column.to_pylist() for column in table.columns] == [
        [2, 1, 0],
        ["2 days", "1 day", "00:00:00"],
        [0, 1, 2],
        ["00:00:00", "1 day", "2 days"],
    ]


def test_a_pivot_has_its_intervals_as_text(data: RunData) -> None:
    table = data.query("PIVOT (SELECT step, name, time - time AS d FROM scalars) ON name USING max(d) ORDER BY step")
    assert table.to_pylist() == [{"step": step, "loss": "00:00:00"} for step in range(3)]


def test_the_difference_of_two_times_counts_in_full(data: RunData) -> None:
    table = data.query("SELECT min(time) - TIMESTAMPTZ '0001-01-01' AS x FROM scalars")
    assert table["x"].to_pylist() == ["738837 days 22:13:20"]

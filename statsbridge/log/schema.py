"""The four tables of a run: their columns, and how Python values become Arrow columns of just those types."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

SCHEMA_VERSION = 2
"""Goes up when columns are added. Columns are never renamed and never change their type."""

VERSION_KEY = b"statsbridge.schema_version"

SITES = (
    "activation",
    "activation_grad",
    "parameter",
    "parameter_grad",
    "update",
    "tensor",
    "tensor_grad",
    "optimizer_state",
)

Columns = Mapping[str, Any]
"""Column name → a sequence or numpy array with one value a row, or one value (or None) for every row."""

_INTEGER = pa.int64()
_FLOAT = pa.float64()
_TEXT = pa.dictionary(pa.int32(), pa.string())
_TIME = pa.timestamp("us", "UTC")
_HISTOGRAM = pa.list_(pa.int64())

_WHO = {"seq": _INTEGER, "attempt": _INTEGER, "step": _INTEGER}
_WHEN = {"iteration": _INTEGER, "time": _TIME}
# The row is of piece `shard` of the `shards` that a whole is cut into, 0 of 1 where the rank holds all of it. Null:
# the rank's own, part of no whole.
_SHARE = {"shard": _INTEGER, "shards": _INTEGER}

_COLUMNS: dict[str, dict[str, pa.DataType]] = {
    "modules": {
        **_WHO,
        "module": _TEXT,
        "type": _TEXT,
        "parent": _TEXT,
        "call": _INTEGER,
        "order": _INTEGER,
        "depth": _INTEGER,
        "leaf": pa.bool_(),
        "parameters": _INTEGER,
        "order_source": _TEXT,
    },
    "stats": {
        **_WHO,
        **_WHEN,
        "module": _TEXT,
        "type": _TEXT,
        "call": _INTEGER,
        "order": _INTEGER,
        "depth": _INTEGER,
        "site": _TEXT,
        "tensor": _TEXT,
        "count": _INTEGER,
        "nan_count": _INTEGER,
        "inf_count": _INTEGER,
        "mean": _FLOAT,
        "std": _FLOAT,
        "skewness": _FLOAT,
        "kurtosis": _FLOAT,
        "min": _FLOAT,
        "max": _FLOAT,
        "abs_mean": _FLOAT,
        "l2": _FLOAT,
        "zero_fraction": _FLOAT,
        "kl_unit_gaussian": _FLOAT,
        "update_ratio": _FLOAT,
        "histogram": _HISTOGRAM,
        "status": _TEXT,
        **_SHARE,
    },
    # Frameworks count epochs in fractions too, hence a float.
    "scalars": {**_WHO, **_WHEN, "name": _TEXT, "value": _FLOAT, "epoch": _FLOAT, "kind": _TEXT, **_SHARE},
    "events": {
        **_WHO,
        "time": _TIME,
        "kind": _TEXT,
        "severity": _TEXT,
        "module": _TEXT,
        "site": _TEXT,
        "tensor": _TEXT,
        "value": _FLOAT,
        "threshold": _FLOAT,
        "message": _TEXT,
    },
}

SCHEMAS: Mapping[str, pa.Schema] = MappingProxyType(
    {
        name: pa.schema(list(columns.items()), metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()})
        for name, columns in _COLUMNS.items()
    }
)
"""Table → the Arrow schema of its parts, with the version as metadata. The folder's name gives `rank`."""

WRITER_COLUMNS = ("seq", "attempt")
"""The columns that only the writer fills in."""

_GIVEN = {
    name: pa.schema([field for field in schema if field.name not in WRITER_COLUMNS]) for name, schema in SCHEMAS.items()
}

# A loss that is NaN is a fact; a statistic that is NaN is a statistic that could not be computed.
_TRUE_NAN = frozenset({("scalars", "value"), ("events", "value"), ("events", "threshold")})


def to_table(name: str, columns: Columns) -> pa.Table:
    """The rows of `columns` as a table of the types in `SCHEMAS[name]`, without `seq` and `attempt`.

    A column that is missing is null in every row; a single value holds for every row. NaN is null, except in
    the value of a scalar and the value and threshold of an event. `time` is in seconds (float) or
    microseconds (integer) since the epoch, datetime64 or aware datetime. `histogram` is int64 [rows, bins].
    Arrays are not copied: leave them unchanged until they have been written. A tuple of texts or integers is taken for
    a column that comes with each step: its Arrow array is kept for the next time.

    Raises ValueError (`pyarrow.ArrowInvalid` too) and TypeError where a value does not fit, KeyError for an
    unknown table.
    """
    schema = SCHEMAS[name]
    unknown = set(columns).difference(schema.names).union(set(columns).intersection(WRITER_COLUMNS))
    if unknown:
        raise ValueError(f"table {name!r} takes no column {', '.join(sorted(unknown))}")
    sized = [len(values) for values in columns.values() if _has_rows(values)]
    rows = sized[0] if sized else min(len(columns), 1)
    arrays = []
    for field in _GIVEN[name]:
        values = columns.get(field.name)
        nan_is_null = (name, field.name) not in _TRUE_NAN
        if values is None:
            array = pa.nulls(rows, field.type)
        elif _has_rows(values):
            again = isinstance(values, tuple) and field.type in (_TEXT, _INTEGER)
            array = _kept(values, field.type) if again else _to_array(values, field.type, nan_is_null)
        else:
            array = _to_array([values], field.type, nan_is_null).take(pa.array(np.zeros(rows, np.int32)))
        if len(array) != rows:
            raise ValueError(f"column {field.name!r} of {name!r} has {len(array)} values for {rows} rows")
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=_GIVEN[name])


def conform(name: str, table: pa.Table) -> pa.Table:
    """`table`, perhaps of an older version, with the columns of `SCHEMAS[name]`: what it lacks is null."""
    schema = SCHEMAS[name]
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def as_lists(rows: np.ndarray) -> pa.Array:
    """Integers of shape [rows, bins] as an Arrow list<int64> column."""
    offsets = np.arange(rows.shape[0] + 1, dtype=np.int32) * np.int32(rows.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows.reshape(-1), pa.int64()))


def as_texts(values: Any) -> pa.Array:
    """Texts as Arrow holds them: a lone surrogate, as in the name of a file that is no UTF-8, becomes its escape."""
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        return pa.array([None if text is None else as_text(text) for text in values], pa.string())


def as_text(text: str) -> str:
    """`text` as `as_texts` makes it."""
    return text.encode(errors="backslashreplace").decode()


def _has_rows(values: object) -> bool:
    if isinstance(values, np.ndarray):
        return values.ndim > 0
    return isinstance(values, Sequence) and not isinstance(values, str | bytes)


@lru_cache(maxsize=32)
def _kept(values: tuple[Any, ...], kind: pa.DataType) -> pa.Array:
    return _to_array(values, kind, nan_is_null=True)


def _to_array(values: Any, kind: pa.DataType, nan_is_null: bool) -> pa.Array:
    if kind == _TEXT:
        return as_texts(values).dictionary_encode()
    if kind == _TIME:
        return pa.array(_microseconds(values), kind)
    if isinstance(values, np.ndarray):
        if kind == _HISTOGRAM and values.ndim == 2:
            return as_lists(values)
        if kind == _INTEGER and values.dtype.kind == "f":
            return pa.array(values, from_pandas=True).cast(kind)
        if kind == _FLOAT:
            return pa.array(values.astype(np.float64, copy=False), from_pandas=nan_is_null)
    return pa.array(values, kind, from_pandas=nan_is_null)


def _microseconds(values: Any) -> Any:
    if isinstance(values, np.ndarray) and values.dtype.kind == "M":
        return values.astype("datetime64[us]")
    if len(values) and isinstance(values[0], float):
        return np.round(np.asarray(values) * 1e6).astype("datetime64[us]")
    return values

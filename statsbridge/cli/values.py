"""Values of an Arrow table, as DuckDB returns them, as plain values that JSON and CSV can hold."""

import decimal
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

# DuckDB's infinities: of whole days, and of times in whichever unit.
_INFINITE_DAYS = {2**31 - 1: "infinity", 1 - 2**31: "-infinity"}
_INFINITE_TIMES = {2**63 - 1: "infinity", 1 - 2**63: "-infinity"}
_FRACTIONS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
# Bytes of a whole number beyond which Python refuses to write it.
_LONGEST = 1_700


def columns_of(table: pa.Table) -> list[list[Any]]:
    """The columns of a table, each as plain values.

    Times are in ISO 8601 (before the year 1 and beyond 9999 with a sign), or `infinity` and `-infinity`; intervals as
    DuckDB writes them; bytes in hexadecimal. Whole decimals are integers, others stay `Decimal`: CSV has all digits.
    Structs are dictionaries, maps lists of pairs.
    """
    return [_column(column) for column in table.columns]


def _column(column: pa.ChunkedArray) -> list[Any]:
    # What Python has for itself is taken at once; the rest one by one, which takes ten times as long.
    if _is_simple(column.type):
        values: list[Any] = column.to_pylist()
        return values
    return [_plain(value) for value in column]


def _is_simple(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind) or pa.types.is_list(kind):
        return _is_simple(kind.value_type)
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_null(kind)
    )


def _plain(scalar: pa.Scalar) -> Any:
    """One value. Arrow's own `as_py` raises for times that Python has none for, and cuts others short."""
    if not scalar.is_valid:
        return None
    if isinstance(scalar.type, pa.BaseExtensionType):
        return _extension(scalar)
    for is_kind, change in _CHANGES:
        if is_kind(scalar.type):
            return change(scalar)
    return scalar.as_py()


def _struct(scalar: pa.StructScalar) -> dict[str, Any]:
    return {field.name: _plain(scalar[place]) for place, field in enumerate(scalar.type)}


def _map(scalar: pa.MapScalar) -> list[list[Any]]:
    # Keys may be of any type, so no dictionary.
    return [[_plain(pair[0]), _plain(pair[1])] for pair in scalar.values]


def _list(scalar: pa.ListScalar) -> list[Any]:
    return [_plain(value) for value in scalar.values]


def _inner(scalar: pa.UnionScalar | pa.DictionaryScalar) -> Any:
    return _plain(scalar.value)


def _decimal(scalar: pa.Scalar) -> Any:
    value: decimal.Decimal = scalar.as_py()
    return int(value) if value == value.to_integral_value() else value


def _extension(scalar: pa.ExtensionScalar) -> Any:
    whole = getattr(scalar.type, "type_name", "") in {"bignum", "varint"}
    found = _bignum(scalar.value.as_py()) if whole else None
    return _plain(scalar.value) if found is None else found


def _date(scalar: pa.Scalar) -> str:
    return _INFINITE_DAYS.get(scalar.value) or _signed(str(np.datetime64(scalar.value, "D")))


def _timestamp(scalar: pa.Scalar) -> str:
    if scalar.value in _INFINITE_TIMES:
        return _INFINITE_TIMES[scalar.value]
    moment = str(np.datetime64(scalar.value, scalar.type.unit))
    seconds, _, fraction = moment.partition(".")
    told = f"{seconds}.{_digits(fraction)}" if fraction.strip("0") else seconds
    # DuckDB was told to speak UTC, and numbers of Arrow are in UTC whatever the zone.
    return _signed(told) + ("+00:00" if scalar.type.tz else "")


def _signed(written: str) -> str:
    """A year of four digits, with a sign where it is none from 0 to 9999: ISO 8601."""
    year, month, rest = written.rsplit("-", 2)
    sign = "-" if year.startswith("-") else "+" if len(year) > 4 else ""
    return f"{sign}{year.removeprefix('-'):0>4}-{month}-{rest}"


def _of_day(scalar: pa.Scalar) -> str:
    return _time(scalar.value, _FRACTIONS[scalar.type.unit])


def _time(units: int, fractions: int) -> str:
    """A time of the day, of which DuckDB has one that Python has not: 24:00:00."""
    seconds, rest = divmod(units, fractions)
    told = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{told}.{_digits(f'{rest:0{len(str(fractions)) - 1}}')}" if rest else told


def _digits(fraction: str) -> str:
    """Microseconds, as Python writes them, or nanoseconds where there are some."""
    return fraction.ljust(6, "0") if len(fraction) <= 6 or fraction[6:].strip("0") else fraction[:6]


def _interval(scalar: pa.Scalar) -> str:
    """An interval as DuckDB writes it: 1 year 2 months 3 days 04:05:06."""
    months, days, nanoseconds = scalar.as_py()
    sign = -1 if months < 0 else 1
    years, months = (sign * part for part in divmod(abs(months), 12))
    words = [
        f"{count} {unit}{'' if abs(count) == 1 else 's'}"
        for count, unit in ((years, "year"), (months, "month"), (days, "day"))
        if count
    ]
    if nanoseconds or not words:
        words.append(("-" if nanoseconds < 0 else "") + _time(abs(nanoseconds), _FRACTIONS["ns"]))
    return " ".join(words)


def _bignum(stored: bytes) -> int | None:
    """A whole number of any length, as DuckDB stores it: three bytes of sign and length, then its magnitude.

    Below 0 all bits are turned round. None for what is no such number, or too long to be written.
    """
    if len(stored) < 4 or len(stored) > _LONGEST:
        return None
    if stored[0] & 0x80:
        return int.from_bytes(stored[3:])
    return -int.from_bytes(bytes(byte ^ 0xFF for byte in stored[3:]))


# In the order of asking: a map is a list, too.
_CHANGES: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any], Any]], ...] = (
    (pa.types.is_struct, _struct),
    (pa.types.is_map, _map),
    (pa.types.is_list, _list),
    (pa.types.is_large_list, _list),
    (pa.types.is_fixed_size_list, _list),
    (pa.types.is_union, _inner),
    (pa.types.is_dictionary, _inner),
    (pa.types.is_date32, _date),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_time, _of_day),
    (pa.types.is_interval, _interval),
    (pa.types.is_duration, lambda scalar: scalar.as_py().total_seconds()),
    (pa.types.is_decimal, _decimal),
    (pa.types.is_binary, lambda scalar: scalar.as_py().hex()),
    (pa.types.is_large_binary, lambda scalar: scalar.as_py().hex()),
    (pa.types.is_fixed_size_binary, lambda scalar: scalar.as_py().hex()),
)

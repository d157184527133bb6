"""SQL over the tables of one run or several, by DuckDB in memory: it reads the runs and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ..errors import ConfigError, LogError
from .schema import SCHEMAS

if TYPE_CHECKING:
    import duckdb
    from duckdb.sqltypes import DuckDBPyType

_LOOKS = 10  # a query is tried again while its files are merged into others
_TYPES = {
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
    pa.list_(pa.int64()): "BIGINT[]",
    pa.timestamp("us", "UTC"): "TIMESTAMPTZ",
}
_NESTED = frozenset(("list", "array", "struct", "tuple", "map", "union"))
# DuckDB's names of the types whose values Arrow has whole. Others become text: UHUGEINT (-1 for its largest), INTERVAL
# (wraps beyond 292 years), TIMETZ (without its zone), BIT, GEOMETRY, VARIANT (bytes), and what later versions bring.
_WHOLE = frozenset(
    (
        *("null", "boolean", "tinyint", "smallint", "integer", "bigint", "hugeint"),
        *("utinyint", "usmallint", "uinteger", "ubigint", "bignum", "varint", "float", "double", "decimal"),
        *("varchar", "char", "blob", "uuid", "enum", "date", "time", "time_ns", "timestamp", "timestamp_s"),
        *("timestamp_ms", "timestamp_ns", "timestamp with time zone", "timestamptz_ns"),
    )
)


@dataclass(frozen=True, slots=True)
class Files:
    """A table as the parts that hold its rows, of which those count that meet `condition` (SQL; None: all)."""

    paths: Sequence[Path]
    condition: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A run: its id, and what gives a table of it. Of files it adds the paths to the list."""

    run: str
    table: Callable[[str, list[Path]], pa.Table | Files]


def query_runs(sql: str, sources: Sequence[Source], *, run_column: bool) -> pa.Table:
    """The result of `sql`, one SELECT, over the tables modules, stats, scalars and events of some runs.

    With `run_column` the rows of all runs are in each table, and the column `run` says whose they are; without it
    there is one run. Only tables whose name occurs in `sql` are asked for; of files DuckDB reads only the columns and
    row groups it needs. Times are in UTC. What Arrow would not have whole, such as INTERVAL and UHUGEINT, is text as
    DuckDB writes it. No other file is within reach of the query.

    Raises ConfigError where DuckDB is not installed or does not accept `sql`, LogError where parts are merged all
    the time.
    """
    for _ in range(_LOOKS):
        used: list[Path] = []
        try:
            return _query(sql, sources, run_column, used)
        except ConfigError:
            if all(path.exists() for path in used):
                raise
    raise LogError("the parts of this run are merged faster than they can be read: try again")


def select_from(sql: str, name: str, rows: pa.Table, what: str) -> pa.Table:
    """The result of `sql` over one table in memory. Raises ConfigError as `query_runs` does; `what` is not taken."""
    engine = import_duckdb()
    with _connect(engine) as connection:
        try:
            connection.register(name, rows)
            _lock(connection, [])
            return _fetch(connection.sql(sql))
        except engine.Error as error:
            raise ConfigError(f"DuckDB does not take {what}: {_reason(error)}") from error


def import_duckdb() -> ModuleType:
    """DuckDB. Raises ConfigError that names the extra to install where it is missing."""
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError("this needs DuckDB: pip install 'statsbridge[sql]'") from error
    return duckdb


def _query(sql: str, sources: Sequence[Source], run_column: bool, used: list[Path]) -> pa.Table:
    engine = import_duckdb()
    words = sql.casefold()
    with _connect(engine) as connection:
        try:
            if not _is_select(connection.extract_statements(sql)):
                raise ConfigError("query() takes one SELECT, and nothing that writes")
            for name in SCHEMAS:
                if name in words:
                    tables = [(source.run, source.table(name, used)) for source in sources]
                    _register(connection, name, tables, run_column)
            _lock(connection, used)
            return _fetch(connection.sql(sql))
        except engine.Error as error:
            tables_there = ", ".join(SCHEMAS)
            raise ConfigError(f"DuckDB does not take this query over {tables_there}: {_reason(error)}") from error


def _connect(engine: ModuleType) -> "duckdb.DuckDBPyConnection":
    # A query of a record on one's own disk fetches no extension from the network; and an unknown table is an
    # error, not whichever variable of that name happens to be in a caller's frame.
    options = {"autoinstall_known_extensions": "false", "python_enable_replacements": "false"}
    connection: duckdb.DuckDBPyConnection = engine.connect(config=options)
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def _is_select(statements: "Sequence[duckdb.Statement]") -> bool:
    """Whether DuckDB has read one statement that only reads."""
    kinds = [statement.type.name for statement in statements]
    # A PIVOT. Before DuckDB 2 it is read as two that have no text of their own: its columns as a type, and a SELECT.
    if kinds == ["CREATE", "SELECT"]:
        return not any(statement.query for statement in statements)
    return kinds in (["SELECT"], ["EXPLAIN"], ["MULTI"])


def _lock(connection: "duckdb.DuckDBPyConnection", used: Sequence[Path]) -> None:
    """Leave nothing but these files within reach."""
    connection.execute(f"SET allowed_paths = [{', '.join(_quoted(str(path)) for path in used)}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _fetch(relation: "duckdb.DuckDBPyRelation | None") -> pa.Table:
    if relation is None:
        raise ConfigError("query() takes one SELECT, this statement gives no rows")
    if all(_is_whole(kind) for kind in relation.types):
        return relation.to_arrow_table()
    # By place, and each with its name: several columns may have one.
    columns = [
        (f"#{place}" if _is_whole(kind) else f"CAST(#{place} AS {_carried(kind)})") + f" AS {_identifier(name)}"
        for place, (name, kind) in enumerate(zip(relation.columns, relation.types, strict=True), 1)
    ]
    return relation.project(", ".join(columns)).to_arrow_table()


def _is_whole(kind: "DuckDBPyType") -> bool:
    return kind.id in _WHOLE or (kind.id in _NESTED and all(_is_whole(inner) for _, inner in _inside(kind)))


def _carried(kind: "DuckDBPyType") -> str:
    """The type, in SQL, as which the values of a type come whole through Arrow."""
    if _is_whole(kind):
        return str(kind)
    inside = _inside(kind) if kind.id in _NESTED else []
    types = [_carried(inner) for _, inner in inside]
    if kind.id in ("list", "array"):
        return f"{types[0]}[{kind.children[1][1] if kind.id == 'array' else ''}]"
    if kind.id == "map":
        return f"MAP({types[0]}, {types[1]})"
    if inside and all(name for name, _ in inside):
        fields = ", ".join(f"{_identifier(name)} {there}" for (name, _), there in zip(inside, types, strict=True))
        return f"{kind.id.upper()}({fields})"
    return "VARCHAR"


def _inside(kind: "DuckDBPyType") -> "list[tuple[str, DuckDBPyType]]":
    """The types that a nested one is made of, with the names that they may have."""
    children: list[tuple[str, Any]] = kind.children
    if kind.id == "array":  # the second is its length
        return children[:1]
    if kind.id == "union":  # the first says which of the others is there
        return children[1:]
    return children


def _register(
    connection: "duckdb.DuckDBPyConnection", name: str, tables: Sequence[tuple[str, pa.Table | Files]], run_column: bool
) -> None:
    """One view of the rows of all runs, whose files may be of different versions."""
    pieces = []
    for number, (run, rows) in enumerate(tables):
        piece = f"{name}_{number}"
        if isinstance(rows, pa.Table):
            connection.register(piece, rows)
            there = set(rows.column_names)
        else:
            paths = [str(path) for path in rows.paths]
            found = connection.read_parquet(paths, hive_partitioning=True, union_by_name=True)
            there = set(found.columns)
            (found if rows.condition is None else found.filter(rows.condition)).create_view(piece)
        columns = [
            f'"{field.name}"'
            if field.name in there
            else f'CAST(NULL AS {_TYPES.get(field.type, "VARCHAR")}) AS "{field.name}"'
            for field in SCHEMAS[name]
        ]
        columns += ['"rank"', *([f"{_quoted(run)} AS run"] if run_column else [])]
        pieces.append(f"SELECT {', '.join(columns)} FROM {piece}")
    connection.execute(f"CREATE VIEW {name} AS {' UNION ALL '.join(pieces)}")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _reason(error: Exception) -> str:
    """What DuckDB says in one line, without its drawing of the query."""
    lines = str(error).split("\nLINE ")[0].splitlines()
    return " ".join(line.strip() for line in lines if line.strip())

"""SQL over the tables of a run, by DuckDB in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from ..errors import ConfigError
from .schema import SCHEMAS

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True, slots=True)
class Files:
    """A table as the parts that hold its rows, of which those count that meet `condition` (SQL; None: all)."""

    paths: Sequence[Path]
    condition: str | None = None


def query_tables(sql: str, table: Callable[[str], pa.Table | Files]) -> pa.Table:
    """The result of `sql` over modules, stats, scalars and events; `table` gives the one of that name.

    Of files DuckDB reads only the columns and row groups it needs.

    Only tables whose name occurs in `sql` are asked for. Times are in UTC.

    Raises ConfigError where DuckDB is not installed or does not accept `sql`.
    """
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError("query() needs DuckDB: pip install 'statsbridge[sql]'") from error
    words = sql.casefold()
    # A query of a record on one's own disk fetches no extension from the network; and an unknown table is an
    # error, not whichever variable of that name happens to be in a caller's frame.
    connection = duckdb.connect(config={"autoinstall_known_extensions": "false", "python_enable_replacements": "false"})
    with connection:
        try:
            connection.execute("SET TimeZone = 'UTC'")
            for name in SCHEMAS:
                if name in words:
                    _register(connection, name, table(name))
            relation = connection.sql(sql)
            if relation is None:
                raise ConfigError("query() takes one SELECT, this statement gives no rows")
            # The older name is gone from DuckDB 2, the newer one is not in 1.1.
            fetch = getattr(relation, "to_arrow_table", None) or relation.fetch_arrow_table
            return fetch()
        except duckdb.Error as error:
            tables = ", ".join(SCHEMAS)
            raise ConfigError(f"DuckDB does not take this query over {tables}: {error}") from error


def _register(connection: "duckdb.DuckDBPyConnection", name: str, rows: pa.Table | Files) -> None:
    if isinstance(rows, pa.Table):
        connection.register(name, rows)
    else:
        found = connection.read_parquet([str(path) for path in rows.paths], hive_partitioning=True)
        (found if rows.condition is None else found.filter(rows.condition)).create_view(name)

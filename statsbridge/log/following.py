"""Rows on their way to disk, shown to somebody who looks at them while the run is being recorded."""

from collections.abc import Callable, Mapping

import pyarrow as pa

from .schema import SCHEMAS, Columns

#: Takes the rows of one flush by table, and gives rows that follow from them: table → columns. Called at every flush,
#: also without rows, in the writer's thread.
Follower = Callable[[Mapping[str, pa.Table]], Mapping[str, Columns]]


class Following:
    """Gathers what one flush writes. Used by the writer's thread, but for `follower`, which is set once."""

    def __init__(self, attempt: int) -> None:
        self.follower: Follower | None = None
        self._attempt = attempt
        self._rows: dict[str, list[pa.Table]] = {}

    def add(self, table: str, rows: pa.Table) -> None:
        """These rows are about to be written."""
        if self.follower is not None:
            self._rows.setdefault(table, []).append(rows)

    def tell(self) -> Mapping[str, Columns]:
        """Show what was added since the last call. Raises what the follower raises, and then asks it no more."""
        rows, self._rows = self._rows, {}
        if self.follower is None:
            return {}
        tables = {table: _complete(table, pa.concat_tables(parts), self._attempt) for table, parts in rows.items()}
        try:
            return self.follower(tables)
        except BaseException:  # of whatever kind: one that has failed once would fail at each flush
            self.follower = None
            raise


def _complete(table: str, rows: pa.Table, attempt: int) -> pa.Table:
    """The rows in all columns of their schema; `seq` is null: they get their numbers when they are written."""
    count = rows.num_rows
    known = {"seq": pa.nulls(count, pa.int64()), "attempt": pa.repeat(pa.scalar(attempt, pa.int64()), count)}
    schema = SCHEMAS[table]
    columns = [known[name] if name in known else rows[name] for name in schema.names]
    return pa.Table.from_arrays(columns, schema=schema)

"""Reading a run: `load` and the tables it gives. Writes nothing, needs no torch."""

import difflib
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ConfigError, DamagedPart, LogError, StatsBridgeWarning
from .attempts import EVERYTHING, Attempt, Superseded, read_attempts
from .backlog import WRITE_ORDER
from .cover import Cover, in_order
from .merge import merge_ranks, merge_scalars
from .parts import Part, ReadingParts, list_parts, live_parts, read_part
from .query import Files, query_tables
from .runs import read_info, resolve_run
from .schema import SCHEMAS

_SHOWN = 20  # choices in a message that must stay readable
_IN_MEMORY = 1 << 20  # rows of a table that a query reads whole
_LOOKS = 10  # a query is tried again while its files are merged into others
_PRUNED = 1 << 16  # rows of a part from which one series is worth a search inside it


def load(path: str | Path, *, attempts: Literal["effective", "all"] = "effective") -> "RunData":
    """The run at `path`, for reading. Of a run that is still being written: what is on disk now.

    `path` is the run's folder; or, inside ./statsbridge-runs, its id, a unique beginning of the id, its name,
    or "latest". Each part is checked against its checksum when its table is first used; a damaged one is
    named in a StatsBridgeWarning and left out.

    `attempts`: of a run that was resumed, `"effective"` leaves out what a later attempt has superseded: the rows of
    earlier ones from its first step on. `"all"` has every row; the column `attempt` says whose it is.

    Raises LogError where there is no such run, SchemaTooNew where a newer statsbridge wrote it, ConfigError where
    `attempts` is something else.
    """
    if attempts not in ("effective", "all"):
        raise ConfigError(f"attempts={attempts!r}: give 'effective' or 'all'")
    run = resolve_run(path)
    info = read_info(run)
    # Against the order of writing: whatever a row refers to was there before it.
    parts = {table: list_parts(run, table) for table in reversed(WRITE_ORDER)}
    # After the parts: rows of an attempt that begins now are then missing, and the old ones it supersedes not doubled.
    superseded = EVERYTHING if attempts == "all" else Superseded(read_attempts(run))
    return RunData(run, info, parts, superseded)


class RunData:
    """One run as it was when it was loaded. Its tables are pyarrow Tables, read when first used.

    `path`: the run's folder. `id`: the run's id. `info`: what `run.json` says.
    """

    def __init__(
        self,
        path: Path,
        info: Mapping[str, Any],
        parts: Mapping[str, Sequence[Part]],
        superseded: Superseded = EVERYTHING,
    ) -> None:
        self.path = path
        self.id = str(info["id"])
        self.info = info
        self._parts = parts
        self._superseded = superseded
        self._damaged: dict[str, list[DamagedPart]] = {}

    @cached_property
    def modules(self) -> pa.Table:
        """One row a (trace, module call): type, parent, order, depth. Sorted by (rank, seq), as all are."""
        return self._read("modules")

    @cached_property
    def stats(self) -> pa.Table:
        """One row a (sampled step, module call, site, tensor)."""
        return self._read("stats")

    @cached_property
    def scalars(self) -> pa.Table:
        """One row a value: the user's and the training's (learning rates, norms)."""
        return self._read("scalars")

    @cached_property
    def events(self) -> pa.Table:
        """One row for each thing worth knowing."""
        return self._read("events")

    @property
    def damaged(self) -> tuple[DamagedPart, ...]:
        """What is wrong with each part that was left out, by name. Reads the whole run."""
        for table in SCHEMAS:
            getattr(self, table)
        return tuple(error for table in SCHEMAS for error in self._damaged[table])

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The attempts after the first, in order. Raises LogError where one's file cannot be read."""
        return read_attempts(self.path)

    def merged(self, table: str = "stats") -> pa.Table:
        """`stats` with the rows of several ranks merged into one, or `scalars` with the norms that they know together.

        See `merge.merge_ranks` and `merge.merge_scalars`. Raises LogError for another table.
        """
        if table == "stats":
            return self._merged
        if table == "scalars":
            return self._merged_scalars
        raise LogError(f"no ranks to merge in table {table!r}; give 'stats' or 'scalars'")

    @cached_property
    def _merged(self) -> pa.Table:
        return merge_ranks(self.stats)

    @cached_property
    def _merged_scalars(self) -> pa.Table:
        return merge_scalars(self.scalars)

    def series(self, module: str, site: str, statistic: str, *, tensor: str | None = None, call: int = 0) -> pa.Table:
        """One number over time: columns step, value, iteration, time, sorted by step, ranks merged.

        `statistic` is any numeric column of `stats`. `tensor` may be left out where there is only one.

        Raises LogError that names the choices where there is no such thing.
        """
        numeric = [field.name for field in SCHEMAS["stats"] if _is_number(field.type)] + ["rank"]
        if statistic not in numeric:
            raise LogError(f"no statistic {statistic!r}; there are: {_choices(statistic, numeric)}")
        rows = self._of_module(module)
        where = ""
        for column, value in (("module", module), ("site", site), ("call", call), ("tensor", tensor)):
            there = rows[column].unique().to_pylist()
            if column == "tensor" and value is None:
                if len(there) > 1:
                    raise LogError(f"several tensors{where}, give tensor=…: {_choices('', there)}")
                continue
            if value not in there:
                raise LogError(f"no {column} {value!r}{where}; there are: {_choices(str(value), there)}")
            rows = rows.filter(pc.equal(rows[column], value))
            where += f"{' in' if not where else ','} {column} {value!r}"
        found = pa.table(
            {
                "step": rows["step"],
                "value": rows[statistic],
                "iteration": rows["iteration"],
                "time": rows["time"],
            }
        )
        return found.sort_by("step")

    def query(self, sql: str) -> pa.Table:
        """The result of `sql` over the tables modules, stats, scalars and events, by DuckDB.

        Raises ConfigError where DuckDB (extra `statsbridge[sql]`) is missing or does not take the query.
        """
        for _ in range(_LOOKS):
            used: list[Path] = []
            try:
                return query_tables(sql, partial(self._source, used=used))
            except ConfigError:
                if all(path.exists() for path in used):
                    raise
        raise LogError(f"the parts of {self.path} are merged faster than they can be read: try again")

    def _source(self, table: str, used: list[Path]) -> pa.Table | Files:
        """The rows of a table, or the files (`used` too) that hold them where they are too many for one query."""
        ends = {part.rank: part.last for part in sorted(self._parts[table], key=lambda part: part.last)}
        parts = [part for part in live_parts(self.path, table) if part.first <= ends.get(part.rank, -1)]
        if table in self.__dict__ or sum(part.rows for part in parts) < _IN_MEMORY or not _without_gaps(parts):
            return getattr(self, table)
        conditions = [self._superseded.condition()]
        if any(part.last > ends[part.rank] for part in parts):  # merged with what has been written since
            conditions.append(" OR ".join(f"(rank = {rank} AND seq <= {end})" for rank, end in ends.items()))
        try:
            with ReadingParts(parts):  # a query over what is damaged must say so, as any other reading does
                used += [part.path for part in parts]
        except DamagedPart:
            return getattr(self, table)
        return Files(used[-len(parts) :], " AND ".join(f"({one})" for one in conditions if one) or None)

    def _of_module(self, module: str) -> pa.Table:
        """The rows of `stats` of one module, ranks merged; of all modules where there is no such one."""
        if "stats" in self.__dict__ or "_merged" in self.__dict__:
            return self.merged()
        wanted = pa.array([module], pa.string())

        def read(part: Part) -> pa.Table:
            if part.rows >= _PRUNED:
                with ReadingParts([part], verify=False) as reading:
                    return reading.read(part, "module", wanted)
            rows = read_part(part)
            return rows.filter(pc.is_in(rows["module"].cast(pa.string()), value_set=wanted))

        rows = self._gather("stats", read)
        return merge_ranks(rows) if rows.num_rows else self.merged()

    def _read(self, table: str) -> pa.Table:
        return self._gather(table, read_part)

    def _gather(self, table: str, read: Callable[[Part], pa.Table]) -> pa.Table:
        cover = Cover(self.path, table, self._parts[table])
        chunks = [SCHEMAS[table].empty_table().append_column("rank", pa.array([], pa.int64()))]
        for rank, all_rows in cover.read(read):
            rows = self._superseded.drop(all_rows)
            chunks.append(rows.append_column("rank", pa.array(np.full(rows.num_rows, rank))))
        for error in cover.damaged:
            warnings.warn(f"statsbridge: left out a damaged part: {error}", StatsBridgeWarning, stacklevel=5)
        self._damaged[table] = cover.damaged
        return in_order(pa.concat_tables(chunks).unify_dictionaries().combine_chunks())

    def _summary(self) -> dict[str, str]:
        severities = Counter(self.events["severity"].to_pylist())
        return {
            "run": f"{self.id} ({self.info['name']})",
            "sampled steps": str(len(self.stats["step"].unique())),
            "modules": str(len(self.modules["module"].unique())),
            "sites": ", ".join(map(str, self.stats["site"].unique().to_pylist())) or "none",
            "rows": ", ".join(f"{name} {getattr(self, name).num_rows}" for name in SCHEMAS),
            "events": ", ".join(f"{count} {severity}" for severity, count in severities.items()) or "none",
            "path": str(self.path),
        }

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {text}" for name, text in self._summary().items())

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._summary().items())
        return f"<table>{''.join(rows)}</table>"


def _without_gaps(parts: Sequence[Part]) -> bool:
    """Whether the parts of each rank, in order, hold each row once."""
    ends: dict[int, int] = {}
    for part in parts:
        if part.first != ends.get(part.rank, 0):
            return False
        ends[part.rank] = part.last + 1
    return True


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _choices(wanted: str, there: Sequence[object]) -> str:
    """What there is, what resembles `wanted` first."""
    names = [str(value) for value in there]
    close = difflib.get_close_matches(wanted, names, n=5, cutoff=0.5)
    ordered = close + [name for name in names if name not in close]
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(repr(name) for name in ordered[:_SHOWN]) + more

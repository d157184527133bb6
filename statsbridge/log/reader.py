"""Reading a run: `load` and the tables it gives. Writes nothing, needs no torch."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ConfigError, DamagedPart, LogError, StatsBridgeWarning
from .attempts import EVERYTHING, Attempt, Superseded, read_attempts
from .backlog import WRITE_ORDER
from .cover import Cover, in_order
from .held import Held
from .merge import merge_ranks, merge_scalars
from .parts import Part, ReadingParts, covered, list_parts, live_parts, read_part
from .pruning import Wanted, last_step, sites_of, without_gaps
from .query import Files, Source, query_runs
from .runs import read_info, resolve_run
from .schema import SCHEMAS, SITES
from .wording import choices

_IN_MEMORY = 1 << 20  # rows of a table that a query reads whole
_SMALL = 1 << 18  # rows of `stats` that are read whole, and once, whatever is asked for


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
    return RunData.open(path, attempts=attempts)


def query(runs: "Sequence[RunData]", sql: str) -> pa.Table:
    """The result of `sql` over the tables of several runs; the column `run` of each table says whose a row is.

    Raises ConfigError where DuckDB (extra `statsbridge[sql]`) is missing or does not take the query.
    """
    return query_runs(sql, [Source(run.id, run._source) for run in runs], run_column=True)


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
        self._said: set[str] = set()

    @classmethod
    def open(cls, path: str | Path, *, attempts: Literal["effective", "all"] = "effective") -> Self:
        """The run at `path`; see `load`."""
        if attempts not in ("effective", "all"):
            raise ConfigError(f"attempts={attempts!r}: give 'effective' or 'all'")
        run = resolve_run(path)
        info = read_info(run)
        # Against the order of writing: whatever a row refers to was there before it.
        parts = {table: list_parts(run, table) for table in reversed(WRITE_ORDER)}
        # After the parts: rows of an attempt that begins now are then missing, and the old ones it supersedes not
        # doubled.
        superseded = EVERYTHING if attempts == "all" else Superseded(read_attempts(run))
        return cls(run, info, parts, superseded)

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
            raise LogError(f"no statistic {statistic!r}; there are: {choices(statistic, numeric)}")
        rows = self._of_module(module, statistic)
        where = ""
        for column, value in (("module", module), ("site", site), ("call", call), ("tensor", tensor)):
            there = rows[column].unique().to_pylist()
            if column == "tensor" and value is None:
                if len(there) > 1:
                    raise LogError(f"several tensors{where}, give tensor=…: {choices('', there)}")
                continue
            if value not in there:
                raise LogError(f"no {column} {value!r}{where}; there are: {choices(str(value), there)}")
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
        return query_runs(sql, [Source(self.id, self._source)], run_column=False)

    def _source(self, table: str, used: list[Path]) -> pa.Table | Files:
        """The rows of a table, or the files (`used` too) that hold them where they are too many for one query."""
        parts, ends = self._live(table)
        if table in self.__dict__ or sum(part.rows for part in parts) < _IN_MEMORY or not without_gaps(parts):
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

    def _of_module(self, module: str, statistic: str) -> pa.Table:
        """One number of one module at all steps, ranks merged; of all modules where there is no such one."""
        columns = ["module", "site", "call", "tensor", "step", "iteration", "time"]
        columns += [] if statistic in (*columns, "rank") else [statistic]
        rows = self._merged_rows(Wanted(modules=(module,), columns=tuple(columns)))
        rows = rows.filter(pc.equal(rows["module"].cast(pa.string()), module))
        return rows if rows.num_rows else self.merged()

    def _merged_rows(self, wanted: Wanted, *, ordered: bool = True) -> pa.Table:
        """The rows of `stats` that are `wanted`, ranks merged, of the wanted columns and `rank`.

        Without `ordered` they are not sorted, where that saves time.
        """
        parts = self._parts["stats"]
        if "stats" in self.__dict__ or sum(part.rows for part in parts) <= _SMALL:
            needed = dict.fromkeys((*wanted.names, "module", "site", "step", "rank"))
            return wanted.filter(self.merged().select(list(needed))).select([*wanted.names, "rank"])
        if len({part.rank for part in parts}) == 1:
            # A tensor that is cut has several ranks, of which only one may have recorded.
            names = dict.fromkeys(("seq", "attempt", "step", "shards", *wanted.names))
            rows = self._gather_wanted(replace(wanted, columns=tuple(names)), ordered)
            if not pc.any(pc.greater(rows["shards"], 1)).as_py():
                return rows.select([*wanted.names, "rank"])
        # The ratio of an update that is cut needs the norm of the whole parameter.
        sites = None if wanted.sites is None else (*wanted.sites, "parameter")
        everything = replace(wanted, columns=None, sites=sites)
        merged = merge_ranks(self._gather("stats", everything.read))
        return wanted.filter(merged).select([*wanted.names, "rank"])

    def _gather_wanted(self, wanted: Wanted, ordered: bool) -> pa.Table:
        """The wanted rows of a run of one rank; those of its small parts out of memory."""
        held = self._held
        if held is not None and held.takes(wanted):
            with suppress(DamagedPart):
                small = held.rows(wanted, self._superseded.drop)
                met: list[Part] = []

                def read(part: Part) -> pa.Table:
                    if part.name not in held.names:
                        return wanted.read(part)
                    met.append(part)
                    return small if len(met) == 1 else small.slice(0, 0)

                rows = self._gather("stats", read, wanted.names, ordered)
                # Where parts were merged since and one of the wider ones was read, its rows would be there twice.
                if len(met) == len(held.parts):
                    return rows
        return self._gather("stats", wanted.read, wanted.names, ordered)

    @cached_property
    def _held(self) -> Held | None:
        """The small parts of `stats`; None where it is not known which of them holds a row."""
        parts = self._parts["stats"]
        superfluous = covered(parts)
        live = [part for part in parts if part not in superfluous]
        return Held(live) if without_gaps(live) else None

    def _last_step(self, sites: Sequence[str] | None = None) -> int | None:
        """The last sampled step of these sites, None where there is none. Of a large run little is read."""
        live = self._large("stats")
        if live is not None:
            with suppress(DamagedPart):
                return last_step(live, sites, self._superseded)
        wanted = Wanted(sites=None if sites is None else tuple(sites), columns=("site", "step"))
        found: int | None = pc.max(self._merged_rows(wanted, ordered=False)["step"]).as_py()
        return found

    def _sites(self) -> set[str]:
        live = self._large("stats")
        if live is not None:
            with suppress(DamagedPart):
                return sites_of(live)
        column = self._merged_rows(Wanted(columns=("site",)), ordered=False)["site"]
        return {str(site) for site in pc.unique(column.cast(pa.string())).to_pylist() if site is not None}

    def _large(self, table: str) -> Sequence[Part] | None:
        """The parts of a table that is not worth reading whole, as it was; None where it is, or that is not known."""
        parts = self._parts[table]
        if table in self.__dict__ or sum(part.rows for part in parts) <= _SMALL:
            return None
        live, ends = self._live(table)
        return None if any(part.last > ends[part.rank] for part in live) else live

    def _live(self, table: str) -> tuple[list[Part], dict[int, int]]:
        """The parts that hold the rows of a table now, and the last row of each rank when it was loaded."""
        ends = {part.rank: part.last for part in sorted(self._parts[table], key=lambda part: part.last)}
        return [part for part in live_parts(self.path, table) if part.first <= ends.get(part.rank, -1)], ends

    def _read(self, table: str) -> pa.Table:
        return self._gather(table, read_part)

    def _gather(
        self,
        table: str,
        read: Callable[[Part], pa.Table],
        names: Sequence[str] | None = None,
        ordered: bool = True,
    ) -> pa.Table:
        cover = Cover(self.path, table, self._parts[table])
        empty = SCHEMAS[table].empty_table()
        chunks = [(empty if names is None else empty.select(names)).append_column("rank", pa.array([], pa.int64()))]
        for rank, all_rows in cover.read(read):
            rows = self._superseded.drop(all_rows)
            chunks.append(rows.append_column("rank", pa.array(np.full(rows.num_rows, rank))))
        for error in cover.damaged:
            if str(error) not in self._said:
                self._said.add(str(error))
                warnings.warn(f"statsbridge: left out a damaged part: {error}", StatsBridgeWarning, stacklevel=5)
        self._damaged[table] = cover.damaged
        rows = pa.concat_tables(chunks).unify_dictionaries()
        return in_order(rows.combine_chunks()) if ordered else rows

    def _summary(self) -> dict[str, str]:
        severities = Counter(self.events["severity"].to_pylist())
        names = ["attempt", "seq", "step"]
        # Of a large run no more than that is read for a glance at it.
        stats = (
            self.stats
            if self._large("stats") is None
            else self._gather("stats", Wanted(columns=(*names,)).read, names, False)
        )
        sites = self._sites()
        rows = {name: stats if name == "stats" else getattr(self, name) for name in SCHEMAS}
        return {
            "run": f"{self.id} ({self.info['name']})",
            "sampled steps": str(len(stats["step"].unique())),
            "modules": str(len(self.modules["module"].unique())),
            "sites": ", ".join(site for site in SITES if site in sites) or "none",
            "rows": ", ".join(f"{name} {table.num_rows}" for name, table in rows.items()),
            "events": ", ".join(f"{count} {severity}" for severity, count in severities.items()) or "none",
            "path": str(self.path),
        }

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {text}" for name, text in self._summary().items())

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._summary().items())
        return f"<table>{''.join(rows)}</table>"


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))

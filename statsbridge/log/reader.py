"""Reading a run: `load` and the tables it gives. Writes nothing, needs no torch."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Literal, Self

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ConfigError, DamagedPart, LogError
from .attempts import EVERYTHING, Superseded, read_attempts
from .backlog import WRITE_ORDER
from .held import Held
from .merge import merge_ranks, merge_scalars
from .parts import Part, ReadingParts, covered, list_parts
from .pruning import Wanted, groups_of, last_step, modules_of, sites_of, without_gaps
from .query import Files, Source, query_runs
from .runs import read_info, resolve_run
from .schema import SCHEMAS
from .summary import summary
from .tables import Tables
from .wording import choices

_IN_MEMORY = 1 << 20  # rows of a table that a query reads whole
_SMALL = 1 << 18  # rows of `stats` that are read whole, and once, whatever is asked for


def load(path: str | Path, *, attempts: Literal["effective", "all"] = "effective") -> "RunData":
    """The run at `path` with its tables alone. `statsbridge.load` takes and raises the same, and gives answers too."""
    return RunData.open(path, attempts=attempts)


def query(runs: "Sequence[RunData]", sql: str) -> pa.Table:
    """The result of `sql` over the tables of several runs; the column `run` of each table says whose a row is.

    Raises ConfigError where DuckDB (extra `statsbridge[sql]`) is missing or does not take the query.
    """
    return query_runs(sql, [Source(run.id, run._source) for run in runs], run_column=True)


def in_turn(run: "RunData") -> tuple[Sequence[Part], Callable[[Part, Sequence[str]], Iterator[pa.Table]]] | None:
    """The parts of a large `stats` table of one rank, and what reads one: its rows, some at a time, some columns.

    None where the table is read whole, or its rows are not known to be in one of the parts each.
    """
    parts = run._large("stats")
    if parts is None or len({part.rank for part in parts}) != 1 or not without_gaps(parts):
        return None
    return parts, lambda part, columns: (run._superseded.drop(rows) for rows in groups_of(part, columns))


class RunData(Tables):
    """One run as it was when it was loaded. Its tables are pyarrow Tables, read when first used.

    `path`: the run's folder. `id`: the run's id. `info`: what `run.json` says.
    """

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
        rows = self._of_module(module, site, statistic)
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
        few = table in self.__dict__ or sum(part.rows for part in parts) < _IN_MEMORY
        if few or not without_gaps(parts) or not _is_text(self.path):  # DuckDB takes paths as UTF-8
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

    def _of_module(self, module: str, site: str, statistic: str) -> pa.Table:
        """One number of one module and site at all steps, ranks merged.

        Of all its sites where it has no such one, of all modules where there is no such module.
        """
        columns = ["module", "site", "call", "tensor", "step", "iteration", "time"]
        columns += [] if statistic in (*columns, "rank") else [statistic]
        for sites in ((site,), None):
            rows = self._merged_rows(Wanted(modules=(module,), sites=sites, columns=tuple(columns)))
            rows = rows.filter(pc.equal(rows["module"].cast(pa.string()), module))
            if rows.num_rows:
                return rows
        return self.merged()

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

    def _modules_of(self, site: str) -> list[str] | None:
        """The modules of a site of a large run, in order; None where they are not known without reading all."""
        live = self._large("stats")
        if live is not None:
            with suppress(DamagedPart):
                return sorted(modules_of(live, site))
        return None

    def _large(self, table: str) -> Sequence[Part] | None:
        """The parts of a table that is not worth reading whole, as it was; None where it is, or that is not known."""
        parts = self._parts[table]
        if table in self.__dict__ or sum(part.rows for part in parts) <= _SMALL:
            return None
        live, ends = self._live(table)
        return None if any(part.last > ends[part.rank] for part in live) else live

    def _glance(self) -> pa.Table:
        """`stats`, or of a large run the little of it that a glance takes."""
        if self._large("stats") is None:
            return self.stats
        names = ["attempt", "seq", "step"]
        return self._gather("stats", Wanted(columns=(*names,)).read, names, False)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {text}" for name, text in summary(self, self._glance()).items())

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"
            for name, text in summary(self, self._glance()).items()
        )
        return f"<table>{''.join(rows)}</table>"


def _is_text(path: Path) -> bool:
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))

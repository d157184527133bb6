"""Reading a run: `load` and the tables it gives. Writes nothing, needs no torch."""

import difflib
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import DamagedPart, LogError, StatsBridgeWarning
from .backlog import WRITE_ORDER
from .merge import merge_ranks
from .parts import Part, list_parts, read_part
from .query import query_tables
from .runs import read_info, resolve_run
from .schema import SCHEMAS

_SHOWN = 20  # choices in a message that must stay readable


def load(path: str | Path) -> "RunData":
    """The run at `path`, for reading. Of a run that is still being written: what is on disk now.

    `path` is the run's folder; or, inside ./statsbridge-runs, its id, a unique beginning of the id, its name,
    or "latest". Each part is checked against its checksum when its table is first used; a damaged one is
    named in a StatsBridgeWarning and left out.

    Raises LogError where there is no such run, SchemaTooNew where a newer statsbridge wrote it.
    """
    run = resolve_run(path)
    info = read_info(run)
    # Against the order of writing: whatever a row refers to was there before it.
    parts = {table: list_parts(run, table) for table in reversed(WRITE_ORDER)}
    return RunData(run, info, parts)


class RunData:
    """One run as it was when it was loaded. Its tables are pyarrow Tables, read when first used.

    `path`: the run's folder. `id`: the run's id. `info`: what `run.json` says.
    """

    def __init__(self, path: Path, info: Mapping[str, Any], parts: Mapping[str, Sequence[Part]]) -> None:
        self.path = path
        self.id = str(info["id"])
        self.info = info
        self._parts = parts
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

    def merged(self) -> pa.Table:
        """`stats` with the rows of several ranks merged into one; see `merge.merge_ranks`."""
        return self._merged

    @cached_property
    def _merged(self) -> pa.Table:
        return merge_ranks(self.stats)

    def series(self, module: str, site: str, statistic: str, *, tensor: str | None = None, call: int = 0) -> pa.Table:
        """One number over time: columns step, value, iteration, time, sorted by step, ranks merged.

        `statistic` is any numeric column of `stats`. `tensor` may be left out where there is only one.

        Raises LogError that names the choices where there is no such thing.
        """
        rows = self.merged()
        numeric = [field.name for field in rows.schema if _is_number(field.type)]
        if statistic not in numeric:
            raise LogError(f"no statistic {statistic!r}; there are: {_choices(statistic, numeric)}")
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
        return query_tables(sql, lambda name: getattr(self, name))

    def _read(self, table: str) -> pa.Table:
        damaged = self._damaged[table] = []
        chunks = [SCHEMAS[table].empty_table().append_column("rank", pa.array([], pa.int64()))]
        for part in self._parts[table]:
            try:
                rows = read_part(part)
            except DamagedPart as error:
                damaged.append(error)
                warnings.warn(f"statsbridge: left out a damaged part: {error}", StatsBridgeWarning, stacklevel=4)
            else:
                chunks.append(rows.append_column("rank", pa.array(np.full(rows.num_rows, part.rank))))
        return pa.concat_tables(chunks).unify_dictionaries().combine_chunks()

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


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _choices(wanted: str, there: Sequence[object]) -> str:
    """What there is, what resembles `wanted` first."""
    names = [str(value) for value in there]
    close = difflib.get_close_matches(wanted, names, n=5, cutoff=0.5)
    ordered = close + [name for name in names if name not in close]
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(repr(name) for name in ordered[:_SHOWN]) + more

"""The one place through which everything leaves: rows and names that may not are gone from what it returns."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ..errors import PolicyError, Retry
from .contract import CHANNELS, Destination, RunInfo
from .hashing import KEY_FILE, Namer, load_key, note_key
from .policy import Grant, List, Policy
from .policy_file import STATISTICS
from .state import mirror_name

if TYPE_CHECKING:
    from .tail import Chunk

_HASHED = {
    "modules": {"module": "module", "parent": "module", "type": "type"},
    "stats": {"module": "module", "type": "type", "tensor": "tensor"},
    "events": {"module": "module", "tensor": "tensor"},
}
# A kind of event is a word of ours. What is none may be anybody's text.
_KIND = re.compile(r"[a-z][a-z0-9_]{0,39}")
# A table of which no channel is open goes nowhere.
_CHANNELS = {"scalars": {"metrics"}, "stats": {"metrics", "histograms"}, "events": {"alerts"}}


def make_gate(policy: Policy, destination: Destination, *, restricted: bool, run: Path | None) -> Gate:
    """The gate to `destination` under `policy`. Imports no tracker and does no I/O on the network.

    `run`: the folder of the run, where the key of hashed names is kept; None to ask only what is allowed.

    Raises PolicyError, with the rule and its file, where nothing may leave to there.
    """
    grant = policy.judge(destination, restricted=restricted)
    return Gate(grant, restricted=restricted, run=run, mirror=mirror_name(destination) if run is not None else None)


class Gate:
    """What one mirror lets through. Made by `make_gate`; used by one thread.

    `key_changed`: what to say where names leave under another key than before; None until they do, and otherwise.
    """

    def __init__(self, grant: Grant, *, restricted: bool, run: Path | None, mirror: str | None = None) -> None:
        self.grant = grant
        self._restricted = restricted
        self._run = run
        self._mirror = mirror
        self._namer: Namer | None = None
        self.key_changed: str | None = None

    @property
    def policy(self) -> str:
        """Digest of the policy files that apply, for the audit; "" where none does."""
        return self.grant.policy

    def allows(self, channel: str) -> bool:
        """Whether anything may leave through this one of `CHANNELS`. Raises ValueError for no channel."""
        if channel not in CHANNELS:
            raise ValueError(f"{channel!r} is no channel; there are {', '.join(CHANNELS)}")
        return channel in self.grant.channels

    @property
    def blind(self) -> bool:
        """Whether content that nobody can look into, such as a user's picture, may leave through an open channel.

        Not of a restricted run, nor where names are hashed or fields limited: it could show what may not leave.
        """
        limited = any(self.grant.limited(kind) for kind in ("tables", "sites", "statistics", "scalars"))
        return not (self._restricted or self.grant.hashed or limited)

    def info(self, info: RunInfo) -> RunInfo:
        """`info` as an adapter may know it: without the channel `config` no name, config and versions."""
        if self.allows("config"):
            return info
        return replace(info, name=info.id, config={}, versions={})

    def chunk(self, chunk: Chunk) -> Chunk:
        """`chunk` without what may not leave, in the same columns and order.

        Rows of tables, sites and scalars that may not leave are dropped, and statistics that may not are
        null (`count` too, and with it the modules' `parameters`); where these are limited, so are `value` and
        `threshold` of events. With hashed names, modules, types, tensors and the scalars' names of the user's
        become hashes. In a restricted run, with hashed names, and where statistics or scalars are limited, an event's
        message, which is free text and may tell any name and number, gives way to one made of its other columns.

        Raises PolicyError where the key of the hashes cannot be used, Retry where it cannot be written now.
        """
        # Numbers first: rows without their histograms are quickly filtered.
        stats = self._rows("stats", self._statistics(chunk.stats), "sites", "site")
        return replace(
            chunk,
            modules=self._modules(chunk.modules),
            stats=self._names("stats", stats),
            scalars=self._scalars(self._rows("scalars", chunk.scalars, "scalars", "name")),
            events=self._events(self._rows("events", chunk.events, "sites", "site")),
        )

    # ---- rows and numbers ----------------------------------------------------------------------------------

    def _open(self, table: str) -> bool:
        return self.grant.admits("tables", table) and not self.grant.channels.isdisjoint(_CHANNELS[table])

    def _rows(self, table: str, rows: pa.Table, kind: List, column: str) -> pa.Table:
        """The rows of `table` whose `column` may leave; a row that has none there may."""
        if not self._open(table):
            return rows.schema.empty_table()
        if not self.grant.limited(kind):
            return rows
        names = _dictionary(rows[column])
        admitted = [name is not None and self.grant.admits(kind, name) for name in names.dictionary.to_pylist()]
        indices = names.indices.fill_null(len(admitted)).to_numpy()
        return _without_traces(rows.filter(pa.array(np.array([*admitted, True])[indices])))

    def _statistics(self, stats: pa.Table) -> pa.Table:
        for name in STATISTICS:
            channel = "histograms" if name == "histogram" else "metrics"
            if not (self.allows(channel) and self.grant.admits("statistics", name)):
                stats = _set(stats, name, pa.nulls(stats.num_rows, stats.schema.field(name).type))
        return stats

    def _modules(self, modules: pa.Table) -> pa.Table:
        if not self._open("stats"):
            return modules.schema.empty_table()
        if not self.grant.admits("statistics", "count"):
            modules = _set(modules, "parameters", pa.nulls(modules.num_rows, pa.int64()))
        return self._names("modules", modules)

    # ---- names and texts -----------------------------------------------------------------------------------

    def _names(self, table: str, rows: pa.Table) -> pa.Table:
        if not self.grant.hashed:
            return rows
        namer = self._hashes()
        for column, kind in _HASHED[table].items():
            rows = _mapped(rows, column, lambda name, kind=kind: namer.name(kind, name))  # type: ignore[misc]
        return rows

    def _scalars(self, scalars: pa.Table) -> pa.Table:
        if not self.grant.hashed:
            return scalars
        namer, spelled_out = self._hashes(), self.grant.spelled_out
        return _mapped(scalars, "name", lambda name: name if spelled_out(name) else namer.scalar(name))

    def _events(self, events: pa.Table) -> pa.Table:
        limited = self.grant.limited("statistics") or self.grant.limited("scalars")
        if limited:
            for column in ("value", "threshold"):
                events = _set(events, column, pa.nulls(events.num_rows, pa.float64()))
        nameless = self._restricted or self.grant.hashed
        if not (nameless or limited):
            return events
        if nameless:
            events = self._names("events", events)
            events = _mapped(events, "kind", lambda kind: kind if _KIND.fullmatch(kind) else "other")
        about = ("kind", "severity", "module", "site", "tensor", "value", "threshold")
        rows = zip(*(events[column].to_pylist() for column in about), strict=True)
        messages = pa.array([_message(*row) for row in rows], pa.string()).dictionary_encode()
        return _set(events, "message", messages)

    def _hashes(self) -> Namer:
        if self._namer is None:
            own = None if self._run is None else self._run / "mirrors" / KEY_FILE
            file = Path(self.grant.key_file) if self.grant.key_file else own
            if file is None:
                raise PolicyError("names must leave as hashes, and there is no run folder to keep their key in")
            try:
                key = load_key(file)
            except OSError as error:
                raise Retry(f"the key that names are hashed with cannot be used: {file}: {error}") from error
            self._namer = Namer(key)
            self.key_changed = None if self._run is None else note_key(self._run, file, key, self._mirror)
        return self._namer


def _message(
    kind: str,
    severity: str,
    module: str | None,
    site: str | None,
    tensor: str | None,
    value: float | None,
    threshold: float | None,
) -> str:
    parts = [part for part in (module, site, tensor) if part]
    numbers = [
        f"{name} {number:.6g}" for name, number in (("value", value), ("threshold", threshold)) if number is not None
    ]
    told = ", ".join([" ".join(parts), *numbers] if parts else numbers)
    return f"{kind} ({severity})" + (f": {told}" if told else "")


def _dictionary(column: pa.ChunkedArray) -> pa.DictionaryArray:
    return (
        column.unify_dictionaries().combine_chunks()
        if column.num_chunks
        else pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), pa.array([], pa.string()))
    )


def _mapped(rows: pa.Table, column: str, change: Callable[[str], str]) -> pa.Table:
    """`rows` with every text of a column changed: each different one once, none of the old ones kept."""
    texts = _dictionary(rows[column])
    changed = pa.array([None if text is None else change(text) for text in texts.dictionary.to_pylist()], pa.string())
    # Two texts may have become one, which a dictionary must hold once.
    return _set(rows, column, changed.take(texts.indices).dictionary_encode())


def _without_traces(rows: pa.Table) -> pa.Table:
    """`rows` with dictionaries that hold only what is in them: a filtered column keeps the others' names."""
    for field in rows.schema:
        if pa.types.is_dictionary(field.type):
            rows = _set(rows, field.name, rows[field.name].cast(pa.string()).dictionary_encode())
    return rows


def _set(rows: pa.Table, column: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    number = rows.schema.get_field_index(column)
    return rows.set_column(number, rows.schema.field(number), values)

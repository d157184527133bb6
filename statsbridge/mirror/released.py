"""A run as the policy lets it go into a file that somebody may send on: a copy without what may not leave."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..analyze.run_data import RunData, load
from ..errors import StatsBridgeWarning
from ..log.attempts import FOLDER as ATTEMPTS
from ..log.attempts import attempt_file
from ..log.figures import FOLDER as FIGURES
from ..log.figures import KIND as FIGURE
from ..log.files import make_folder, write_durably
from ..log.folder import write_json
from ..log.parts import encode, part_folder
from ..log.schema import SCHEMA_VERSION, SCHEMAS
from .audit import Audit, read_audit
from .contract import Destination, RunInfo
from .gate import Gate, make_gate
from .policy import LISTS, Policy
from .policy_file import STATISTICS
from .state import mirror_name
from .tail import Chunk, Cursor

BACKEND = "report"
"""What a policy calls a file that is made of a run: `[[destinations]]` with `backend = "report"` and its `path`."""

_CHANNELS = {
    "metrics": "statistics and scalars",
    "histograms": "histograms",
    "alerts": "findings and events",
    "figures": "pictures",
    "config": "the run's name, its config and versions",
}


@dataclass(frozen=True, slots=True)
class Release:
    """What of a run may go into a file.

    `data`: the run; where something may not leave, a copy without that, which is gone when the context ends.
    `channels`: those of `CHANNELS` that are open. `files`: the policy files that bind it, each as label and text.
    `left_out`: what was left out and why, in sentences. `deliveries`: what has left the run so far, one entry for each
    destination and channel.
    """

    data: RunData
    restricted: bool
    channels: frozenset[str]
    files: tuple[Mapping[str, str], ...]
    left_out: tuple[str, ...]
    deliveries: tuple[Mapping[str, Any], ...]


def report_destination(file: Path) -> Destination:
    """The file `file` as a policy sees it."""
    return Destination(BACKEND, os.path.join(os.path.realpath(file.parent), file.name), explicit=True)


@contextmanager
def released(run: Path, file: Path, policy: Policy) -> Iterator[Release]:
    """The run in the folder `run` as `policy` lets it go into `file`, whose folder must be there.

    The file counts as a destination of the backend `report`. What leaves under a policy is written into the run's
    audit first.

    Raises PolicyError where nothing may leave to there, Retry where the audit cannot be written, LogError.
    """
    destination = report_destination(file)
    data = load(run)
    restricted = bool(data.info.get("restricted"))
    gate = make_gate(policy, destination, restricted=restricted, run=run)
    audit = read_audit(run)
    if not (restricted or gate.grant.limits):
        yield Release(data, restricted, gate.grant.channels, (), (), tuple(_deliveries(audit, plain=True)))
        return
    with TemporaryDirectory(prefix="statsbridge-") as folder:
        copy = Path(folder, data.id)
        before, after = _copy(data, gate, copy)
        if gate.key_changed:
            warnings.warn(f"statsbridge: {gate.key_changed}", StatsBridgeWarning, stacklevel=2)
        released_data = load(copy)
        _write_down(Audit(run, mirror_name(destination), destination, policy=gate.policy), gate, after)
        yield Release(
            released_data,
            restricted,
            gate.grant.channels,
            tuple(_files(policy, gate, restricted=restricted)),
            (
                *_left_out(gate, before, after, restricted=restricted),
                *(f"a damaged part of the record: {error}" for error in data.damaged),
            ),
            tuple(_deliveries(audit, plain=False)),
        )


def _copy(data: RunData, gate: Gate, folder: Path) -> tuple[Chunk, Chunk]:
    """Write what may leave as a run into `folder`; gives the rows before and after."""
    before = Chunk(data.modules, data.stats, data.scalars, data.events, Cursor())
    after = gate.chunk(before)
    if _figures_may_leave(gate):
        if (data.path / FIGURES).is_dir():
            shutil.copytree(data.path / FIGURES, folder / FIGURES)
    else:
        after = replace(after, events=after.events.filter(pc.not_equal(_kinds(after), FIGURE)))
    info = gate.info(
        RunInfo(
            id=data.id,
            name=str(data.info["name"]),
            path=data.path,
            created=datetime.fromisoformat(data.info["created"]),
            config=data.info.get("config") or {},
            versions=data.info.get("versions") or {},
            restricted=bool(data.info.get("restricted")),
        )
    )
    make_folder(folder)
    write_json(
        folder / "run.json",
        {
            "id": info.id,
            "name": info.name,
            "created": data.info["created"],
            "config": info.config,
            "versions": info.versions,
            "schema_version": SCHEMA_VERSION,
            "restricted": info.restricted,
        },
    )
    if data.attempts:
        make_folder(folder / ATTEMPTS)
    for one in data.attempts:
        write_json(attempt_file(folder, one.number), {"first_step": one.first_step, "started": one.started})
    for table in SCHEMAS:
        _write_parts(folder, table, getattr(after, table))
    return before, after


def _figures_may_leave(gate: Gate) -> bool:
    """Whether figures that the user logged may, into which nobody can look."""
    return gate.allows("figures") and gate.blind


def _kinds(chunk: Chunk) -> pa.ChunkedArray:
    return chunk.events["kind"].cast(pa.string())


def _write_parts(run: Path, table: str, rows: pa.Table) -> None:
    ranks, attempts = rows["rank"].to_numpy(), rows["attempt"].to_numpy()
    for rank in np.unique(ranks):
        folder = part_folder(run, table, int(rank))
        make_folder(folder)
        first = 0
        for attempt in np.unique(attempts[ranks == rank]):
            piece = rows.filter(pa.array((ranks == rank) & (attempts == attempt)))
            name, content = encode(table, piece, first=first, attempt=int(attempt))
            write_durably(folder / name, memoryview(content))
            first += piece.num_rows


def _write_down(audit: Audit, gate: Gate, after: Chunk) -> None:
    stats, scalars = after.stats, after.scalars
    steps = pc.min_max(scalars["step"]) if scalars.num_rows else pc.min_max(stats["step"])
    sites = [f"stats/{site}" for site in pc.unique(stats["site"].cast(pa.string())).to_pylist()]
    names = [f"scalars/{name}" for name in pc.unique(scalars["name"].cast(pa.string())).to_pylist()]
    contents: dict[str, tuple[int, list[str]]] = {
        "metrics": (stats.num_rows + scalars.num_rows, sites + names),
        "histograms": (stats.num_rows - stats["histogram"].null_count, sites),
        "alerts": (after.events.num_rows, ["events"]),
        "figures": (stats.num_rows + scalars.num_rows, sites + names),
        "config": (1, ["name", "config", "versions"]),
    }
    for channel, (rows, fields) in contents.items():
        if gate.allows(channel) and rows:
            audit.record(
                channel, rows=rows, fields=fields, first_step=steps["min"].as_py(), last_step=steps["max"].as_py()
            )


def _left_out(gate: Gate, before: Chunk, after: Chunk, *, restricted: bool) -> Iterator[str]:
    grant = gate.grant
    for channel, what in _CHANNELS.items():
        if channel not in grant.channels:
            yield f"{what}: the policy does not open the channel {channel!r}"
    for table in ("stats", "scalars", "events"):
        if not grant.admits("tables", table):
            yield f"the table {table!r}: the policy does not list it"
    if grant.limited("sites"):
        lost = _absent(before.stats["site"], after.stats["site"])
        yield f"sites that the policy does not list: {', '.join(lost) or 'none was recorded'}"
    if grant.limited("statistics"):
        lost = [name for name in STATISTICS if not grant.admits("statistics", name)]
        yield f"statistics that the policy does not list: {', '.join(lost) or 'none'}"
    if grant.limited("scalars"):
        total, kept = (len(pc.unique(rows.scalars["name"])) for rows in (before, after))
        yield f"scalars that the policy does not list: {total - kept} of {total}"
    if grant.limited("statistics") or grant.limited("scalars"):
        yield "values and thresholds of events, for they may be of statistics or scalars that are not listed"
    if grant.hashed:
        yield "names of modules, types, tensors and scalars: hashes stand for them, whose key stays with the run"
    if not _figures_may_leave(gate) and FIGURE in _kinds(before).to_pylist():
        yield "figures that the training logged: they could show what may not leave"
    if restricted or grant.hashed or grant.limited("statistics") or grant.limited("scalars"):
        yield "texts of events: they are made of their other columns. Host, user and paths are not in here either"
    yield from grant.withheld


def _files(policy: Policy, gate: Gate, *, restricted: bool) -> Iterator[dict[str, str]]:
    for file, limits in zip(policy.applying(restricted=restricted), gate.grant.limits, strict=False):
        lists = ((kind, getattr(limits, kind)) for kind in ("channels", *LISTS))
        told = [f"{kind}: {', '.join(names) or 'none'}" for kind, names in lists if names is not None]
        yield {
            "policy of": file.place,
            "SHA-256": file.digest[:16],
            "for": "restricted runs" if file.restricted_only else "all runs",
            "lets into a report": "; ".join([*told, f"names: {limits.names}"]),
        }


def _absent(before: pa.ChunkedArray, after: pa.ChunkedArray) -> list[str]:
    there, left = (set(pc.unique(column.cast(pa.string())).to_pylist()) for column in (before, after))
    return sorted(there - left)


def _deliveries(audit: pa.Table, *, plain: bool) -> Sequence[Mapping[str, Any]]:
    """The audit in short. Not `plain`: without addresses and fields, which may spell out what is hashed elsewhere."""
    keys = ["backend", "destination", "channel"] if plain else ["backend", "channel"]
    grouped = audit.group_by(keys, use_threads=False).aggregate(
        [("rows", "sum"), ("time", "count"), ("first_step", "min"), ("last_step", "max"), ("time", "max")]
    )
    return [
        {
            "backend": row["backend"],
            "destination": row.get("destination", ""),
            "channel": row["channel"],
            "deliveries": row["time_count"],
            "rows": row["rows_sum"],
            "first_step": row["first_step_min"],
            "last_step": row["last_step_max"],
            "last": row["time_max"].isoformat(timespec="seconds"),
        }
        for row in grouped.to_pylist()
    ]

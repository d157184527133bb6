"""Following a run that is being written: what is new since the last look, in bounded memory, without typer or rich."""

import os
import re
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from statsbridge.analyze.findings import Finding
from statsbridge.analyze.rules.words import WORDS
from statsbridge.analyze.watch import Watch
from statsbridge.errors import LogError, SchemaTooNew
from statsbridge.log.attempts import read_attempts
from statsbridge.log.folder import read_writer, writer_file
from statsbridge.log.parts import list_parts
from statsbridge.log.runs import read_info, run_state
from statsbridge.log.schema import SCHEMAS
from statsbridge.mirror.state import MirrorState, readable_states
from statsbridge.mirror.table_tail import TableTail
from statsbridge.mirror.tail import Chunk, Tail

RANK = 0
"""The rank whose steps are followed; of the others the alerts are."""

KEPT_VALUES = 600
KEPT_ALERTS = 5
_MOST_CURVES = 12
_FIRST_CURVES = ("loss", "grad_norm")
_LAST_CURVES = ("update_ratio", "param_norm", "grad_norm_applied", "step_time", "samples", "samples_per_second")
_LIVE = ("running", "created")
_CHUNKS = 5  # of a long record, at one look
_LOOKS = 5  # of a run that has ended, until what cannot be read is given up
_RATE_STEPS = 50
_SIZE_SECONDS = 5.0
_RANK_FOLDER = re.compile(r"rank=(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A run as it is now.

    `ended`: nothing more will come. `writer`: who writes it. `last_time`: when the last step was closed, in seconds
    since the epoch. `rate`: steps a second, over the last steps. `curves`: scalar → its last values. `alerts`: the last
    events of severity warning and critical that are no findings, and those of other ranks. `behind`: rows of a long
    record that the next looks will read, 0 where this one has caught up. `trouble`: what could not be read.
    """

    id: str
    name: str
    state: str
    ended: bool
    writer: str
    findings: Sequence[Finding]
    step: int | None
    last_time: float | None
    rate: float | None
    sampled: int
    curves: Mapping[str, Sequence[float]]
    alerts: Sequence[Mapping[str, Any]]
    bytes: int
    mirrors: Sequence[MirrorState]
    behind: int
    trouble: str


@dataclass(slots=True)
class _Progress:
    """What is remembered of the steps."""

    attempt: int = 0
    sampled: set[int] = field(default_factory=set)
    curves: dict[str, deque[tuple[int, float]]] = field(default_factory=dict)
    times: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=_RATE_STEPS))

    def go_back(self, attempt: int, step: int) -> None:
        """A later attempt supersedes what was recorded from `step` on."""
        self.attempt = attempt
        self.sampled = {one for one in self.sampled if one < step}
        for name, curve in self.curves.items():
            self.curves[name] = deque((point for point in curve if point[0] < step), KEPT_VALUES)
        self.times.clear()


class Follower:
    """Looks again and again at the run in the folder `run`; each look reads what is new. Reading writes nothing."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._info = read_info(run)
        self._tail = Tail(run, rank=RANK)
        self._watch = Watch()
        self._others: dict[int, TableTail] = {}
        self._progress = _Progress()
        self._alerts: deque[dict[str, Any]] = deque(maxlen=KEPT_ALERTS)
        self._size = (-_SIZE_SECONDS, 0)
        self._failed = 0  # looks, one after the other
        self._trouble = ""
        self._lost = ""

    def look(self) -> Situation:
        """Read on, and say how things are. Raises SchemaTooNew where a newer statsbridge writes the run."""
        # Before the rows: of a run that has ended by now all of them are on disk.
        state = run_state(self._run)
        over = state not in _LIVE
        self._trouble = ""
        behind = 0
        try:
            behind = self._read(final=over)
            self._read_others()
            self._weigh(anew=over)
        except SchemaTooNew:  # no later look will find it older
            raise
        except (LogError, OSError) as error:
            self._trouble = str(error)
        self._failed = self._failed + 1 if self._trouble else 0
        progress = self._progress
        return Situation(
            id=str(self._info["id"]),
            name=str(self._info["name"]),
            state=state,
            ended=over and not behind and (not self._trouble or self._failed >= _LOOKS),
            writer=self._writer(),
            findings=self._watch.findings(),
            step=progress.times[-1][0] if progress.times else None,
            last_time=progress.times[-1][2] if progress.times else None,
            rate=_rate(progress.times),
            sampled=len(progress.sampled),
            curves={name: [value for _, value in progress.curves[name]] for name in _ordered(progress.curves)},
            alerts=tuple(self._alerts),
            bytes=self._size[1],
            mirrors=self._mirrors(),
            behind=behind,
            trouble=self._trouble or self._lost,
        )

    def _read(self, *, final: bool) -> int:
        """Read some chunks; gives the rows that remain where there are more than that."""
        behind = True
        for _ in range(_CHUNKS):
            chunk = self._tail.read(final)
            if chunk is None:
                behind = False
                break
            self._take(chunk)
        for text, _ in self._tail.lost():
            self._lost = text
        return self._tail.remaining() if behind else 0

    def _take(self, chunk: Chunk) -> None:
        self._watch.add(
            {"modules": chunk.modules, "stats": chunk.stats, "scalars": chunk.scalars, "events": chunk.events}
        )
        self._hear(chunk.events, RANK)
        scalars = chunk.scalars
        attempts = pc.max(scalars["attempt"]).as_py()
        if attempts is not None and attempts > self._progress.attempt:
            self._progress.go_back(attempts, self._begun(attempts))
        self._progress.sampled.update(chunk.stats["step"].unique().to_pylist())
        columns = (scalars[name].to_pylist() for name in ("name", "step", "value", "iteration"))
        times = scalars["time"].cast(pa.int64()).to_pylist()
        for name, step, value, iteration, microseconds in zip(*columns, times, strict=True):
            if value is not None and step is not None:
                self._keep(name, step, value)
            if iteration is not None and (not self._progress.times or iteration > self._progress.times[-1][1]):
                self._progress.times.append((step, iteration, microseconds / 1e6))

    def _begun(self, attempt: int) -> int:
        """The step from which on `attempt`, and those that were skipped before it, count.

        Not the least step of its rows: what is logged outside of steps may be about any.
        """
        try:
            attempts = read_attempts(self._run)
        except LogError as error:
            self._lost = str(error)
            return sys.maxsize
        known = (one.first_step for one in attempts if self._progress.attempt < one.number <= attempt)
        return min(known, default=sys.maxsize)

    def _keep(self, name: str, step: int, value: float) -> None:
        curves = self._progress.curves
        if name not in curves:
            if len(curves) >= _MOST_CURVES and name not in _FIRST_CURVES:
                return
            curves[name] = deque(maxlen=KEPT_VALUES)
        curves[name].append((step, value))

    def _read_others(self) -> None:
        """The alerts of the other ranks."""
        folder = self._run / "events"
        for name in os.listdir(folder) if folder.is_dir() else ():
            found = _RANK_FOLDER.fullmatch(name)
            if found and int(found[1]) != RANK and int(found[1]) not in self._others:
                rank = int(found[1])
                self._others[rank] = TableTail(self._run, "events", rank, 0)
        for rank, tail in self._others.items():
            tail.list()
            while not tail.at_end:
                tail.fill(1)
                self._hear(tail.take(tail.rows.num_rows), rank)

    def _hear(self, events: pa.Table, rank: int) -> None:
        for event in events.select(["step", "kind", "severity", "module", "message"]).to_pylist():
            # Of the rank that is followed the findings are made anew from its rows, and ranked.
            if event["severity"] in {"warning", "critical"} and (rank != RANK or event["kind"] not in WORDS):
                self._alerts.append({**event, "rank": rank})

    def _writer(self) -> str:
        try:
            writer = read_writer(writer_file(self._run, RANK))
        except (OSError, ValueError, TypeError):
            return ""
        heard = writer.heartbeat[:19].replace("T", " ")
        return f"process {writer.pid} on {writer.host}, last heard of at {heard} UTC"

    def _weigh(self, *, anew: bool) -> None:
        now = time.monotonic()
        if anew or now - self._size[0] >= _SIZE_SECONDS:
            self._size = (now, sum(part.size for table in SCHEMAS for part in list_parts(self._run, table)))

    def _mirrors(self) -> list[MirrorState]:
        states, damaged = readable_states(self._run)
        if damaged:
            self._trouble = "; ".join(one.reason for one in damaged)
        return states


def _rate(times: Sequence[tuple[int, int, float]]) -> float | None:
    """Steps a second; None where there are too few to tell."""
    if len(times) < 2 or times[-1][2] <= times[0][2]:
        return None
    return (times[-1][1] - times[0][1]) / (times[-1][2] - times[0][2])


def _ordered(names: Mapping[str, object]) -> list[str]:
    """Loss and gradient norm, what the user logged, and what every training has."""

    def place(name: str) -> int:
        if name in _FIRST_CURVES:
            return _FIRST_CURVES.index(name)
        return len(_FIRST_CURVES) + (name in _LAST_CURVES or name.startswith("lr/"))

    return sorted(names, key=place)

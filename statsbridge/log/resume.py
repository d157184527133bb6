"""Going on with a run: which one, whether anybody still writes it, and the next attempt at it."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pyarrow.compute as pc

from ..errors import LogError
from .attempts import FOLDER, Attempt, Superseded, attempt_file, attempt_numbers, read_attempts
from .compaction import remove_covered, remove_unfinished
from .files import make_folder
from .folder import STALE, WriterState, read_writer, write_json
from .lease import maintenance
from .parts import glance, list_parts, live_parts
from .runs import is_writing, read_info, run_state, runs_in
from .schema import SCHEMAS

#: States of a run whose training may go on.
_UNFINISHED = frozenset({"crashed", "failed", "running", "stopped"})
_LOOK_SECONDS = 0.5


def find_unfinished(dir: str | Path, name: str) -> Path | None:
    """The newest run called `name` in the folder `dir` that did not finish (one that is at work too), or None."""
    for run in reversed(runs_in(Path(dir))):
        with suppress(LogError):
            if read_info(run)["name"] == name and run_state(run) in _UNFINISHED:
                return run.absolute()
    return None


def last_step(run: Path, before: int | None = None) -> tuple[int, int] | None:
    """(step, iteration) of the last training step of the record that counts, of those before the label `before`.

    Of the lowest rank; None where there is none. Raises LogError where the files of attempts cannot be read.
    """
    superseded = Superseded(read_attempts(run))
    parts = live_parts(run, "scalars")
    for part in sorted((part for part in parts if part.rank == parts[0].rank), key=lambda part: -part.last):
        rows = glance(part, ["attempt", "step", "iteration"])
        if rows is None:
            continue
        rows = superseded.drop(rows.filter(pc.is_valid(rows["iteration"])))
        if before is not None:
            rows = rows.filter(pc.less(rows["step"], before))
        if rows.num_rows:
            place = pc.index(rows["step"], pc.max(rows["step"])).as_py()
            return rows["step"][place].as_py(), rows["iteration"][place].as_py()
    return None


def first_iteration(run: Path, first_step: int) -> int:
    """What the count of iterations starts at, so that an attempt from `first_step` on samples as the run did before.

    That is the label itself, unless the user gives labels of their own.
    """
    last = last_step(run, before=first_step)
    return first_step if last is None or last[0] == last[1] else last[1] + 1


@contextmanager
def next_attempt(
    run: Path, first_step: int, *, config: Mapping[str, Any] | None, information: Mapping[str, Any]
) -> Iterator[Attempt]:
    """The next attempt at `run`, already on disk. Until the context ends nobody else can take the run.

    By then a `Writer` of that attempt should have rank 0. What a crash has left half done is cleared away before.
    `information["restricted"]` can only tighten what `run.json` says.

    A writer on another host that has fallen silent is waited for, until it beats or counts as dead.

    Raises LogError where a process writes or holds the run, saying who and since when, or where the disk refuses.
    """
    _await_silent_writers(run)
    with maintenance(run):
        try:
            _clear(run)
            number = 1 + max(attempt_numbers(run), default=0)
            started = datetime.now(UTC).isoformat(timespec="microseconds")
            settings = {"config": config or {}, "information": information}
            make_folder(run / FOLDER)
            _tighten(run, information)
            write_json(attempt_file(run, number), {"first_step": first_step, "started": started, **settings})
        except OSError as error:
            raise LogError(f"cannot resume {run}: {error.strerror or error}") from error
        yield Attempt(number, first_step, started, **settings)


def _clear(run: Path) -> None:
    for table in SCHEMAS:
        for rank in sorted({part.rank for part in list_parts(run, table)}):
            remove_unfinished(run, table, rank)
            remove_covered(run, table, rank)


def _tighten(run: Path, information: Mapping[str, Any]) -> None:
    info = read_info(run)
    if information.get("restricted") and not info.get("restricted"):
        write_json(run / "run.json", {**info, "restricted": True})


def _await_silent_writers(run: Path) -> None:
    """Return once it is known whether the writers of `run` live: they beat, or they count as dead.

    A preempted job is started again on another host long before its last sign of life is old.
    """
    first = {writer.rank: writer for writer in _writing(run)}
    until = monotonic() + 2 * STALE
    while monotonic() < until:
        now = _writing(run)
        here = any(writer.host == socket.gethostname() for writer in now)
        if not now or here or any(writer != first.get(writer.rank) for writer in now):
            return
        sleep(_LOOK_SECONDS)


def _writing(run: Path) -> list[WriterState]:
    found = []
    for file in (run / "writers").glob("rank=*.json"):
        with suppress(OSError, ValueError, TypeError):
            writer = read_writer(file)
            if is_writing(writer):
                found.append(writer)
    return found

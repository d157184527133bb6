"""The runs of a folder: what `statsbridge ls` shows of each, and how a name becomes one of them."""

import difflib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import LogError
from .attempts import EVERYTHING, Superseded, read_attempts
from .folder import STALE, WriterState, read_writer
from .parts import Part, distinct_steps, live_parts, refuse_newer
from .schema import SCHEMAS

_SHOWN = 5  # choices in a message that must stay readable
_IMPORTED = datetime.now(UTC)  # before any writer of this process


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run in a list of runs.

    `state`: running, finished, failed, stopped, crashed, or created (nothing has written it yet); of several ranks
    the one that needs attention most. `steps` and `sampled_steps`: different steps in `scalars` and in
    `stats` of the lowest rank, without those that a later attempt has superseded. `rows`: table → rows of all ranks
    and attempts. `bytes`: size of all parts. `attempts`: how often it was begun or resumed.
    """

    id: str
    name: str
    path: Path
    created: datetime
    state: str
    steps: int
    sampled_steps: int
    rows: Mapping[str, int]
    bytes: int
    attempts: int = 1


def list_runs(dir: str | Path = "statsbridge-runs") -> list[RunSummary]:
    """The runs in the folder `dir`, oldest first; none if there is no such folder.

    Runs that cannot be read, or were written by a newer version, are left out. Steps in damaged parts do not count.
    """
    return summaries_in(Path(dir))[0]


def summaries_in(dir: Path) -> tuple[list[RunSummary], list[LogError]]:
    """The runs in the folder `dir`, oldest first, and of each one that cannot be read what is wrong with it."""
    summaries, problems = [], []
    for run in runs_in(dir):
        try:
            summaries.append(_summary(run, read_info(run)))
        except LogError as error:
            problems.append(error)
        except OSError as error:  # one folder that the disk or its rights withhold must not hide all others
            problems.append(LogError(f"{run} cannot be read: {error}"))
    return summaries, problems


def resolve_run(text: str | Path, dir: str | Path = "statsbridge-runs") -> Path:
    """The folder of the run that `text` means.

    `text` is its path; or, inside `dir`, its id, a unique beginning of the id, its name, or "latest".

    Raises LogError with the choices where that is none or several.
    """
    path = Path(text)
    if (path / "run.json").is_file():
        return path.absolute()
    runs = runs_in(Path(dir))
    if isinstance(text, str) and runs:
        if text == "latest":
            return runs[-1].absolute()
        exact = [run for run in runs if run.name == text]
        named = [run for run in runs if _name(run) == text]
        beginning = [run for run in runs if text and run.name.startswith(text)]
        found = exact or named or beginning
        if len(found) == 1:
            return found[0].absolute()
        if found:
            raise LogError(f"{text!r} fits {len(found)} runs, give one id: {_choices(found)}")
    if inside := runs_in(path):
        raise LogError(f"{os.fspath(text)!r} holds runs, give the path of one: {_choices(inside)}")
    if not runs:
        raise LogError(f"no run {os.fspath(text)!r}: it is no run's folder, and there are no runs in {str(dir)!r}")
    close = difflib.get_close_matches(os.fspath(text), [name for run in runs if (name := _name(run))], n=1, cutoff=0.6)
    there = f"did you mean {close[0]!r}? There are" if close else "there are"
    raise LogError(f"no run {os.fspath(text)!r} in {str(dir)!r}; {there}: {_choices(runs)}")


def read_info(run: Path) -> dict[str, Any]:
    """What `run.json` says. Raises LogError where it cannot be read, SchemaTooNew for a run of the future."""
    try:
        info = json.loads((run / "run.json").read_bytes())
        version = int(info["schema_version"])
        datetime.fromisoformat(info["created"])
        missing = {"id", "name"}.difference(info)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise LogError(f"{run / 'run.json'} cannot be read: {error}") from error
    if missing:
        raise LogError(f"{run / 'run.json'} lacks {', '.join(sorted(missing))}")
    refuse_newer(version, f"run {run.name}")
    return dict(info)


def run_state(run: Path) -> str:
    """The state of a run as `RunSummary` words it: of its last attempt, which may have fewer ranks than others."""
    writers = [_writer(file) for file in (run / "writers").glob("rank=*.json")]
    last = max((writer.attempt for writer in writers if writer is not None), default=0)
    states = {_state(writer) for writer in writers if writer is None or writer.attempt == last}
    return next(
        (state for state in ("crashed", "running", "failed", "stopped", "finished") if state in states), "created"
    )


def _writer(file: Path) -> WriterState | None:
    try:
        return read_writer(file)
    except (OSError, ValueError, TypeError):
        return None


def _state(writer: WriterState | None) -> str:
    with suppress(ValueError, TypeError):
        if writer is not None:
            return "crashed" if writer.state == "running" and not is_writing(writer) else writer.state
    return "crashed"


def is_writing(writer: WriterState) -> bool:
    """Whether a writer is at work, as far as one can tell. Raises ValueError or TypeError where its times are none."""
    if writer.state != "running" or is_stale(writer.host, writer.pid, writer.heartbeat):
        return False
    # In a container that is started again everything has the number it had before.
    ours = writer.pid == os.getpid() and writer.host == socket.gethostname()
    return not (ours and datetime.fromisoformat(writer.started) < _IMPORTED)


def is_stale(host: str, pid: int, heartbeat: str) -> bool:
    """Whether a process that said it lives is dead: silent for `STALE` seconds, or gone from this host.

    `heartbeat`: ISO 8601, UTC. Raises ValueError or TypeError where it is no time.
    """
    silent = (datetime.now(UTC) - datetime.fromisoformat(heartbeat)).total_seconds()
    return silent > STALE or _is_gone(host, pid)


def _is_gone(host: str, pid: int) -> bool:
    if os.name == "nt" or host != socket.gethostname():  # on Windows signal 0 would end the process
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def runs_in(dir: Path) -> list[Path]:
    """The folders of the runs in `dir`, oldest first."""
    try:
        names = sorted(os.listdir(dir))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return [dir / name for name in names if _is_run(dir / name)]


def _is_run(folder: Path) -> bool:
    try:
        (folder / "run.json").stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # without rights: somebody else's, or lost+found
        return False
    except OSError:  # it is there, and whoever reads it says what is wrong
        return True
    return True


def _choices(runs: Sequence[Path]) -> str:
    newest = [f"{run.name} ({_name(run) or 'unreadable'})" for run in list(reversed(runs))[:_SHOWN]]
    more = f" and {len(runs) - _SHOWN} older" if len(runs) > _SHOWN else ""
    return ", ".join(newest) + more


def _name(run: Path) -> str | None:
    try:
        return str(read_info(run)["name"])
    except LogError:
        return None


def _summary(run: Path, info: Mapping[str, Any]) -> RunSummary:
    parts = {table: live_parts(run, table) for table in SCHEMAS}
    superseded = EVERYTHING
    with suppress(LogError):  # `check` and `load` say so; a list shows what it can
        superseded = Superseded(read_attempts(run))
    return RunSummary(
        id=run.name,
        name=str(info["name"]),
        path=run.absolute(),
        created=datetime.fromisoformat(info["created"]),
        state=run_state(run),
        steps=distinct_steps(_of_lowest_rank(parts["scalars"]), superseded),
        sampled_steps=distinct_steps(_of_lowest_rank(parts["stats"]), superseded),
        rows={table: sum(part.rows for part in found) for table, found in parts.items()},
        bytes=sum(part.size for found in parts.values() for part in found),
        attempts=1 + len(superseded.attempts),
    )


def _of_lowest_rank(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.rank == parts[0].rank]

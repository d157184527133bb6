"""The folder of a run: its identity (`run.json`) and who is writing it (`writers/rank=N.json`)."""

import json
import math
import os
import platform
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .. import __version__
from ..errors import ConfigError
from .files import make_folder, sync_folder, write_durably
from .schema import SCHEMA_VERSION

# A writer beats at least every HEARTBEAT seconds; one that has not for STALE seconds is dead. The difference
# leaves room for clocks of two hosts that disagree and for a disk that hangs for a while.
HEARTBEAT = 10.0
STALE = 120.0

_DEEPEST = 20  # nesting of a user's config; below it, and in a config that contains itself, repr


@dataclass(frozen=True, slots=True)
class WriterState:
    """Who writes one rank of a run, and how that ended.

    `state` on disk: `running`; `finished` (closed by `finish()`); `stopped` (the process ended in order
    without it: exit, uncaught exception, SIGTERM). Readers derive `crashed` from a `running` that is gone.
    """

    rank: int
    attempt: int
    host: str
    pid: int
    started: str  # ISO 8601, UTC
    heartbeat: str
    state: str


def create_run(
    dir: str | Path, *, name: str | None, config: Mapping[str, Any] | None, information: Mapping[str, Any]
) -> Path:
    """Make `<dir>/<run-id>/run.json` and return the folder.

    `run.json` holds id, name (the id where None), created, config (values that are not JSON by `repr`),
    versions (this package, Python, numpy, pyarrow, and `information["versions"]`), schema_version, restricted
    (False unless in `information`) and the rest of `information`.

    Raises ConfigError where `dir` cannot be made or written.
    """
    moment = datetime.now(UTC)
    run_id = new_run_id(moment)
    run = Path(dir).absolute() / run_id
    versions = {
        "statsbridge": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyarrow": pa.__version__,
        **information.get("versions", {}),
    }
    own = {
        "id": run_id,
        "name": name or run_id,
        "created": moment.isoformat(timespec="microseconds"),
        "config": config or {},
        "versions": versions,
        "schema_version": SCHEMA_VERSION,
    }
    identity = {**own, "restricted": False, **information, **own}
    try:
        make_folder(run.parent)
        run.mkdir()
        sync_folder(run.parent)
        write_json(run / "run.json", identity)
    except OSError as error:
        raise ConfigError(
            f"cannot write a run into {str(run.parent)!r}: {error.strerror or error}. "
            "Give dir=… a folder that you may write"
        ) from error
    return run


def new_run_id(moment: datetime) -> str:
    """An id that sorts by time, to the microsecond, and that no other process will hit upon."""
    return f"{moment:%Y%m%d-%H%M%S-%f}-{secrets.token_hex(4)}"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as JSON, durably. Raises OSError."""
    text = json.dumps(_as_json(value), indent=2, ensure_ascii=False) + "\n"
    write_durably(path, text.encode(errors="backslashreplace"))  # a lone surrogate becomes its JSON escape


def _as_json(value: object, depth: int = 0) -> object:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth < _DEEPEST:
        if isinstance(value, Mapping):
            return {str(key): _as_json(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [_as_json(item, depth + 1) for item in value]
    try:
        return repr(value)
    except Exception:  # a user's object: whatever its repr raises must not end init()
        return f"<{type(value).__name__}>"


def this_writer(rank: int, attempt: int) -> WriterState:
    """The state of a writer that starts now in this process."""
    now = _now()
    return WriterState(rank, attempt, socket.gethostname(), os.getpid(), now, now, "running")


def write_state(run: Path, writer: WriterState, state: str) -> None:
    """Write `writer` into the run folder, with `state` and a heartbeat of now. Raises OSError."""
    write_json(writer_file(run, writer.rank), {**asdict(writer), "heartbeat": _now(), "state": state})


def read_writer(file: Path) -> WriterState:
    """The writer that `file` is about. Raises OSError, ValueError and TypeError where it cannot be read."""
    return WriterState(**json.loads(file.read_bytes()))


def last_attempt(file: Path) -> int | None:
    """Which attempt at a run the last writer in `file` was; 0 where it cannot be read, None where there was none."""
    try:
        return read_writer(file).attempt
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError):
        return 0


def writer_file(run: Path, rank: int) -> Path:
    """The file that says who writes `rank`."""
    return run / "writers" / f"rank={rank}.json"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")

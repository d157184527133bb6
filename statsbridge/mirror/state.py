"""What is kept of a mirror: `mirrors/<backend>-<hash of address>.json`, with the cursor and who serves it."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..errors import ConfigError, LogError, MirrorError, StatsBridgeError
from ..log.files import make_folder
from ..log.folder import STALE, write_json
from ..log.runs import is_stale
from .contract import Destination
from .destinations import without_secrets
from .selection import Selection
from .tail import Cursor

FOLDER = "mirrors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_CLAIM_SECONDS = 5.0
_ours: set[str] = set()  # tokens of this process


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that serves a mirror. `token` tells two of them apart that have one pid."""

    host: str
    pid: int
    token: str
    heartbeat: str  # ISO 8601, UTC

    @classmethod
    def this_process(cls) -> Owner:
        """An owner that begins now, in this process."""
        owner = cls(socket.gethostname(), os.getpid(), secrets.token_hex(8), _now())
        _ours.add(owner.token)
        return owner

    @property
    def alive(self) -> bool:
        """Whether it still serves the mirror, judged as the writer of a run is."""
        if (self.host, self.pid) == (socket.gethostname(), os.getpid()) and self.token not in _ours:
            return False  # in a container that is started again everything has the number it had before
        try:
            return not is_stale(self.host, self.pid, self.heartbeat)
        except (TypeError, ValueError):
            return False


@dataclass(frozen=True, slots=True)
class Counts:
    """What has been delivered, and what never will be.

    `rejected`: points and histograms in the dead letters. `lost`: rows of the record that could not be read.
    """

    points: int = 0
    histograms: int = 0
    alerts: int = 0
    figures: int = 0
    artifacts: int = 0
    rejected: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorState:
    """A mirror as it is on disk.

    `destination`: as `open` gets it, but its address without secrets. `memory`: the adapter's, as of the
    cursor. `status`: `running`; `finished` (all was delivered and the tracker's run ended); `remaining` (some
    rows are still to be delivered); `stopped` (it could not go on by itself). `reason`: why it is not finished.
    `late`: what happened once the record was closed, which could take no event any more: the last ones, each with
    `time` (ISO 8601, UTC), `kind` and `message`.
    """

    backend: str
    options: Mapping[str, Any]
    destination: Destination
    selection: Selection
    cursor: Cursor = field(default_factory=Cursor)
    memory: Mapping[str, str] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    owner: Owner | None = None
    status: str = "remaining"
    reason: str | None = None
    late: tuple[Mapping[str, str], ...] = ()

    @property
    def name(self) -> str:
        """What its file and its folder of dead letters are called."""
        return mirror_name(self.destination)

    def save(self, run: Path) -> None:
        """Write it durably, with a heartbeat of now where it has an owner. Raises OSError."""
        owner = None if self.owner is None else replace(self.owner, heartbeat=_now())
        write_json(
            state_file(run, self.name),
            {**asdict(replace(self, owner=owner)), "selection": self.selection.to_json()},
        )


def mirror_name(destination: Destination) -> str:
    """The name of the mirror that sends to `destination`; one a backend and address."""
    if not _NAME.fullmatch(destination.backend):
        raise ConfigError(f"{destination.backend!r} cannot name a backend: use letters, digits, '_', '.' and '-'")
    address = without_secrets(destination.address)
    # A path may hold bytes that are no UTF-8, as lone surrogates.
    return f"{destination.backend}-{blake2b(address.encode(errors='surrogatepass'), digest_size=6).hexdigest()}"


def state_file(run: Path, name: str) -> Path:
    """The file of the mirror `name`."""
    return run / FOLDER / f"{name}.json"


@dataclass(frozen=True, slots=True)
class Damaged:
    """A file that should hold a mirror and does not. `backend`: as its name says. `reason`: with what to do."""

    name: str
    backend: str
    reason: str


def load_states(run: Path) -> list[MirrorState]:
    """All mirrors of a run, by name. Raises LogError where one's file cannot be read."""
    states, damaged = readable_states(run)
    if damaged:
        raise LogError(damaged[0].reason)
    return states


def readable_states(run: Path) -> tuple[list[MirrorState], list[Damaged]]:
    """The mirrors of a run that can be read, by name, and the files that can not: these bar no other mirror."""
    states: list[MirrorState] = []
    damaged: list[Damaged] = []
    for file in sorted((run / FOLDER).glob("*.json")):
        try:
            state = load_state(file)
            if state.name != file.stem and state_file(run, state.name).exists():
                raise LogError(f"{file} is a copy of the mirror {state.name}: move it away")
        except StatsBridgeError as error:
            damaged.append(Damaged(file.stem, file.stem.rpartition("-")[0] or file.stem, str(error)))
        else:
            states.append(state)
    return states, damaged


def load_state(file: Path) -> MirrorState:
    """The mirror in `file`. Raises LogError, which says what to do, where it cannot be read."""
    try:
        raw = json.loads(file.read_bytes())
        made: dict[str, Any] = {
            "destination": Destination(**raw.pop("destination")),
            "selection": Selection.from_json(raw.pop("selection")),
            "cursor": Cursor(**raw.pop("cursor")),
            "counts": Counts(**raw.pop("counts")),
            "late": tuple(raw.pop("late", ())),
            "owner": None if (owner := raw.pop("owner")) is None else Owner(**owner),
        }
        if not all(isinstance(number, int) for part in ("cursor", "counts") for number in asdict(made[part]).values()):
            raise ValueError("its numbers are none")
        state = MirrorState(**raw, **made)
        if not state.name or not isinstance(state.options, Mapping) or not isinstance(state.memory, Mapping):
            raise ValueError("its options or its memory are none")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        raise LogError(
            f"{file} cannot be read: {error!r}. Put it back from a copy, or move it away; how far the mirror had got "
            "is unknown then, and statsbridge sync RUN --to BACKEND[:TARGET] delivers the record from its beginning"
        ) from error
    return state


def claim(run: Path, name: str, make: Callable[[], MirrorState]) -> MirrorState:
    """Become the owner of the mirror `name`, made by `make` where there is none yet.

    Raises MirrorError that says who serves it, where somebody does; LogError and OSError as for its file.
    """
    make_folder(run / FOLDER)
    file = state_file(run, name)
    with _alone(file.with_suffix(".claim")):
        state = load_state(file) if file.exists() else make()
        if state.owner is not None and state.owner.alive:
            raise MirrorError(
                f"mirror {name} is served by process {state.owner.pid} on {state.owner.host}, which delivers what "
                "remains; take it up again when that has ended"
            )
        state = replace(state, owner=Owner.this_process(), status="running", reason=None)
        state.save(run)
    return state


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Hold `file`, which only one process at a time can create, on network disks too."""
    deadline = time.monotonic() + _CLAIM_SECONDS
    while True:
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            with suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime > STALE:  # whoever made it died in between
                    file.unlink()
        if time.monotonic() > deadline:
            raise MirrorError(f"another process is taking up the mirror {file.stem}; try again")
        time.sleep(0.02)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")

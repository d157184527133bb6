"""What others ask of a run that is being recorded: one small file in its folder, which its writer looks at."""

import getpass
import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..wording import counted
from .folder import WriterState, read_writer, write_json
from .runs import is_writing
from .schema import SITES

FILE = "control.json"

# A file that somebody made by hand may be anything.
_LONGEST = 64 << 10


@dataclass(frozen=True, slots=True)
class Wish:
    """How a run is to be sampled from now on.

    `every`: each n-th step. `sites`: names of the sites, instead of those it has. `stop`: no step. `steps`: for so
    many training steps, then as before; None for good. What is None stays as it is. `asked_by`: who wants it.

    Raises ConfigError, saying what is right, where it asks for nothing or for what there is not.
    """

    every: int | None = None
    steps: int | None = None
    sites: tuple[str, ...] | None = None
    stop: bool = False
    asked_by: str = ""

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("for", self.steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}: {value!r} is no number of steps: give a whole number of at least 1")
        if self.sites is not None and (not self.sites or not all(site in SITES for site in self.sites)):
            wrong = next((site for site in self.sites if site not in SITES), "")
            raise ConfigError(f"sites: {wrong!r} is none of {', '.join(SITES)}")
        if self.stop and (self.every is not None or self.sites is not None):
            raise ConfigError("stop: nothing is sampled then, so give neither every nor sites with it")
        if not self.stop and self.every is None and self.sites is None:
            said = "" if self.steps is None else f"for {counted(self.steps, 'step')}, but what? "
            raise ConfigError(f"{said}give every (sample each n-th step), sites, or stop")

    def __str__(self) -> str:
        parts = ["no step is sampled"] if self.stop else []
        if self.every is not None:
            parts.append("every step is sampled" if self.every == 1 else f"every {self.every} steps one is sampled")
        if self.sites is not None:
            parts.append(f"sites: {', '.join(self.sites)}")
        return "; ".join(parts) + ("" if self.steps is None else f"; for {counted(self.steps, 'step')}, then as before")


def find_sites(patterns: str) -> tuple[str, ...]:
    """The sites that `patterns` mean: names or globs with commas between. Raises ConfigError for one without any."""
    chosen: list[str] = []
    for pattern in (text.strip() for text in patterns.split(",")):
        found = [site for site in SITES if fnmatchcase(site, pattern)]
        if not found:
            raise ConfigError(f"sites: {pattern!r} matches none of {', '.join(SITES)}")
        chosen += [site for site in found if site not in chosen]
    return tuple(chosen)


def ask(run: Path, wish: Wish) -> None:
    """Leave a wish for the process that records the run at `run`, in place of an earlier one. Raises OSError."""
    write_json(run / FILE, {**asdict(wish), "asked": datetime.now(UTC).isoformat(timespec="microseconds")})


def live_writers(run: Path) -> list[WriterState]:
    """Who is recording the run at `run` now, as far as one can tell: one process for each rank."""
    found = []
    for file in sorted((run / "writers").glob("rank=*.json")):
        with suppress(OSError, ValueError, TypeError):
            writer = read_writer(file)
            if is_writing(writer):
                found.append(writer)
    return found


def whoami() -> str:
    """User and host, as others are told who asked."""
    user = "somebody"
    with suppress(Exception):  # a container may have no name for its user
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


class Control:
    """Looks whether there is a new wish. What was there before belongs to an earlier process of the run."""

    def __init__(self, run: Path) -> None:
        self._file = run / FILE
        self._seen = self._signature()

    def look(self) -> Wish | None:
        """A wish that was not there at the last look. Raises ConfigError for one that cannot be understood."""
        now = self._signature()
        if now == self._seen or now is None:
            return None
        self._seen = now
        try:
            if now[0] > _LONGEST:
                raise ValueError("it is too long")
            return _from_json(json.loads(self._file.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{FILE} in the run's folder cannot be understood: {error}") from error

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._file)
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns, status.st_ino


def _from_json(value: object) -> Wish:
    if not isinstance(value, Mapping):
        raise ValueError("it is no JSON object")
    given: dict[str, Any] = {field.name: value[field.name] for field in fields(Wish) if field.name in value}
    if given.get("sites") is not None:
        given["sites"] = tuple(str(site) for site in given["sites"])
    if not isinstance(given.get("stop", False), bool):
        raise ValueError(f"stop is {given['stop']!r}, neither true nor false")
    return Wish(**{**given, "asked_by": str(given.get("asked_by", ""))})

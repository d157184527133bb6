"""Who may change the parts of a run besides its writer: one process at a time, and only while nobody writes."""

import json
import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from ..errors import LogError
from .files import create, make_folder, remove, write_durably
from .folder import HEARTBEAT, STALE, read_writer, write_json
from .runs import is_stale, is_writing

_FILE = "maintenance.json"


@contextmanager
def maintenance(run: Path) -> Iterator[Callable[[], bool]]:
    """Hold the run. Gives a function to call between pieces of work: False once the hold is lost.

    Raises LogError where a live process writes the run or holds it, saying who and since when.
    """
    file = run / "writers" / _FILE
    token = secrets.token_hex(8)
    try:
        make_folder(file.parent)
        _take(file, token)
    except OSError as error:
        raise LogError(f"cannot write {file}: {error.strerror or error}") from error
    beat_at = datetime.now(UTC)

    def holds() -> bool:
        nonlocal beat_at
        ours = _token(file) == token
        if ours and (datetime.now(UTC) - beat_at).total_seconds() >= HEARTBEAT:
            beat_at = datetime.now(UTC)
            try:
                write_json(file, _hold(token))
            except OSError:
                return False
        return ours

    try:
        # Not before: of two that come at once, a writer and we, one must see the other.
        for writer in sorted((run / "writers").glob("rank=*.json")):
            _refuse_live_writer(writer)
        yield holds
    finally:
        if _token(file) == token:
            with suppress(OSError):
                remove(file)


def refuse_maintenance(run: Path) -> None:
    """Raise LogError where a live process holds the run for maintenance."""
    file = run / "writers" / _FILE
    with suppress(FileNotFoundError):
        if not _is_left_over(file, file.read_bytes()):
            raise LogError(f"{_held(file)}: wait until that has ended")


def _take(file: Path, token: str) -> None:
    busy = f"run {file.parent.parent.name} has just been taken by another process: wait until that has ended"
    refuse_maintenance(file.parent.parent)
    hold = json.dumps(_hold(token)).encode()
    try:
        left = file.read_bytes()
    except FileNotFoundError:
        with _exclusive(busy):
            create(file, hold)
        return
    # Of those that find what a dead process has left, one at a time looks whether it is still that, and replaces it.
    claim = file.with_name(f".{file.name}.{zlib.crc32(left):08x}.tmp")
    with suppress(FileNotFoundError):
        if time.time() - claim.stat().st_mtime > STALE:
            remove(claim)
    with _exclusive(busy):
        create(claim, b"")
    try:
        if not _is_left_over(file, left) or file.read_bytes() != left:
            raise LogError(busy)
        write_durably(file, hold)
    finally:
        remove(claim)


@contextmanager
def _exclusive(busy: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise LogError(busy) from None


def _is_left_over(file: Path, content: bytes) -> bool:
    """Whether the process that wrote `content` is dead. What cannot be read is being made, unless it is old."""
    try:
        hold = json.loads(content)
    except ValueError:
        return time.time() - file.stat().st_mtime > STALE
    try:
        return is_stale(hold["host"], hold["pid"], hold["heartbeat"])
    except (ValueError, KeyError, TypeError):
        return True


def _token(file: Path) -> object:
    try:
        return json.loads(file.read_bytes()).get("token")
    except (OSError, ValueError, AttributeError):
        return None


def _hold(token: str) -> dict[str, object]:
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "heartbeat": now, "token": token}


def _refuse_live_writer(file: Path) -> None:
    try:
        writer = read_writer(file)
        alive = is_writing(writer)
    except (OSError, ValueError, TypeError):
        return
    if alive:
        here = writer.pid == os.getpid() and writer.host == socket.gethostname()
        what = "that is this process, whose run.finish() ends it" if here else "come back when that has ended"
        raise LogError(
            f"run {file.parent.parent.name} is being written by process {writer.pid} on {writer.host} since "
            f"{writer.started}, last heard of at {writer.heartbeat}: {what}. A process that is gone counts as dead at "
            f"the latest {STALE:.0f} s after that"
        )


def _held(file: Path) -> str:
    try:
        hold = json.loads(file.read_bytes())
        who = f"process {hold['pid']} on {hold['host']}, last heard of at {hold['heartbeat']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return f"run {file.parent.parent.name} is being compacted, repaired or resumed by {who}"

"""Checks that need a process of their own: kill -9, what is imported, what a restricted run gives away."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from statsbridge.mirror.contract import Adapter, Destination, Point, RunInfo

from .made import made_batches, made_run
from .session import Session, compare, expected, read

TRACKERS = ("aim", "mlflow", "tensorboard", "tensorflow", "torch", "wandb")
MARK = "memory: "
"""Begins the lines that a sending process tells its memory by: a tracker may print others."""
SERIES = 40
"""Curves of the batches that a killed process sends: enough for the kill to fall within one."""
BEYOND = 2
"""Batches that it may send after the last acknowledgement that is read."""


def check_destination(make: Callable[[], Adapter], *, trackers: Iterable[str] = TRACKERS) -> None:
    """Making the adapter, `destination` and `options` import no tracker, open no socket and write no file."""
    answer = _ask(make(), "destination", trackers=list(trackers))
    assert not answer["imported"], f"before `open` these are imported: {answer['imported']}"
    assert not answer["done"], f"before `open` the adapter does: {answer['done']}"


def check_crash(make: Callable[[], Adapter], folder: Path, *, kills: int = 2) -> None:
    """After kill -9 all that was acknowledged is in the store; opened again with its memory, the rest follows, once.

    Every second time the memory is older than the last batches that were acknowledged, as it is where a process is
    killed before it has saved the mirror's cursor: those batches come again.
    """
    run, adapter = made_run(folder), make()
    destination = adapter.destination()
    memory: dict[str, str] = {}
    done = 0
    for kill in range(kills):
        end = done + 3 - kill % 3
        memory = _send_and_kill(adapter, run, destination, memory, first=done, end=end, beyond=BEYOND * (kill % 2))
        done = end
        _contains(make, run, destination, memory, _points(done))
    total = done + 2 * BEYOND
    session = Session(make(), run, destination=destination, memory=memory)
    for batch in made_batches(total, series=SERIES)[done:]:
        session.send(batch)
    session.close()
    compare(read(make(), run, destination, memory), expected(adapter, _points(total)))


def check_restricted(
    make: Callable[[], Adapter], folder: Path, store: Path, *, more: Iterable[str] = (), channels: bool = True
) -> None:
    """A restricted run leaves no trace in `store` of the host, user, working folder, command line or printed text.

    All files below `store` are read as bytes, their names too: it must hold nothing compressed. `more`: texts
    that may not be there either. `channels`: send an event and a histogram too.
    """
    run = made_run(folder, restricted=True)
    marks = {what: f"{what}-{secrets.token_hex(6)}" for what in ("host", "user", "folder", "argument", "printed")}
    work = Path(folder) / marks["folder"]
    work.mkdir()
    _ask(make(), "restricted", cwd=work, run=_run_to_json(run), marks=marks, channels=channels)
    forbidden = {*marks.values(), *more}
    forbidden |= {text for text in (socket.gethostname(), getpass.getuser()) if len(text) > 6}
    files = [path for path in Path(store).rglob("*") if path.is_file()]
    assert files, f"there is nothing in {store}"
    for path in files:
        content = str(path.relative_to(store)).encode() + b"\n" + path.read_bytes()
        found = sorted(text for text in forbidden if text.encode() in content)
        assert not found, f"{path} holds {found}"


def _points(batches: int) -> list[Point]:
    return [point for batch in made_batches(batches, series=SERIES) for point in batch.points]


def _contains(
    make: Callable[[], Adapter], run: RunInfo, destination: Destination, memory: Mapping[str, str], points: list[Point]
) -> None:
    """Raise AssertionError unless all `points` are in the store that a killed process left."""
    there = {(reading.key, reading.step, reading.value) for reading in read(make(), run, destination, memory)}
    wanted = {(reading.key, reading.step, reading.value) for reading in expected(make(), points)}
    lost = sorted(wanted - there)
    assert not lost, f"{len(lost)} of {len(wanted)} acknowledged values are lost by kill -9, such as {lost[:3]}"


def _send_and_kill(
    adapter: Adapter,
    run: RunInfo,
    destination: Destination,
    memory: dict[str, str],
    *,
    first: int,
    end: int,
    beyond: int,
) -> dict[str, str]:
    """Kill a process that sends, once batches `first` to `end` and `beyond` more are acknowledged.

    Returns the memory as it was after batch `end`.
    """
    request: dict[str, Any] = {"run": _run_to_json(run), "destination": asdict(destination), "memory": memory}
    with _child(adapter, "send", **request, first=first, end=end + BEYOND, series=SERIES) as child:
        # One is told after `open`, one after each batch.
        told = [_next_memory(child) for _ in range(1 + end - first + beyond)]
        child.kill()
    return told[end - first]


def _next_memory(child: subprocess.Popen[str]) -> dict[str, str]:
    for line in child.stdout or ():
        if line.startswith(MARK):
            memory: dict[str, str] = json.loads(line.removeprefix(MARK))
            return memory
    raise AssertionError(f"the sending process ended by itself:\n{child.communicate()[1]}")


def _ask(adapter: Adapter, task: str, *, cwd: Path | None = None, **request: Any) -> dict[str, Any]:
    with _child(adapter, task, cwd=cwd, **request) as child:
        output, errors = child.communicate()
        assert child.returncode == 0, f"{task} failed in a process of its own:\n{errors}"
        answer: dict[str, Any] = json.loads(output.splitlines()[-1])
        return answer


@contextmanager
def _child(adapter: Adapter, task: str, *, cwd: Path | None = None, **request: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that makes the same adapter from its class and options, as `statsbridge sync` would."""
    kind = type(adapter)
    request |= {"task": task, "module": kind.__module__, "name": kind.__qualname__, "options": adapter.options()}
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    environment = dict(os.environ, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
    if cwd is not None:
        environment |= dict.fromkeys(("USER", "LOGNAME", "LNAME", "USERNAME"), request["marks"]["user"])
    command = [sys.executable, "-m", "statsbridge.testing.child", json.dumps(request)]
    child = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def _run_to_json(run: RunInfo) -> dict[str, Any]:
    return {**asdict(run), "path": str(run.path), "created": run.created.isoformat()}

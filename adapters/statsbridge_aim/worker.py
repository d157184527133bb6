"""The process in which Aim's client runs: it can block for ever, and here it can be killed.

It is spoken to through a pair of sockets. A request is a tuple of a verb and its arguments, an answer a tuple that
begins with `ok`, `rows` (more follow), `retry`, `policy` or `error`. The process ends when the other end closes or its
parent is gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .repository import Busy, open_repository, read_values

LAST_WORDS = 5.0
"""Seconds for ending the run in Aim once the parent is gone."""


_UNFIT = (ValueError, TypeError, OverflowError)


class Refused(Exception):  # noqa: N818
    """Aim would tell where a restricted run ran, and cannot be kept from it."""


class Tracking:
    """One run of Aim, open for writing. Each method returns when what it stored is safe from a kill."""

    def __init__(
        self,
        address: str,
        hash: str | None,
        restricted: bool,
        experiment: str | None,
        name: str,
        attributes: Mapping[str, Any],
        artifacts: str | None,
        *,
        host_hidden: bool,
    ) -> None:
        if restricted and "://" not in address and not host_hidden:  # a server's files are the server's
            raise Refused(
                "Aim's storage (RocksDB) writes this machine's host name into its files, and this system does not "
                "let a process have another (a Linux UTS namespace)"
            )
        if restricted:  # else the lock of an open run holds the address of the network card
            import_module("aim.sdk.lock_manager").LockManager.machine_id = 0
        repository = open_repository(address, create=True)
        self._remote = bool(repository.is_remote_repo)
        self._run = import_module("aim").Run(
            hash,
            repo=repository,
            experiment=experiment,
            # A server keeps the lock of a client that was killed for five minutes. Only our own parent takes up
            # this run again, and it has one of us at a time.
            force_resume=hash is not None and self._remote,
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )
        if name:
            self._run.name = name
        for attribute, value in attributes.items():
            self._run[attribute] = value
        if artifacts is not None:
            self._run.set_artifacts_uri(artifacts)
        self._labels: dict[int, tuple[str, dict[str, Any]]] = {}
        self._wait()

    def hash(self) -> str:
        """What Aim finds the run by."""
        return str(self._run.hash)

    def track(
        self, labels: Mapping[int, tuple[str, dict[str, Any]]], points: Sequence[tuple[int, int, float]]
    ) -> list[tuple[int, str]]:
        """Store points (number of the label, step, value). Returns the places of those that Aim refuses, and why."""
        self._labels.update(labels)
        refused = []
        for start, step, context, values in self._blocks(points):
            try:
                self._run.track(values, step=step, context=context)
            except _UNFIT:
                for place, (name, value) in enumerate(values.items(), start):
                    try:
                        self._run.track(value, name=name, step=step, context=context)
                    except _UNFIT as error:
                        refused.append((place, str(error)))
        self._wait()
        return refused

    def _blocks(
        self, points: Sequence[tuple[int, int, float]]
    ) -> Iterator[tuple[int, int, dict[str, Any], dict[str, float]]]:
        """Neighbours that share step and context, which Aim stores faster together: (first place, …, name → value)."""
        start, shared = 0, None
        values: dict[str, float] = {}
        for place, (number, step, value) in enumerate(points):
            name, context = self._labels[number]
            if shared is not None and (shared != (step, context) or name in values):
                yield start, *shared, values
                start, values = place, {}
            shared = (step, context)
            values[name] = value
        if shared is not None:
            yield start, *shared, values

    def distribution(
        self, name: str, context: dict[str, Any], step: int, counts: Any, limits: tuple[float, float]
    ) -> None:
        """Store a histogram of even bins."""
        histogram = import_module("aim").Distribution(hist=counts, bin_range=limits)
        self._run.track(histogram, name=name, step=step, context=context)
        self._wait()

    def message(self, text: str, level: int, timestamp: float, place: int, fields: Mapping[str, Any]) -> None:
        """Store a message of the run, at a place of its own so that it never comes twice."""
        # Run.log_warning would add the path of this file, and wake whatever sends Aim's notifications.
        record = import_module("aim.sdk.logging").LogRecord
        message = record(text, level, timestamp=timestamp, logger_info=("statsbridge", 0), **fields)
        self._run.track(message, name="__log_records", step=place)
        self._wait()

    def figure(self, name: str, figure: Any, step: int) -> None:
        """Store a Plotly figure."""
        shown = import_module("aim").Figure(figure)
        self._run.track(shown, name=name, step=step, context={"kind": "figure"})
        self._wait()

    def artifact(self, folder: str) -> None:
        """Copy a folder. Files that vanish meanwhile have been merged into others."""
        make = import_module("aim.sdk.objects.artifact").Artifact
        base = Path(folder)
        for path in sorted(base.rglob("*")):
            if not path.is_file():
                continue
            artifact = make(str(path), uri=self._run.artifacts_uri, name=f"{base.name}/{path.relative_to(base)}")
            try:
                artifact.upload(block=True)
            except FileNotFoundError:
                if path.exists():
                    raise
                continue
            # Run.log_artifact would keep the path that the file was copied from.
            artifact.storage["path"] = artifact.name
            self._run.meta_run_tree.subtree("artifacts")[artifact.name] = artifact
        self._wait()

    def close(self, status: str) -> None:
        """End the run, and make a local one visible to queries."""
        self._run["statsbridge", "status"] = status
        repository, ended = self._run.repo, self._run.hash
        self._run.close()
        if not self._remote:
            _index(repository, ended)

    def _wait(self) -> None:
        if self._remote:
            self._run.get("statsbridge")  # a remote client answers a question after all that it was told before


def serve(descriptor: int, parent: int, host_hidden: bool) -> None:
    """Answer requests until the other end is closed."""
    connection = Connection(descriptor)
    threading.Thread(target=_outlive_by_little, args=(parent,), daemon=True).start()
    tracking: Tracking | None = None
    while True:
        try:
            verb, *arguments = connection.recv()
        except (EOFError, OSError):
            break
        try:
            answer: Any = None
            if verb == "open":
                tracking = Tracking(*arguments, host_hidden=host_hidden)
                answer = tracking.hash()
            elif verb == "read":
                _read(connection, *arguments)
            else:
                answer = getattr(tracking, verb)(*arguments)
            if verb == "close":
                tracking = None
            reply = ("ok", answer)
        except Exception as error:
            reply = (_kind(error), f"{type(error).__name__}: {error}")
        try:
            connection.send(reply)
        except OSError:
            break
    if tracking is not None:
        threading.Timer(LAST_WORDS, os._exit, (1,)).start()
        tracking.close("stopped")
    os._exit(0)  # what Aim does at exit waits for a server that may be gone


def _read(connection: Connection, address: str, hash: str) -> None:
    repository = open_repository(address, create=False)
    if not repository.run_exists(hash):
        raise LookupError(f"there is no run {hash} in {address}")
    for rows in read_values(repository, hash):
        connection.send(("rows", rows))


def _kind(error: Exception) -> str:
    if isinstance(error, Refused):
        return "policy"
    if isinstance(error, ImportError):
        return "error"
    passing = (
        Busy,
        import_module("aim.sdk.errors").RunLockingError,
        import_module("aimrocks.errors").RocksIOError,
        import_module("requests").RequestException,
    )
    unreachable = isinstance(error, RuntimeError) and str(error).startswith("Failed to connect")
    # Most errors of the system pass: no room, no connection, a lock that is held (filelock's Timeout is one).
    misplaced = isinstance(error, FileNotFoundError | FileExistsError | NotADirectoryError | PermissionError)
    outside = isinstance(error, OSError) and not misplaced
    return "retry" if isinstance(error, passing) or unreachable or outside else "error"


def _index(repository: Any, hash: str) -> None:
    """Let queries in Python see the run. `aim up` does the same by itself, and while it does we need not."""
    manager = import_module("aim.sdk.index_manager").RepoIndexManager
    try:
        manager.get_index_manager(repository).index(hash)
    except import_module("aimrocks.errors").RocksIOError:
        return


def _outlive_by_little(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(LAST_WORDS)
    os._exit(1)

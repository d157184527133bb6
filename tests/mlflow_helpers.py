"""A real MLflow server on loopback, and what its store holds, read without MLflow."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 120


class Server:
    """`mlflow server` on sqlite in `folder`, in a process group of its own, at a port that it keeps."""

    def __init__(self, folder: Path, *, workers: int = 1, arguments: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.database = folder / "mlflow.db"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._workers = workers
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        places = (f"--backend-store-uri=sqlite:///{self.database}", f"--artifacts-destination={self.folder}/artifacts")
        network = ("--host=127.0.0.1", f"--port={self.port}", f"--workers={self._workers}")
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *places, *network, *self._arguments],
                cwd=self.folder,
                env={**os.environ, **quiet},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < end, "the MLflow server did not start"
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def stop(self) -> None:
        """Kill it and all that it has started."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    @contextmanager
    def down(self) -> Iterator[None]:
        """A context in which there is no server."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """A context in which the server takes connections and answers none."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)


@contextmanager
def running(folder: Path, **settings: int) -> Iterator[Server]:
    """A server that is stopped at the end."""
    server = Server(folder, **settings)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def rows(database: Path, run_id: str, prefix: str = "") -> list[tuple[str, int, int, float | None]]:
    """(key, step, milliseconds, value) of the metrics with this prefix, as they lie in the file; None for NaN."""
    with sqlite3.connect(database) as connection:
        found = connection.execute(
            "select key, step, timestamp, case when is_nan then null else value end from metrics where run_uuid = ?",
            (run_id,),
        ).fetchall()
    connection.close()
    return sorted((row for row in found if row[0].startswith(prefix)), key=lambda row: (row[0], row[1], row[2]))


def tags(database: Path, run_id: str) -> Mapping[str, str]:
    """The tags of a run, as they lie in the file."""
    return _pairs(database, "tags", run_id)


def parameters(database: Path, run_id: str) -> Mapping[str, str]:
    """The parameters of a run, as they lie in the file."""
    return _pairs(database, "params", run_id)


def status(database: Path, run_id: str) -> str:
    """The status of a run, as it lies in the file."""
    with sqlite3.connect(database) as connection:
        (found,) = connection.execute("select status from runs where run_uuid = ?", (run_id,)).fetchone()
    connection.close()
    return str(found)


def _pairs(database: Path, table: str, run_id: str) -> Mapping[str, str]:
    with sqlite3.connect(database) as connection:
        found = dict(connection.execute(f"select key, value from {table} where run_uuid = ?", (run_id,)).fetchall())
    connection.close()
    return found

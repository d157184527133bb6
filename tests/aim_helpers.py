"""What the tests of the Aim adapter share: curves, runs, a real server, and reading a repository another way."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from statsbridge_aim import Aim

from statsbridge.mirror import Batch, Point, RunInfo, Series

TIME = 1_700_000_000_000_000


def run_info(path: Path, **fields: Any) -> RunInfo:
    given = {"id": "run-1", "name": "a run", "config": {}, "versions": {}, "restricted": False} | fields
    return RunInfo(path=path, created=datetime(2026, 1, 2, tzinfo=UTC), **given)


def statistic(module: str, name: str = "std", *, site: str = "activation", **fields: Any) -> Series:
    given = {"type": "Conv2d", "depth": 1} | fields
    return Series(f"{site}/{name}/{module}", "statistic", name, site, module, **given)


def points(series: Sequence[Series], steps: Sequence[int]) -> list[Point]:
    return [Point(one, step, TIME + step, step + number / 1000) for step in steps for number, one in enumerate(series)]


def as_dict(sent: Sequence[Point]) -> dict[tuple[str, int], float]:
    return {(Aim().key(point.series), point.step): point.value for point in sent}


def read(adapter: Aim, info: RunInfo, memory: dict[str, str]) -> dict[tuple[str, int], float]:
    """All that a fresh adapter finds; a value that it finds twice is an error."""
    found = list(type(adapter)(**adapter.options()).read_back(info, adapter.destination(), memory))
    values = {(reading.key, reading.step): reading.value for reading in found}
    assert len(values) == len(found)
    return values


def send(adapter: Aim, sent: Sequence[Point]) -> None:
    adapter.send(Batch(sent))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A real `aim server` in a process group of its own."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        aim = str(Path(sys.executable).with_name("aim"))
        subprocess.run([aim, "init", "--skip-if-exists", "--repo", str(folder)], check=True, capture_output=True)
        self._command = [aim, "server", "--host", "127.0.0.1"]
        self._command += ["--port", str(port), "--repo", str(folder)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/status/", timeout=1).read()
                return
            assert self._process.poll() is None, "the server did not start"
            time.sleep(0.1)
        raise AssertionError("the server did not answer")

    @property
    def group(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        os.killpg(self.group, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def aim_server(folder: Path) -> Iterator[Server]:
    server = Server(folder, free_port())
    try:
        yield server
    finally:
        server.kill()

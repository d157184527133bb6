"""TensorBoard's own readers: the one for programs, and its web page."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def accumulated(folder: Path) -> EventAccumulator:
    """All that TensorBoard reads from the event files of a folder, nothing sampled away."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def exact(reader: EventAccumulator, tag: str) -> list[tuple[int, float, float]]:
    """(step, wall time, exact value) of a curve."""
    return [(event.step, event.wall_time, event.tensor_proto.double_val[0]) for event in reader.Tensors(tag)]


def float32(value: float) -> float:
    """The nearest float32, by the C library."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


class Page:
    """TensorBoard's web page as a browser sees it: its data endpoints."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self._process = process

    def get(self, path: str, **query: str) -> Any:
        """JSON from `/data/<path>`."""
        url = f"http://127.0.0.1:{self.port}/data/{path}"
        if query:
            url += "?" + urllib.parse.urlencode(query)
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)

    def wait_for(self, run: str, tags: int, patience: float = 60) -> dict[str, Any]:
        """The tags of `run` in the scalars tab, once there are as many."""
        end = time.monotonic() + patience
        while True:
            assert self._process.poll() is None, "tensorboard has ended"
            try:
                found: dict[str, Any] = self.get("plugin/scalars/tags").get(run, {})
            except (urllib.error.URLError, ConnectionError):
                found = {}
            if len(found) >= tags:
                return found
            assert time.monotonic() < end, f"the page shows {len(found)} of {tags} curves of {run}"
            time.sleep(0.2)

    def scalars(self, run: str, tag: str) -> list[tuple[int, float]]:
        """(step, value) of a curve as the page draws it."""
        return [(step, float(value)) for _, step, value in self.get("plugin/scalars/scalars", run=run, tag=tag)]


@contextmanager
def web_page(log_dir: Path, *, fast: bool, samples: str = "scalars=1000000,text=1000") -> Iterator[Page]:
    """A real tensorboard on a free port of loopback. `fast`: with the data server that comes with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(log_dir), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--load_fast", str(fast).lower(), "--samples_per_plugin", samples]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield Page(port, process)
    finally:
        process.terminate()
        process.wait()

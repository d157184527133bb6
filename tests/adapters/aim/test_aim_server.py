"""A real Aim server on loopback: alive, killed, hanging, back again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aim
import numpy as np
import pytest
from aim_helpers import TIME, aim_server, as_dict, points, read, run_info, send, statistic
from statsbridge_aim import Aim

from statsbridge.errors import Retry
from statsbridge.mirror import Batch, Event, Histogram

pytestmark = pytest.mark.slow

CURVES = [statistic(f"blocks.{number}") for number in range(20)]


def until_taken(adapter: Aim, sent: list) -> None:
    """Send as the relay does: again after a `Retry`."""
    for _ in range(10):
        try:
            return send(adapter, sent)
        except Retry:
            time.sleep(0.5)
    raise AssertionError("never taken")


def test_a_server_that_dies_and_one_that_hangs_lose_nothing(tmp_path: Path) -> None:
    with aim_server(tmp_path) as server:
        adapter = Aim(f"aim://127.0.0.1:{server.port}", timeout=15)
        info, memory = run_info(tmp_path), {}
        adapter.open(info, adapter.destination(), memory)
        first, second, third = (points(CURVES, range(start, start + 8)) for start in (0, 6, 12))
        send(adapter, first)
        assert read(adapter, info, memory) == as_dict(first)

        server.kill()
        with pytest.raises(Retry, match="did not answer 'track'"):
            send(adapter, second)
        with pytest.raises(Retry, match="Failed to connect"):
            send(adapter, second)
        server.start()
        until_taken(adapter, second)

        server.signal(signal.SIGSTOP)
        with pytest.raises(Retry, match="did not answer"):
            send(adapter, third)
        server.signal(signal.SIGCONT)
        until_taken(adapter, third)
        assert read(adapter, info, memory) == as_dict(first + second + third)

        counts, edges = np.array([1, 3]), np.array([0.0, 1.0, 2.0])
        adapter.send(Batch(histograms=[Histogram(statistic("a", "histogram"), 3, TIME, counts, edges)]))
        adapter.alert(Event(11, 7, TIME, "nan_loss", "warning", None, None, None, None, None, "the loss is NaN"))
        adapter.close("finished")
    assert [path.name for path in (tmp_path / ".aim" / "meta" / "chunks").iterdir()] == [memory["run"]]
    assert read(Aim(tmp_path), info, memory) == as_dict(first + second + third)
    run = aim.Run(memory["run"], repo=str(tmp_path), **{"log_system_params": False, "capture_terminal_logs": False})
    assert run["statsbridge", "status"] == "finished"
    assert [context.to_dict() for name, context, _ in run.iter_sequence_info_by_type("aim.distribution")] == [
        {"module": "a", "type": "Conv2d", "site": "activation", "depth": 1, "kind": "histogram"}
    ]
    run.close()


def test_training_ends_whatever_the_server_does(tmp_path: Path) -> None:
    """The server hangs in mid-run, and the training process still exits, and so does the worker."""
    script = """
import json, os, signal, sys
sys.path[:0] = json.loads(sys.argv[1])
from pathlib import Path
from aim_helpers import points, run_info, send, statistic
from statsbridge.errors import Retry
from statsbridge_aim import Aim
adapter, memory = Aim(sys.argv[2], timeout=30), {}
adapter.open(run_info(Path("/")), adapter.destination(), memory)
send(adapter, points([statistic("a")], range(3)))
os.killpg(int(sys.argv[3]), signal.SIGSTOP)
worker = adapter._worker._process.pid
adapter._worker._say("track", {0: ("x", {})}, [(0, 0, 1.0)])
print(worker)
"""
    with aim_server(tmp_path) as server:
        address = f"aim://127.0.0.1:{server.port}"
        done = subprocess.run(
            [sys.executable, "-c", script, json.dumps(sys.path), address, str(server.group)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        worker = int(done.stdout)
        for _ in range(300):
            if not Path(f"/proc/{worker}").exists():
                break
            time.sleep(0.1)
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)

"""A restricted run: nothing that Aim captures by itself is anywhere in the repository."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from aim_helpers import run_info
from statsbridge_aim import Aim, start

from statsbridge.errors import PolicyError

HOST, USER = "distinctive-host-4711", "distinctive-user-4711"
PRINTED, ENVIRONMENT = "printed-text-4711", "environment-4711"

SCRIPT = f"""
import ctypes, json, os, signal, sys
library = ctypes.CDLL(None)
if library.unshare(0x04000000) and library.unshare(0x14000000) or library.sethostname(b"{HOST}", {len(HOST)}):
    sys.exit(77)
sys.path[:0] = json.loads(sys.argv[1])
print("{PRINTED}", flush=True)
import socket
from datetime import datetime, UTC
from pathlib import Path
import plotly.graph_objects as go
from aim_helpers import TIME, points, run_info, send, statistic
from statsbridge.mirror import Event
from statsbridge_aim import Aim
assert socket.gethostname() == "{HOST}"
folder, restricted, end = Path(sys.argv[2]), sys.argv[3] == "restricted", sys.argv[4]
record = Path("record")
record.mkdir(exist_ok=True)
(record / "run.json").write_text("{{}}")
adapter, memory = Aim(folder), {{}}
adapter.open(run_info(record, restricted=restricted, name=""), adapter.destination(), memory)
send(adapter, points([statistic(f"m{{number}}") for number in range(30)], range(100)))
adapter.alert(Event(1, 7, TIME, "nan_loss", "warning", None, None, None, None, None, "the loss is NaN"))
adapter.figure("map", go.Figure(go.Heatmap(z=[[1]])), 1)
adapter.artifact(record)
print("{PRINTED}", flush=True)
if end == "kill":
    os.kill(adapter._worker._process.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
adapter.close("finished")
"""


def record(tmp_path: Path, restricted: str, end: str) -> bytes:
    """Run the script in a place of its own, and give all bytes and file names of the repository."""
    working = tmp_path / "working-folder-4711"
    working.mkdir()
    script = working / "command-line-4711.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"USER": USER, "LOGNAME": USER, "HOSTNAME": HOST, "SOMETHING": ENVIRONMENT}
    repository = tmp_path / "repository"
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(sys.path), str(repository), restricted, end],
        cwd=working, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip("this system does not let a process have another host name")
    assert done.returncode == (-9 if end == "kill" else 0), done.stderr
    assert done.stdout.count(PRINTED) == 2
    files = [path for path in (repository / ".aim").rglob("*") if path.is_file()]
    assert any(path.suffix == ".sst" for path in files) or end == "kill"
    return b"\0".join(bytes(path) + b"\0" + path.read_bytes() for path in files).replace(bytes(repository), b"")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "kill"])
def test_nothing_tells_where_and_by_whom_it_was_made(tmp_path: Path, end: str) -> None:
    content = record(tmp_path, "restricted", end)
    assert b"activation/std" in content
    captured = [HOST, USER, "working-folder-4711", "command-line-4711", PRINTED, ENVIRONMENT, str(uuid.getnode())]
    captured += [os.getcwd(), sys.executable, str(tmp_path)]
    captured += [name for name in (getpass.getuser(),) if len(name) > 5]
    assert [text for text in captured if text.encode() in content] == []


@pytest.mark.slow
def test_an_ordinary_run_would_have_told_the_host(tmp_path: Path) -> None:
    """What the tests above look for is there to be found."""
    assert HOST.encode() in record(tmp_path, "ordinary", "close")


def test_refused_where_the_host_name_cannot_be_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "HIDE", "a word that the process does not know")
    adapter = Aim(tmp_path)
    with pytest.raises(PolicyError, match="host name"):
        adapter.open(run_info(tmp_path, restricted=True), adapter.destination(), {})
    assert not os.listdir(tmp_path)

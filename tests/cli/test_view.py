"""`statsbridge view` as a process: what it prints, serves and refuses."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from .conftest import run_command

COMMAND = [sys.executable, "-c", "from statsbridge.cli import app; app()", "view"]


def test_it_prints_its_address_and_how_to_come_from_elsewhere_and_ends_by_ctrl_c(runs: Path) -> None:
    run = next(path for path in sorted(runs.iterdir()) if path.is_dir())
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*COMMAND, str(run), "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        found = re.fullmatch(r"statsbridge: (http://127\.0\.0\.1:(\d+)/\?token=[\w-]{43}&run=(\S+))\n", lines[0])
        assert found is not None, lines
        assert found[3] == run.name
        assert f"ssh -L {found[2]}:127.0.0.1:{found[2]} {socket.gethostname()}" in lines[1]
        with urllib.request.urlopen(found[1], timeout=30) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"http://127.0.0.1:{found[2]}/", timeout=30)
        # To nobody but this machine.
        with socket.socket() as other, pytest.raises(OSError, match=r"refused|unreachable|timed out"):
            other.settimeout(5)
            other.connect((_address_of_this_host(), int(found[2])))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 0
        assert said == ""


def _address_of_this_host() -> str:
    """An address of this host that is not the loopback's own 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # no packet is sent
            address = str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.2"
    return address if not address.startswith("127.") else "127.0.0.2"


def test_what_is_wrong_is_one_line(runs: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, said in (
            (["nothing", "--dir", str(runs)], "no run 'nothing'"),
            ([str(runs), "--no-browser", "--port", str(port)], f"port {port} cannot be had"),
        ):
            done = run_command("view", *arguments)
            assert done.returncode == 2
            assert said in done.stderr
            assert done.stderr.count("\n") == 1
            assert done.stdout == ""


def test_without_dash_it_names_the_extra(runs: Path) -> None:
    program = "import sys; sys.modules['dash'] = None; from statsbridge.cli import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", program, "view", str(runs)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr == "statsbridge: dash is not installed: pip install 'statsbridge[view]'\n"

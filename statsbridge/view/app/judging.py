"""The rules over a large run, in a process of its own: its memory goes back, and no click waits for its computing."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

from ...analyze.diagnosis import diagnose
from ...analyze.findings import Finding
from ...analyze.run_data import load
from ...errors import LogError, StatsBridgeError

_NICE = 10


def judge(run: Path) -> list[Finding]:
    """What `diagnose` finds in the run at `run`, worked out by another process, which ends with this one.

    Raises LogError where the run cannot be judged, with the reason.
    """
    # -P: a file of the user's in the folder where the page was started, random.py, is not to be taken for Python's own.
    with subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        answer = process.stdout.read()
    if process.returncode:
        raise LogError("they ended with an error; it is printed where the page is served")
    found: list[Finding] | str = pickle.loads(answer)
    if isinstance(found, str):
        raise LogError(found)
    return found


def _answer(run: str) -> None:
    threading.Thread(target=_end_with_asker, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(_NICE)
    answer: list[Finding] | str
    try:
        answer = diagnose(load(run))
    except StatsBridgeError as error:
        answer = str(error)
    sys.stdout.buffer.write(pickle.dumps(answer))


def _end_with_asker() -> None:
    sys.stdin.read()  # until whoever asks has gone
    os._exit(1)


if __name__ == "__main__":
    _answer(sys.argv[1])

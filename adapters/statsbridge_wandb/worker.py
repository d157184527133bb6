"""The process in which the W&B client of an own run lives; it talks to the adapter through its standard streams.

A process of its own, because W&B's client is one to a process: in the user's, their `wandb.init()` would return our
run, a notebook's would finish it, their `wandb.teardown()` would cut it off, and a client that hangs could not be
ended. Here it takes neither the training's interpreter lock nor its console, and is simply killed where it hangs.
"""

from __future__ import annotations

import os
import pickle
import queue
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

from .records import RecordFile, parse
from .runfiles import run_files, settled, written

FLUSH = 0.05
"""Seconds between W&B's flushes of its run file: what an acknowledgement waits for."""

_PATIENCE = 20.0  # seconds in which W&B's client must write something
_POLL = 0.004
_DENIED = re.compile(r"returned error (401|403|404)\b")
_FLUSH_SETTING = "x_transaction_log_flush_interval"


@dataclass
class Recording:
    """A run of W&B's that is open, and what has been seen in its file so far."""

    run: Any
    file: RecordFile
    step: int = -1
    counts: Counter[str] = field(default_factory=Counter)

    def wait(self, there: Callable[[], bool]) -> None:
        """Return once what `there` asks for is in the run's file and the file on the disk; else TimeoutError."""
        end = time.monotonic() + _PATIENCE
        while True:
            for record in self.file.read() if self.file.path.exists() else ():
                parsed, end = parse(record), time.monotonic() + _PATIENCE
                self.counts[parsed.WhichOneof("record_type")] += 1
                self.step = max(self.step, parsed.history.step.num if parsed.HasField("history") else -1)
            if there():
                break
            if _service_ended():
                raise ConnectionError("W&B's service process has ended")
            if time.monotonic() > end:
                raise TimeoutError(f"W&B's client wrote nothing to {self.file.path} for {_PATIENCE:g} s")
            time.sleep(_POLL)
        with self.file.path.open("rb") as file:
            os.fsync(file.fileno())


def _service_ended() -> bool:
    """Whether W&B's service, the only child process there is, lies dead; where the system cannot tell, no."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


class Refused(Exception):  # noqa: N818
    """Trying again will not help."""


def open_run(request: dict[str, Any]) -> tuple[Recording, dict[str, Any]]:
    """Start W&B's run; with it, what the adapter needs to know: its URL, its next step, rows of earlier processes."""
    import wandb

    if _FLUSH_SETTING not in wandb.Settings.model_fields:
        raise Refused(f"wandb {wandb.__version__} flushes its run file only when it likes; install wandb>=0.31")
    mode, settings = _mode(wandb.setup().settings, request)
    folder, identity = Path(request["folder"]), request["id"]
    files = run_files(folder, identity)
    if files and not settled(files[-1]):
        raise TimeoutError(f"another process is still writing {files[-1]}")
    held = written(files)
    run = wandb.init(
        mode=mode,
        id=identity,
        # A run that was begun and lost before its cursor was saved is taken up again.
        resume="allow",
        dir=str(folder.parent),
        entity=request["entity"] or None,
        project=request["project"] or wandb.setup().settings.project or request["default_project"],
        group=request["group"] or None,
        job_type="statsbridge",
        name=request["name"] or None,
        config=request["config"],
        settings=wandb.Settings(**settings),
    )
    recording = Recording(run, RecordFile(Path(run.settings.sync_file)))
    recording.wait(lambda: recording.counts["run"] > 0)
    rows = {row.step: row.values for row in held if row.step > request["step"]}
    last = max((row.step for row in held), default=-1)
    url, following = ("", 0) if mode == "offline" else (run.url, run.step)
    return recording, {"url": url, "folder": run.settings.sync_dir, "held": rows, "last": last, "next": following}


def _mode(found: Any, request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The mode, and W&B's settings, given what its settings files say (`found`) and what was asked for."""
    mode = request["mode"]
    if mode == "online" and request["mode_from"] == "default" and found.mode in {"offline", "dryrun", "disabled"}:
        mode = "disabled" if found.mode == "disabled" else "offline"  # as `wandb offline` and `wandb disabled` write it
    if mode == "disabled":
        raise Refused("W&B is disabled in this folder: nothing is sent there")
    if mode == "online" and request["url_from"] == "default" and found.base_url.rstrip("/") != request["url"]:
        raise Refused(
            f"W&B's settings file names the server {found.base_url}, the mirror was to go to {request['url']}:"
            f" set WANDB_BASE_URL, or name the server: WandB({found.base_url!r})"
        )
    if mode == "online" and (real := type(found)(base_url=request["url"]).base_url) != request["url"]:
        raise Refused(f"W&B's client takes {request['url']} for {real}: name that server")
    # Nothing that the client captures by itself belongs to a run of statistics.
    captures = {
        "console": "off", "disable_code": True, "disable_git": True, "disable_job_creation": True, "docker": "",
        "email": "", "host": "", "label_disable": True, "program": "", "program_abspath": "", "program_relpath": "",
        "run_notes": "", "run_tags": (), "sagemaker_disable": True, "save_code": False, "username": "",
        "x_disable_machine_info": True, "x_disable_meta": True, "x_disable_stats": True, "x_disable_viewer": True,
        "x_executable": "", "x_save_requirements": False, "capture_loggers": None,
    }  # fmt: skip
    settings = {
        **captures,
        **request["settings"],
        "base_url": request["url"],
        "finish_timeout": request["upload"],
        "finish_timeout_raises": True,
        "init_timeout": request["connect"],
        "silent": True,
        "symlink": False,
        "use_dot_wandb": Path(request["folder"]).name == ".wandb",
        "x_history_value_encoding": "json",
        _FLUSH_SETTING: FLUSH,
    }
    return mode, settings


def _rows(recording: Recording, request: dict[str, Any]) -> None:
    import wandb

    for step, timestamp, values, histograms in request["rows"]:
        row: dict[str, Any] = {**values, "_timestamp": timestamp}
        for key, (counts, edges) in histograms.items():
            row[key] = wandb.Histogram(np_histogram=(counts, edges))
        recording.run.log(row, step=step, commit=True)
    last = request["rows"][-1][0]
    recording.wait(lambda: recording.step >= last)


def _alert(recording: Recording, request: dict[str, Any]) -> None:
    before = recording.counts["alert"]
    recording.run.alert(
        request["title"], request["text"], level=request["level"], wait_duration=timedelta(milliseconds=1)
    )
    recording.wait(lambda: recording.counts["alert"] > before)


def _figure(recording: Recording, request: dict[str, Any]) -> None:
    import plotly.io
    import wandb

    # Without a commit: the row of the next step takes it in, and no step is used up.
    recording.run.log({request["key"]: wandb.Plotly(plotly.io.from_json(request["figure"]))}, commit=False)


def _artifact(recording: Recording, request: dict[str, Any]) -> None:
    import wandb

    artifact = wandb.Artifact(request["name"], type="statsbridge")
    artifact.add_dir(request["path"])  # copied: the folder may be gone before it is uploaded
    before = recording.counts["artifact"]
    recording.run.log_artifact(artifact)
    recording.wait(lambda: recording.counts["artifact"] > before)


_ACTIONS: dict[str, Callable[[Recording, dict[str, Any]], None]] = {
    "rows": _rows,
    "alert": _alert,
    "figure": _figure,
    "artifact": _artifact,
}


def main() -> None:
    """Answer requests until told to close, or until the adapter's process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the adapter decides when this ends: a Ctrl-C is for the training
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    recording: Recording | None = None
    try:
        for request in _requests(sys.stdin.buffer):
            answer, recording = _answer(request, recording)
            pickle.dump(answer, replies)
            replies.flush()
            if answer[0] not in {"done", "rejected"} or request["action"] == "close":
                break
    except BrokenPipeError:
        pass  # the adapter is gone
    if recording is not None:
        with suppress(Exception):
            recording.run.finish(exit_code=1)


def _answer(request: dict[str, Any], recording: Recording | None) -> tuple[tuple[str, Any], Recording | None]:
    """Do what `request` asks: ("done", result), or ("rejected" | "refused" | "lost", reason)."""
    action = request["action"]
    try:
        if recording is None:
            recording, answer = open_run(request)
            return ("done", answer), recording
        if action == "close":
            run, recording = recording.run, None
            run.finish(exit_code=request["exit_code"])
            return ("done", None), None
        _ACTIONS[action](recording, request)
    except Exception as error:  # whatever the client raises: it decides how the adapter goes on
        return _failure(action, error), recording
    return ("done", None), recording


def _failure(action: str, error: Exception) -> tuple[str, str]:
    """What an exception of W&B's client means for the adapter, and the reason."""
    from wandb.errors import AuthenticationError, UsageError

    if isinstance(error, TypeError | ValueError) and action in {"alert", "figure", "artifact"}:
        return "rejected", str(error)
    if isinstance(error, Refused | AuthenticationError | UsageError | TypeError | ValueError):
        return "refused", str(error)
    if _DENIED.search(str(error)):
        return "refused", f"W&B's server refuses the API key, entity or project: {error}"
    return "lost", f"{type(error).__name__}: {error}"


def _requests(stream: BinaryIO) -> Iterator[dict[str, Any]]:
    """Requests as they come; ends when the stream does, or the process that started this one has died.

    Both: the stream stays open while a process that the training forked still holds its other end.
    """
    arrived: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        with suppress(EOFError, pickle.UnpicklingError, OSError):
            while True:
                arrived.put(pickle.load(stream))
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    parent = os.getppid()
    while os.getppid() == parent:
        with suppress(queue.Empty):
            request = arrived.get(timeout=1.0)
            if request is None:
                return
            yield request

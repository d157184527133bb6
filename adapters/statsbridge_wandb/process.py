"""The adapter's side of the worker process: start it, ask it, bound every wait, end it."""

from __future__ import annotations

import json
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import IO, Any

from statsbridge.errors import MirrorError, Reject, Retry

_MAIN = "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); from {} import main; main()"

_KEPT = frozenset(
    f"WANDB_{name}"
    for name in (
        "API_KEY", "APP_URL", "ARTIFACT_DIR", "CACHE_DIR", "CONFIG_DIR", "CREDENTIALS_FILE", "DATA_DIR", "HTTP_TIMEOUT",
        "IDENTITY_TOKEN_FILE", "INSECURE_DISABLE_SSL", "X_EXTRA_HTTP_HEADERS",
    )
)  # fmt: skip
"""Of W&B's variables only these: how to reach the server. Others would make our run a copy of the user's, or tie the
worker to the service process of the user's client."""


class Worker:
    """One worker process. Its methods raise Retry when it is lost or silent, and it is then at an end."""

    def __init__(self, *, bare: bool) -> None:
        """Start it. `bare`: without W&B's settings files, which lie below the working folder too, and keys."""
        kept = frozenset[str]() if bare else _KEPT
        variables = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") or name in kept}
        variables["WANDB_ERROR_REPORTING"] = "false"
        if bare:
            variables |= {"WANDB_CONFIG_DIR": os.devnull, "NETRC": os.devnull}
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN.format(f"{__package__}.worker")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=variables,
                cwd=os.path.abspath(os.sep) if bare else None,
                start_new_session=True,  # a Ctrl-C in the terminal is for the training alone
            )
        except OSError as error:
            self._errors.close()
            raise Retry(f"no process for W&B's client could be started: {error}") from error
        self._answers: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="statsbridge-wandb", daemon=True).start()
        self._write(json.dumps([os.path.abspath(entry) for entry in sys.path]).encode() + b"\n")

    def ask(self, action: str, *, timeout: float, **request: Any) -> Any:
        """The worker's result; raises Retry, Reject or MirrorError, with its reason."""
        self._write(pickle.dumps({"action": action, **request}))
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.kill()
            raise Retry(f"W&B's client did not answer within {timeout:g} s") from None
        if answer is None:
            self.kill()
            raise Retry(f"W&B's client ended by itself: {self._last_words()}")
        what, value = answer
        if what == "done":
            return value
        if what == "rejected":
            raise Reject(f"W&B's client refused it: {value}")
        self.kill()
        raise MirrorError(value) if what == "refused" else Retry(value)

    def kill(self) -> None:
        """End it at once; W&B's own service process ends with it."""
        self._process.kill()
        self.join(5.0)

    def join(self, timeout: float) -> bool:
        """Wait for its end; whether it has ended."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
            return True
        return False

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except (OSError, ValueError):
            self.kill()
            raise Retry(f"W&B's client ended by itself: {self._last_words()}") from None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                self._answers.put(pickle.load(self._process.stdout))
        self._answers.put(None)

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 1500))
        return self._errors.read().decode(errors="replace").strip() or "it said nothing"

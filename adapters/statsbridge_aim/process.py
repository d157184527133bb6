"""The other end of the worker process: starts it, asks it, and kills it when it does not answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, NoReturn

from statsbridge.errors import MirrorError, PolicyError, Retry

from . import start

_RAISES = {"retry": Retry, "policy": PolicyError, "error": MirrorError}
# With it, Aim would answer before it has stored anything.
_QUEUE = "__AIM_ENABLE_TRACKING_THREAD__"


class Worker:
    """A process that runs Aim's client. Every failure is an error of ours; after a `Retry` it is gone.

    Args:
        timeout: seconds that one answer may take.
        hide_host: let the process have another host name.
    """

    def __init__(self, timeout: float, *, hide_host: bool = False) -> None:
        self._timeout = timeout
        self._connection, other = Pipe()
        environment = {name: value for name, value in os.environ.items() if name != _QUEUE}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-P", str(Path(start.__file__)), str(other.fileno()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [*command, start.HIDE if hide_host else "show"],
                pass_fds=(other.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the training
            )
        except OSError as error:
            raise Retry(f"the process for Aim's client did not start: {error}") from None
        finally:
            other.close()

    def ask(self, verb: str, *arguments: object, patience: float = 1.0) -> Any:
        """The answer to one request, within `patience` times the timeout. Raises Retry, PolicyError or MirrorError."""
        self._say(verb, *arguments)
        return self._answer(verb, patience * self._timeout)[1]

    def rows(self, verb: str, *arguments: object, patience: float) -> Iterator[list[tuple[str, int, float]]]:
        """The answer to one request that comes in pieces, each as `ask` has it."""
        self._say(verb, *arguments)
        while (answer := self._answer(verb, patience * self._timeout))[0] == "rows":
            yield answer[1]

    def kill(self) -> None:
        """End the process at once; what it has acknowledged is safe."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _say(self, verb: str, *arguments: object) -> None:
        try:
            self._connection.send((verb, *arguments))
        except OSError:
            self._died()

    def _answer(self, verb: str, timeout: float) -> tuple[str, Any]:
        try:
            if not self._connection.poll(timeout):
                self.kill()
                raise Retry(f"Aim did not answer {verb!r} within {timeout:g} s")
            kind, content = self._connection.recv()
        except (EOFError, OSError):
            self._died()
        if kind in _RAISES:
            self.kill()
            raise _RAISES[kind](content)
        return kind, content

    def _died(self) -> NoReturn:
        self.kill()
        raise Retry(f"the process that runs Aim's client ended with {self._process.returncode}")

"""What is on disk of a mirror while this process serves it, and that it is this process which does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import LogError
from ..log.folder import HEARTBEAT, STALE
from .dead_letters import DeadLetters
from .state import MirrorState, claim, load_state, state_file


class LeaseLost(BaseException):
    """Nobody waits for this mirror any more, or another process serves it now."""


class Lease:
    """One mirror's state: taken, saved and kept alive by the thread that serves it, given up by any other.

    `state`: as it is, which is on disk unless the disk refused it. `on_disk`: as it is there. `letters`: what was
    refused since the cursor on disk. `taken`: whether this process has become the owner. `given_up`: set once it is
    no more to be.

    Args:
        run: the run's folder.
        state: as long as none is on disk.
        unwritable: hears why the state cannot be written.
        taken_over: hears that another process serves the mirror.
    """

    def __init__(
        self, run: Path, state: MirrorState, *, unwritable: Callable[[str], None], taken_over: Callable[[], None]
    ) -> None:
        self.state = self.on_disk = state
        self.letters = DeadLetters()
        self.taken = False
        self.given_up = threading.Event()
        self._run = run
        self._unwritable = unwritable
        self._taken_over = taken_over
        self._saving = threading.Lock()
        self._saved_at = 0.0

    def take(self) -> None:
        """Become the owner. Raises MirrorError where another process is, LogError and OSError as for the file."""
        self.state = self.on_disk = claim(self._run, self.state.name, lambda: self.state)
        self.taken = True
        self._saved_at = time.monotonic()

    def save(self, **changes: Any) -> None:
        """Put `changes` into the state, and with a cursor all that belongs to it, on disk. Raises LeaseLost."""
        with self._saving:
            self._check()
            self.state = replace(self.state, **changes)
            moved = self.state.cursor != self.on_disk.cursor
            try:
                if moved:
                    self.letters.write(self._run, self.state.name, self.on_disk.cursor)
                self.state.save(self._run)
            except OSError as error:
                self._unwritable(str(error))
                return
            if moved:
                self.letters.clear()
            self.on_disk = self.state
            self._saved_at = time.monotonic()

    def beat(self) -> None:
        """Show, now and then, that this process still serves the mirror. Raises LeaseLost."""
        if time.monotonic() - self._saved_at >= HEARTBEAT:
            with self._saving:
                self._check()
                with suppress(OSError):
                    self.on_disk.save(self._run)
                self._saved_at = time.monotonic()

    def check(self) -> None:
        """Raise LeaseLost where it was given up."""
        if self.given_up.is_set():
            raise LeaseLost

    def give_up(self, reason: str) -> None:
        """Leave the rest to `sync`. Waits a second at most."""
        self.given_up.set()
        if self.taken and self._saving.acquire(timeout=1):
            try:
                if self.on_disk.owner is not None:
                    self.on_disk = replace(self.on_disk, owner=None, status="remaining", reason=reason)
                    with suppress(OSError):
                        self.on_disk.save(self._run)
            finally:
                self._saving.release()

    def _check(self) -> None:
        self.check()
        if time.monotonic() - self._saved_at < STALE / 2:
            return
        # Silent for so long (a hanging send), another process may have taken the mirror over.
        with suppress(LogError):
            owner = load_state(state_file(self._run, self.state.name)).owner
            if owner is None or self.state.owner is None or owner.token != self.state.owner.token:
                self._taken_over()
                raise LeaseLost

"""Compaction beside a training: a thread of its own, so that the writer never waits for it."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from .compaction import FAN_IN, compact_quietly, remove_covered, remove_unfinished
from .schema import SCHEMAS


class Compactor:
    """Merges the parts of one rank whenever enough of them have been written. Used by the writer's thread only.

    `may_write` is asked before anything is changed, from the thread that merges too.
    """

    def __init__(self, run: Path, rank: int, may_write: Callable[[], bool] = lambda: True) -> None:
        self._run = run
        self._rank = rank
        self._may_write = may_write
        self._waiting: Counter[str] = Counter()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def wrote(self, table: str) -> None:
        """One more part of `table` is on disk."""
        self._waiting[table] += 1

    def start_if_due(self) -> None:
        """Start merging the tables that have enough small parts, unless that is under way."""
        due = [table for table, parts in self._waiting.items() if parts >= FAN_IN]
        if not due or (self._thread is not None and self._thread.is_alive()):
            return
        thread = threading.Thread(target=self._merge, args=(due,), name="statsbridge-compactor", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads for this process, or it is about to end: the parts can wait
            return
        self._thread = thread
        for table in due:
            del self._waiting[table]

    def stop(self, timeout: float) -> None:
        """Start nothing more, end what is under way, and delete what is covered or half written. Raises OSError."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return
        for table in SCHEMAS if self._may_write() else ():
            remove_covered(self._run, table, self._rank)
            remove_unfinished(self._run, table, self._rank)

    def _merge(self, tables: list[str]) -> None:
        for table in tables:
            compact_quietly(self._run, table, self._rank, goes_on=self._goes_on)

    def _goes_on(self) -> bool:
        return not self._stopped.is_set() and self._may_write()

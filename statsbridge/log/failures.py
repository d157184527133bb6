"""What goes wrong in the writer's thread: said once a cause, and kept as events of the record."""

import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress

import pyarrow as pa

from ..errors import StatsBridgeWarning
from ..wording import counted
from .schema import to_table

# Work that fails at every step must not fill the disk with its tracebacks.
INTERNAL_ERRORS = 100


def _warn(text: str) -> None:
    warnings.warn(text, StatsBridgeWarning, stacklevel=2)


class Failures:
    """Used by the writer's thread only.

    `add_events` takes rows of the table `events`; `on_warning` hears each cause once, by default as a warning.
    """

    def __init__(self, add_events: Callable[[pa.Table], None], on_warning: Callable[[str], None] | None) -> None:
        self._add_events = add_events
        self._on_warning = on_warning or _warn
        self._said: set[str] = set()
        self._internal_errors = 0
        self._reported: dict[str, int] = {}

    def say(self, cause: str, text: str) -> None:
        """Warn, where that was not done before of this cause."""
        if cause not in self._said:
            self._said.add(cause)
            with suppress(Exception):  # where warnings are errors
                self._on_warning(f"statsbridge: {text}")

    def internal_error(self) -> None:
        """Our own code, or work that we were given, has raised the exception that is being handled."""
        text = traceback.format_exc()
        self.say("internal_error", f"some rows could not be made, training goes on:\n{text}")
        self._internal_errors += 1
        if self._internal_errors <= INTERNAL_ERRORS:
            self._record("internal_error", text)

    def dropped(self, rows: Mapping[str, int]) -> bool:
        """Make an event of the rows lost since the last call; whether there were any. `rows`: `Writer.dropped`."""
        lost = {table: count - self._reported.get(table, 0) for table, count in rows.items()}
        lost = {table: count for table, count in lost.items() if count}
        for table, count in lost.items():
            self._reported[table] = self._reported.get(table, 0) + count
            if table == "queue":
                text = f"about {counted(count, 'row')} not recorded: steps came faster than they could be written"
            else:
                text = f"{counted(count, 'row')} of {table} not recorded: the disk could not be written for too long"
            self.say(f"dropped {table}", text)
            self._record("rows_dropped", text, value=float(count))
        return bool(lost)

    def _record(self, kind: str, message: str, value: float | None = None) -> None:
        event = {"time": time.time(), "kind": kind, "severity": "warning", "message": message, "value": value}
        self._add_events(to_table("events", event))

"""What could not be done: an event in the record, and a warning once a cause. Never an exception."""

from __future__ import annotations

import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from .errors import StatsBridgeWarning

#: Something that fails at every step must not fill the record: beyond this an event is only counted.
EVENTS_PER_CAUSE = 100

Submit = Callable[[Callable[[], Mapping[str, Mapping[str, Any]]]], object]


class Reporter:
    """Writes events and says each cause once, from any thread.

    `step` is the label that events get where none is given: that of the step in progress, as far as it is known.
    """

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._said: set[str] = set()
        self._seen: Counter[str] = Counter()
        # Training, the writer's thread and those of the mirrors; reentrant for a signal handler that logs.
        self._counting = threading.RLock()
        self.step: int | None = None

    def event(
        self,
        kind: str,
        message: str,
        *,
        severity: str = "warning",
        module: str | None = None,
        site: str | None = None,
        tensor: str | None = None,
        value: float | None = None,
        threshold: float | None = None,
        step: int | None = None,
    ) -> None:
        """One row of `events`, whatever was said before."""
        row = {
            "step": self.step if step is None else step,
            "time": time.time_ns() // 1000,
            "kind": kind,
            "severity": severity,
            "module": module,
            "site": site,
            "tensor": tensor,
            "value": value,
            "threshold": threshold,
            "message": message,
        }
        self._submit(lambda: {"events": {name: [value] for name, value in row.items()}})

    def problem(
        self,
        kind: str,
        message: str,
        *,
        warning: str | None = None,
        cause: str | None = None,
        **about: str | int | None,
    ) -> None:
        """An event for every occurrence (up to a limit), and a warning for the first of its cause."""
        cause = cause or kind
        with self._counting:
            self._seen[cause] += 1
            seen = self._seen[cause]
        if seen <= EVENTS_PER_CAUSE:
            self.event(kind, message, **about)  # type: ignore[arg-type]
        self.warn(warning or message, cause)

    def trouble(
        self,
        where: str,
        module: str,
        error: BaseException,
        site: str | None = None,
        tensor: str | None = None,
        step: int | None = None,
    ) -> None:
        """Our own code failed: the traceback becomes an event, training goes on."""
        told = f" ({module})" if module else ""
        text = "".join(traceback.format_exception(error))
        self.problem(
            "internal_error",
            f"{where}{told}: {text}",
            warning=f"an error of its own in {where}{told}: {error!r}; training goes on, the traceback is in the "
            "events of the run",
            cause=f"internal_error {where} {type(error).__name__}",
            severity="warning",
            module=module,
            site=site,
            tensor=tensor,
            step=step,
        )

    def mirror(self, kind: str, message: str, *, cause: str, warn: bool) -> None:
        """What happened to a mirror, from its thread: an event, and a warning too where it is no good news."""
        if warn:
            self.problem(kind, message, cause=cause)
        else:
            self.event(kind, message, severity="info")

    def warn(self, message: str, cause: str | None = None) -> None:
        """Warn once a cause. Where warnings are turned into errors it goes to standard error instead."""
        with self._counting:
            if (cause or message) in self._said:
                return
            self._said.add(cause or message)
        try:
            warnings.warn(f"statsbridge: {message}", StatsBridgeWarning, stacklevel=2)
        except StatsBridgeWarning as warning:
            print(warning, file=sys.stderr)

    def alert(self, message: str) -> None:
        """One line on standard error about the training itself. No warning: it is no failure of ours."""
        with suppress(OSError, ValueError, AttributeError):  # standard error may be closed, or not there at all
            print(f"statsbridge: {_one_line(message)}", file=sys.stderr, flush=True)

    def count_the_rest(self) -> None:
        """Say how many events were only counted."""
        with self._counting:
            counted = dict(self._seen)
            self._seen.clear()
        for cause, seen in counted.items():
            if seen > EVENTS_PER_CAUSE:
                more = seen - EVENTS_PER_CAUSE
                self.event("events_not_written", f"{more} more events of this cause: {cause}", value=float(more))


def _one_line(text: str) -> str:
    """Names of modules are anybody's text: what would move a terminal's cursor is shown instead."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in " ".join(text.split())
    )

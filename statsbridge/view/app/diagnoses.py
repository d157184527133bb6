"""What the rules find in the runs that are open, worked out in the background so that no picture waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...analyze.diagnosis import diagnose
from ...analyze.findings import SEVERITIES, Finding
from ...analyze.run_data import RunData
from ...errors import StatsBridgeError
from .judging import judge
from .library import rows_of

LARGE = 300_000
"""Rows of `stats` from which on the rules are run in a process of their own."""
_LATER = 3.0
"""Seconds until that begins: the first picture needs the processor first."""
_PATIENCE = 10.0
"""Of a run that grows: the share of time, one in so many, that is spent on looking for findings again."""
_KEPT = 64


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is known of a run. `findings`: the first cause first. `note`: what is still to come, or why it is not."""

    findings: tuple[Finding, ...]
    note: str | None = None
    version: str = ""

    def worst(self) -> Mapping[str, str]:
        """Module → the worst severity of its findings, of warnings and critical ones."""
        found: dict[str, str] = {}
        for severity in reversed(SEVERITIES[:2]):
            found |= {
                one.module: severity for one in self.findings if one.module is not None and one.severity == severity
            }
        return found


class Diagnoses:
    """Runs the rules over one run after the other, each time on what is new."""

    def __init__(self) -> None:
        self._done: dict[str, Diagnosis] = {}
        self._not_before: dict[str, float] = {}
        self._lock = threading.Lock()
        self._busy: str | None = None
        self._count = 0

    @property
    def serial(self) -> int:
        """Goes up whenever there are findings that were not there before."""
        return self._count

    def of(self, data: RunData, version: str) -> Diagnosis:
        """What is known of the run now; looks in the background for what is not."""
        with self._lock:
            done = self._done.get(data.id)
            waits = time.monotonic() < self._not_before.get(data.id, 0.0)
            if (done is None or done.version != version) and self._busy is None and not waits:
                self._busy = data.id
                threading.Thread(target=self._look, args=(data, version), daemon=True, name="findings").start()
        if done is not None:
            return done
        recorded = tuple(from_events(data.events.to_pylist()))
        note = f"Judging {rows_of(data.path):,} rows … Until then, here is what the training itself wrote down."
        return Diagnosis(recorded, note, "")

    def _look(self, data: RunData, version: str) -> None:
        large = rows_of(data.path) > LARGE
        if large:
            time.sleep(_LATER)
        began = time.monotonic()
        found = Diagnosis((), "The rules ended with an error; it is printed where the page is served.", version)
        try:
            found = Diagnosis(tuple(judge(data.path) if large else diagnose(data)), None, version)
        except StatsBridgeError as error:
            found = Diagnosis((), f"The rules could not be run: {error}", version)
        finally:
            self._keep(data.id, found, time.monotonic() - began)

    def _keep(self, run: str, found: Diagnosis, seconds: float) -> None:
        with self._lock:
            self._busy = None
            before = self._done.pop(run, None)
            self._done[run] = found
            while len(self._done) > _KEPT:
                del self._done[next(iter(self._done))]
            self._not_before[run] = time.monotonic() + _PATIENCE * seconds
            if before is None or before.findings != found.findings or before.note != found.note:
                self._count += 1


def from_events(events: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """The events that are warnings or worse, as findings; of the same kind and module the first."""
    found: dict[tuple[Any, Any], Finding] = {}
    for event in events:
        key = (event["kind"], event["module"])
        if event["severity"] in SEVERITIES[:2] and key not in found:
            columns = {name: event[name] for name in ("module", "site", "tensor", "value", "threshold")}
            found[key] = Finding(
                kind=str(event["kind"]),
                severity=event["severity"],
                step=event["step"] if event["step"] is not None else 0,
                message=event["message"] or "",
                **columns,
            )
    return sorted(found.values(), key=lambda one: (SEVERITIES.index(one.severity), one.step))

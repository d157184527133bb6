"""A run looked at while it is recorded: what is wrong with it becomes an alert, and what others ask of it is heard."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..log.control import Control, Wish
from ..log.schema import Columns
from ..reporting import Reporter

if TYPE_CHECKING:
    import pyarrow as pa

    from ..analyze.findings import Finding
    from ..analyze.watch import Watch

_ALERTING = ("critical", "warning")

#: A training that breaks down shows in many places at once: so many are printed, and how many more there are.
_LINES = 3


class Live:
    """Follows the rows of a run as they are written, in the writer's thread.

    `orders` is for the training thread, which takes them one by one: wishes about the sampling, and findings that ask
    for a burst.

    Args:
        path: the run's folder.
        reporter: says what is found.
        watch: judges the rows; None where nobody wants alerts.
        control: where wishes are left; None where nobody listens.
        several: whether other processes train with this one. They could not change their sampling at the same step,
            so it stays as it is.
    """

    def __init__(
        self, path: Path, reporter: Reporter, watch: Watch | None, control: Control | None, *, several: bool
    ) -> None:
        self.orders: deque[Wish | Finding] = deque()
        self._path = path
        self._reporter = reporter
        self._watch = watch
        self._control = control
        self._several = several

    def follow(self, tables: Mapping[str, pa.Table]) -> Mapping[str, Columns]:
        """Look at the rows of a flush; the events that follow from them. Raises nothing."""
        self._listen()
        if self._watch is None or not tables:
            return {}
        try:
            return self._judge(self._watch.add(tables))
        except Exception as error:
            self._watch = None
            self._reporter.trouble("watching the training (there are no alerts from here on)", "", error)
            return {}

    def _listen(self) -> None:
        if self._control is None:
            return
        try:
            wish = self._control.look()
        except ConfigError as error:
            self._reporter.event("sampling_refused", str(error))
            return
        if wish is None:
            return
        if self._several:
            self._reporter.event(
                "sampling_refused",
                f"several processes train together and would not change their sampling at the same step: it stays as "
                f"it is ({wish}; asked by {wish.asked_by})",
            )
        else:
            self.orders.append(wish)

    def _judge(self, findings: list[Finding]) -> Mapping[str, Columns]:
        if not findings:
            return {}
        alerts = [finding for finding in findings if finding.severity in _ALERTING]
        if alerts and not self._several:
            self.orders.append(alerts[0])
        for finding in alerts[:_LINES]:
            self._reporter.alert(f"{finding.severity} at step {finding.step}: {finding.message}")
        if len(alerts) > _LINES:
            more = len(alerts) - _LINES
            findings_word = "finding" if more == 1 else "findings"
            self._reporter.alert(f"{more} more {findings_word}: statsbridge diagnose {self._path}")
        columns = ("step", "kind", "severity", "module", "site", "tensor", "value", "threshold", "message")
        events = {name: [getattr(finding, name) for finding in findings] for name in columns}
        return {"events": {**events, "time": [time.time_ns() // 1000] * len(findings)}}

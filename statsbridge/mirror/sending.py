"""What goes to an adapter: written down before, repeated while it cannot be reached, kept where it is refused."""

from __future__ import annotations

import traceback
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MirrorError, PolicyError, Reject, Retry
from ..log.schema import SCHEMAS
from ..wording import counted
from .artifact import staged_artifact
from .audit import Audit
from .contract import Adapter, Batch, Destination, Event, Histogram, Point, RunInfo
from .dead_letters import DeadLetters
from .delivery import Delivery
from .destinations import without_secrets
from .gate import Gate
from .state import Counts, MirrorState

if TYPE_CHECKING:
    import plotly.graph_objects as go

# An adapter that fails in a way of its own on so many batches in a row fails on all: they wait for `sync`.
FAILURES_IN_A_ROW = 3

Say = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A mirror that may be served: the policy has been asked.

    `destination`: as `open` gets it. `info`: the run, ungated. `state`: what is on disk of the mirror, or will
    be once it is served.
    """

    adapter: Adapter
    destination: Destination
    gate: Gate
    info: RunInfo
    state: MirrorState

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"the mirror to {self.destination.backend} ({without_secrets(self.destination.address)})"


class Sender:
    """Hands an adapter everything of one mirror.

    `counts` grows with what is delivered; whoever saves the cursor keeps them, and the dead letters.

    Args:
        plan: the mirror.
        deliver: repeats what may succeed later.
        say: hears (kind, message) of what was refused.
        letters: where refused values go.
        losing_ground: True where a failure may be due to the end of the process, and so be no refusal.
    """

    def __init__(
        self, plan: Plan, deliver: Delivery, say: Say, letters: DeadLetters, losing_ground: Callable[[], bool]
    ) -> None:
        self.counts: Counts = plan.state.counts
        self._plan = plan
        self._adapter = plan.adapter
        self._info = plan.gate.info(plan.info)
        self._audit = Audit(plan.info.path, plan.state.name, plan.destination, policy=plan.gate.policy)
        self._deliver = deliver
        self._say = say
        self._letters = letters
        self._losing_ground = losing_ground
        self._failures = 0

    def open(self, memory: MutableMapping[str, str]) -> None:
        """Open the tracker. Raises Retry, MirrorError, PolicyError."""
        if self._plan.gate.allows("config"):
            config = sorted(map(str, self._info.config))
            self._record("config", len(config), ["name", "versions", *config])
        self._must("be opened", lambda: self._adapter.open(self._info, self._plan.destination, memory))

    def close(self, status: str) -> None:
        """End the tracker's run. Raises as `open` does."""
        self._must("be ended", lambda: self._adapter.close(status))

    def batches(self, batches: Sequence[Batch]) -> None:
        """Send them in order. Raises Retry, MirrorError, PolicyError; then the chunk is not delivered."""
        points = [point for batch in batches for point in batch.points]
        if points:
            self._record("metrics", len(points), _fields(points), *_steps(points))
        histograms = [histogram for batch in batches for histogram in batch.histograms]
        if histograms:
            self._record("histograms", len(histograms), _fields(histograms), *_steps(histograms))
        for batch in batches:
            self._send(batch)

    def alerts(self, events: Sequence[Event]) -> None:
        """Send alerts; one that is refused is only said."""
        if events:
            steps = [event.step for event in events if event.step is not None]
            kinds = sorted({event.kind for event in events})
            self._record("alerts", len(events), kinds, min(steps, default=None), max(steps, default=None))
        for event in events:
            if self._aside("alerts", partial(self._adapter.alert, event)):
                self.counts = replace(self.counts, alerts=self.counts.alerts + 1)

    def figures(self, figures: Sequence[tuple[str, go.Figure, int]]) -> None:
        """Send figures, each as (name, figure, step); one that is refused is only said."""
        if figures:
            steps = [step for _, _, step in figures]
            self._record("figures", len(figures), [name for name, _, _ in figures], min(steps), max(steps))
        for name, figure, step in figures:
            if self._aside("figures", partial(self._adapter.figure, name, figure, step)):
                self.counts = replace(self.counts, figures=self.counts.figures + 1)

    def artifact(self, run: Path, *, figures: bool) -> None:
        """Send a copy of the record, with or without the user's figures; one that is refused is only said."""

        def work() -> None:
            with staged_artifact(run, self._info, figures=figures) as folder:
                self._adapter.artifact(folder)

        self._record("artifacts", 1, list(SCHEMAS))
        if self._aside("artifacts", work):
            self.counts = replace(self.counts, artifacts=self.counts.artifacts + 1)

    # ---- inside --------------------------------------------------------------------------------------------

    def _send(self, batch: Batch) -> None:
        items: list[Point | Histogram] = [*batch.points, *batch.histograms]
        try:
            self._deliver(lambda: self._adapter.send(batch))
        except Reject as error:
            refused = items if error.points is None else [one for one in error.points if isinstance(one, _ITEMS)]
            self._refuse(refused, len(items), str(error), str(error))
        except (MirrorError, PolicyError):
            raise
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            self._failures += 1
            if self._losing_ground():
                raise Retry(f"it failed while the process was ending: {error!r}") from error
            if self._failures >= FAILURES_IN_A_ROW:
                raise MirrorError(f"its adapter fails on every batch:\n{text}") from error
            refused = items
            self._refuse(items, len(items), f"{error!r}", text)
        else:
            refused = []
        if not refused or len(refused) < len(items):
            self._failures = 0
        refused_points = sum(isinstance(item, Point) for item in refused)
        self.counts = replace(
            self.counts,
            points=self.counts.points + len(batch.points) - refused_points,
            histograms=self.counts.histograms + len(batch.histograms) - (len(refused) - refused_points),
            rejected=self.counts.rejected + len(refused),
        )

    def _refuse(self, refused: Sequence[Point | Histogram], of: int, reason: str, kept: str) -> None:
        self._letters.add(refused, kept)
        self._say(
            "mirror_rejected",
            f"{self._plan.title} refused {len(refused)} of {counted(of, 'value')}, which are kept with the reason in "
            f"mirrors/{self._plan.state.name}/dead-letters of the run: {reason}",
        )

    def _aside(self, channel: str, work: Callable[[], None]) -> bool:
        """Send what no value depends on; whether it was taken."""
        try:
            self._deliver(work)
        except Retry:
            raise
        except Exception as error:
            if isinstance(error, MirrorError | PolicyError) and not isinstance(error, Reject):
                raise
            told = str(error) if isinstance(error, Reject) else "".join(traceback.format_exception(error))
            self._say("mirror_rejected", f"{self._plan.title} refused one of its {channel}: {told}", cause=channel)
            return False
        return True

    def _must(self, what: str, work: Callable[[], None]) -> None:
        try:
            self._deliver(work)
        except (MirrorError, PolicyError) as error:
            if isinstance(error, Reject):
                raise MirrorError(str(error)) from error
            raise
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise MirrorError(f"it cannot {what}: {error!r}\n{text}") from error

    def _record(
        self, channel: str, rows: int, fields: Sequence[str], first: int | None = None, last: int | None = None
    ) -> None:
        self._deliver(lambda: self._audit.record(channel, rows=rows, fields=fields, first_step=first, last_step=last))


_ITEMS = (Point, Histogram)


def _fields(items: Sequence[Point | Histogram]) -> list[str]:
    """What the curves are about; a module's own name is in the tracker, not in the audit."""
    series = {id(item.series): item.series for item in items}.values()
    return sorted({one.name if one.kind == "scalar" else f"{one.site}/{one.statistic}" for one in series})


def _steps(items: Sequence[Point | Histogram]) -> tuple[int, int]:
    steps = [item.step for item in items]
    return min(steps), max(steps)

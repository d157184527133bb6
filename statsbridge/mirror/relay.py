"""One mirror at work: a thread that follows the record and hands an adapter what the policy lets out."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from ..errors import LogError, MirrorError, PolicyError, Retry, SchemaTooNew
from ..log.folder import HEARTBEAT
from ..wording import counted
from .delivery import Delivery
from .lease import Lease, LeaseLost
from .logged_figures import logged_figures
from .selector import Selector
from .sending import Plan, Sender
from .state import MirrorState
from .table_tail import READ_ATTEMPTS
from .tail import Chunk, Cursor, Tail

# Looking for new rows takes at most this share of the time of a training that makes none.
LOOKING_SHARE = 0.02

# Between two looks whether a mirror is free.
CLAIM_SECONDS = 2.0

# Of what happened after the end of a run the file of a mirror keeps the last.
LATE_KEPT = 20

# What is worth an event but no warning.
_GOOD_NEWS = ("mirror_resumed",)


class Report(Protocol):
    """Hears of a mirror: `mirror_unreachable`, `_resumed`, `_rejected`, `_stopped`, `_left_out` and the like."""

    def __call__(self, kind: str, message: str, *, cause: str, warn: bool) -> None:
        """Say it. `cause`: of those that are equal in this only the first one is a warning."""


class Relay:
    """Serves one mirror from a daemon thread of its own. Nothing it does raises into, or waits in, training.

    Args:
        plan: what to serve.
        report: hears what happens; called from the thread.
        interval: seconds between two looks for new rows, at least.
        patience: seconds without success after which to leave the rest to `sync`; None for never.
        opened: called in the thread once the tracker is open.
        waits: where another process serves the mirror, wait in the thread until it has ended or is known as dead.
    """

    def __init__(
        self,
        plan: Plan,
        report: Report,
        *,
        interval: float = 1.0,
        patience: float | None = None,
        opened: Callable[[], None] = lambda: None,
        waits: bool = False,
    ) -> None:
        self.plan = plan
        self.rows_done = 0
        self._run = plan.info.path
        self._report = report
        self._interval = interval
        self._opened = opened
        self._waits = waits
        self._memory: dict[str, str] = {}
        self._wake = threading.Event()
        self._ending: str | None = None
        self._final = False
        self._late: list[dict[str, str]] = []
        self._exiting = False
        self._told_left_out = self._told_key = False
        self._lease = Lease(
            self._run,
            plan.state,
            unwritable=lambda why: self._say("mirror_state", f"the state of {plan.title} cannot be written: {why}"),
            taken_over=lambda: self._say("mirror_stopped", f"{plan.title} is served by another process now"),
        )
        self._deliver = Delivery(
            pause=self._pause,
            may_go_on=lambda: not self._lease.given_up.is_set(),
            ending=lambda: self._ending is not None,
            trouble=self._unreachable,
            recovered=self._resumed,
            patience=patience,
        )
        self._thread = threading.Thread(target=self._serve, name=f"statsbridge-{plan.state.name}", daemon=True)

    @property
    def state(self) -> MirrorState:
        """What is on disk of the mirror."""
        return self._lease.on_disk

    @property
    def began(self) -> bool:
        """Whether this process has become the owner of the mirror."""
        return self._lease.taken

    # ---- other threads -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Become the mirror's owner and begin.

        Raises MirrorError where another process serves it and this one does not wait, LogError and OSError as for
        its file.
        """
        try:
            self._lease.take()
        except MirrorError:
            if not self._waits:
                raise
        self._thread.start()

    def begin_finish(self, status: str, *, final: bool = True, exiting: bool = False) -> None:
        """Deliver the rest, end the tracker's run as `status` (finished, failed, stopped) and stop. Never waits.

        `final`: nothing more will be written to the record. `exiting`: the process is about to end.
        """
        self._final, self._exiting = final, exiting
        self._ending = status
        self._wake.set()

    def join(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until all is done; whether it is."""
        self._thread.join(max(timeout, 0))
        return not self._thread.is_alive()

    def give_up(self, reason: str) -> None:
        """Leave the rest to `sync`, whatever the thread is doing. Waits a second at most."""
        self._lease.given_up.set()
        self._wake.set()
        self._lease.give_up(reason)

    # ---- the thread ----------------------------------------------------------------------------------------

    def _claim_when_free(self) -> bool:
        """Become the owner once no other process is; whether that came before the end of the run."""
        while not self._lease.taken and not self._lease.given_up.is_set():
            try:
                self._lease.take()
            except (MirrorError, LogError, OSError) as error:
                if self._ending is not None:
                    rest = f"deliver what it leaves with: statsbridge sync {self._run}"
                    self._say("mirror_stopped", f"{self.plan.title} could not begin: {error}; {rest}")
                    return False
                self._wake.wait(CLAIM_SECONDS)
        return self._lease.taken

    def _serve(self) -> None:
        if not self._claim_when_free():
            return
        try:
            status, reason = self._work()
        except LeaseLost:
            return
        except Retry as error:
            status, reason = "remaining", str(error)
        except (MirrorError, PolicyError, LogError) as error:
            status, reason = "stopped", str(error).strip()
        except BaseException:  # whatever it is: training goes on, and the rows are on disk
            status, reason = "stopped", traceback.format_exc().strip()
        with suppress(LeaseLost):
            if status == "stopped":
                again = f"take it up again with: statsbridge sync {self._run}"
                self._say("mirror_stopped", f"{self.plan.title} has stopped; {again}. The reason: {reason}")
            late = (*self._lease.state.late, *self._late)[-LATE_KEPT:]
            self._lease.save(owner=None, status=status, reason=reason, late=late)

    def _work(self) -> tuple[str, str | None]:
        lease = self._lease
        self._memory.update(lease.state.memory)
        sender = Sender(self.plan, self._deliver, self._say, lease.letters, lambda: self._exiting)
        sender.counts = lease.state.counts
        sender.open(self._memory)
        self._lease.save(memory=dict(self._memory))
        self._opened()
        selector = Selector(lease.state.selection)
        self._rebuild(selector)
        tail = Tail(self._run, cursor=lease.state.cursor)
        while True:
            # In this order: rows written before the ending began must be read after it.
            ending, final = self._ending, self._final
            begin = time.perf_counter()
            chunk = self._read(tail, final=final and ending is not None)
            self._count_lost(tail, sender)
            if chunk is not None:
                self._pass_on(chunk, selector, sender)
            elif ending is not None:
                return self._finish(ending, final, tail.cursor, selector, sender)
            else:
                self._pause(max(self._interval, (time.perf_counter() - begin) / LOOKING_SHARE))

    def _read(self, tail: Tail, *, final: bool) -> Chunk | None:
        for attempt in range(READ_ATTEMPTS + 1):
            try:
                return tail.read(final)
            except SchemaTooNew:
                raise
            except (LogError, OSError) as error:  # a network disk may be back in a moment
                if attempt == READ_ATTEMPTS:
                    raise LogError(f"the record cannot be read: {error}") from error
            self._pause(self._interval)
        return None

    def _count_lost(self, tail: Tail, sender: Sender) -> None:
        for text, rows in tail.lost():
            sender.counts = replace(sender.counts, lost=sender.counts.lost + rows)
            self._say("mirror_damaged_part", f"{counted(rows, 'row')} cannot be mirrored: {text}", cause=text)

    def _rebuild(self, selector: Selector) -> None:
        """Bring a new selector to where the last one was at the cursor. Sends nothing."""
        tail = Tail(self._run, until=self._lease.state.cursor)
        while (chunk := self._read(tail, final=True)) is not None:
            selector.add(self._gated(chunk))
            self._lease.beat()

    def _pass_on(self, chunk: Chunk, selector: Selector, sender: Sender) -> None:
        gated = self._gated(chunk)
        gate = self.plan.gate
        sender.batches(selector.add(gated))
        if gate.allows("alerts"):
            sender.alerts(selector.events(gated))
        self._figures(selector, sender, final=False)
        self._logged_figures(chunk, sender)
        self._lease.save(cursor=chunk.cursor, memory=dict(self._memory), counts=sender.counts)
        self.rows_done += chunk.rows
        left_out = None if self._told_left_out else selector.left_out()
        if left_out is not None:
            self._told_left_out = True
            self._say("mirror_left_out", left_out)

    def _gated(self, chunk: Chunk) -> Chunk:
        gated: list[Chunk] = []
        gate = self.plan.gate
        self._deliver(lambda: gated.append(gate.chunk(chunk)))
        if gate.key_changed and not self._told_key:
            self._told_key = True
            self._say("mirror_key_changed", f"{self.plan.title}: {gate.key_changed}")
        return gated[0]

    def _figures(self, selector: Selector, sender: Sender, *, final: bool) -> None:
        if self.plan.gate.allows("figures"):
            sender.figures(selector.figures(final))

    def _logged_figures(self, chunk: Chunk, sender: Sender) -> None:
        """What the user drew; the rows that tell of it are those before the gate, which would hide their names."""
        if not (self.plan.gate.allows("figures") and self._lease.state.selection.figures):
            return
        figures, wrong = logged_figures(self._run, chunk.events)
        for text in wrong:
            self._say("mirror_figure_lost", f"{self.plan.title}: {text}", cause=text)
        if figures and not self.plan.gate.blind:
            withheld = "figures of your own stay here: the run is restricted, or names are hashed, or fields limited"
            self._say("mirror_left_out", f"{self.plan.title}: {withheld}", cause="figures")
        elif figures:
            sender.figures(figures)

    def _finish(
        self, ending: str, final: bool, cursor: Cursor, selector: Selector, sender: Sender
    ) -> tuple[str, str | None]:
        """All rows up to `cursor` are delivered."""
        if final:
            self._figures(selector, sender, final=True)
            if self._lease.state.selection.artifact and self.plan.gate.allows("artifacts"):
                sender.artifact(self._run, figures=self.plan.gate.allows("figures") and self.plan.gate.blind)
        self._lease.save(cursor=cursor, memory=dict(self._memory), counts=sender.counts)
        try:
            sender.close(ending)
        except (MirrorError, PolicyError) as error:
            reason = f"all rows were delivered, but the tracker's run could not be ended: {error}"
            self._say("mirror_stopped", f"{self.plan.title}: {reason}")
            return "finished", reason
        self._lease.save(memory=dict(self._memory))
        return ("finished", None) if final else ("remaining", "the run was still being written")

    def _pause(self, seconds: float) -> None:
        """Sleep, but wake when the run ends or nobody waits any more."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._wake.wait(min(left, HEARTBEAT)):
                self._wake.clear()
                break
            self._lease.beat()
        self._lease.check()

    def _unreachable(self, reason: str) -> None:
        later = "The record on disk goes on; what is missing is sent later"
        self._say("mirror_unreachable", f"{self.plan.title} cannot deliver now: {reason}. {later}")

    def _resumed(self, seconds: float) -> None:
        self._say("mirror_resumed", f"{self.plan.title} delivers again, after {seconds:.0f} s")

    def _say(self, kind: str, message: str, *, cause: str = "") -> None:
        if self._ending is not None:  # the record is closed, or about to be
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._late.append({"time": now, "kind": kind, "message": message})
        self._report(kind, message, cause=f"{kind} {self.plan.state.name} {cause}", warn=kind not in _GOOD_NEWS)

"""All mirrors of a run: from what the user asked for to threads at work, and back to rest."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..backends import make_adapter, make_adapters
from ..errors import ConfigError, LogError, MirrorError, StatsBridgeError
from ..log.attempts import attempt_numbers
from ..log.runs import read_info
from ..log.schema import as_text
from ..wording import counted
from .contract import Adapter, Destination, RunInfo
from .destinations import without_secrets
from .gate import make_gate
from .policy import Policy, load_policy
from .relay import Relay, Report
from .selection import Selection
from .sending import Plan
from .state import MirrorState, load_state, mirror_name, state_file
from .tail import Cursor, Tail

# A process that ends without `finish()` is not kept longer than this.
EXIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Allowed:
    """Adapters that may send, each to its destination, under the policy that says so."""

    adapters: Sequence[Adapter]
    destinations: Sequence[Destination]
    policy: Policy


def ask_policy(adapters: Sequence[Adapter], *, restricted: bool) -> Allowed:
    """Where each adapter would send to, now, if the policy lets it. Nothing is written, no tracker imported.

    Raises PolicyError; ConfigError where two adapters have one destination, or one cannot say its own.
    """
    policy = load_policy()
    destinations: list[Destination] = []
    names: set[str] = set()
    for adapter in adapters:
        destination = destination_of(adapter)
        make_gate(policy, destination, restricted=restricted, run=None)
        name = mirror_name(destination)
        if name in names:
            raise ConfigError(
                f"backend: {destination.backend} at {without_secrets(destination.address)} is asked for twice"
            )
        names.add(name)
        destinations.append(destination)
    return Allowed(adapters, destinations, policy)


def destination_of(adapter: Adapter) -> Destination:
    """Where it would send to, now. Raises ConfigError where it cannot say."""
    try:
        return adapter.destination()
    except StatsBridgeError:
        raise
    except Exception as error:
        raise ConfigError(f"backend {adapter.backend!r} cannot say where it would send to: {error!r}") from error


def new_plan(run: Path, adapter: Adapter, destination: Destination, selection: Selection, policy: Policy) -> Plan:
    """A mirror that the run at `run` does not have yet. Raises PolicyError, LogError."""
    shown = replace(destination, address=without_secrets(destination.address))
    lacks: frozenset[str] = getattr(adapter, "lacks", frozenset())
    selection = replace(
        selection,
        histograms=selection.histograms and "histograms" not in lacks,
        figures=selection.figures and "figures" not in lacks,
        artifact=selection.artifact and "artifacts" not in lacks,
    )
    state = MirrorState(backend=destination.backend, options=adapter.options(), destination=shown, selection=selection)
    return _plan(run, adapter, destination, state, policy)


def old_plan(run: Path, state: MirrorState, policy: Policy) -> Plan:
    """A mirror of the run at `run`, to be taken up again. Raises PolicyError, UnknownBackendError, LogError."""
    adapter, destination = reopen(state)
    return _plan(run, adapter, destination, state, policy)


def reopen(state: MirrorState) -> tuple[Adapter, Destination]:
    """The adapter of a mirror and its destination, made again. Raises UnknownBackendError, ConfigError."""
    adapter = make_adapter(state.backend, options=state.options)
    destination = state.destination
    if without_secrets(destination.address) == destination.address and "***" in destination.address:
        # A password is not kept in the run's folder: whoever takes the mirror up again has it.
        now = destination_of(adapter)
        if without_secrets(now.address) == destination.address:
            destination = replace(destination, address=now.address)
    return adapter, destination


def _plan(run: Path, adapter: Adapter, destination: Destination, state: MirrorState, policy: Policy) -> Plan:
    info = read_info(run)
    restricted = bool(info.get("restricted"))
    return Plan(
        adapter=adapter,
        destination=destination,
        gate=make_gate(policy, destination, restricted=restricted, run=run),
        info=RunInfo(
            id=str(info["id"]),
            name=as_text(str(info["name"])),
            path=run,
            created=datetime.fromisoformat(info["created"]),
            config=_encodable(info.get("config") or {}),
            versions=_encodable(info.get("versions") or {}),
            restricted=restricted,
            attempt=max(attempt_numbers(run), default=0),
        ),
        state=state,
    )


def _encodable(value: Any) -> Any:
    """JSON with texts that are UTF-8, as every tracker wants them: a path in a config may hold any bytes."""
    if isinstance(value, Mapping):
        return {as_text(str(name)): _encodable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_encodable(one) for one in value]
    return as_text(value) if isinstance(value, str) else value


def remaining(run: Path, cursor: Cursor) -> int:
    """Rows on disk that a mirror at `cursor` has not delivered."""
    tail = Tail(run, cursor=cursor)
    tail.look()
    return tail.remaining()


class Mirrors:
    """The mirrors of a run that is being recorded. Made in the thread that calls `init`.

    Args:
        run: the run's folder, which must be there.
        allowed: what `ask_policy` gave.
        selection: for all of them.
        report: hears what happens to them, from their threads.
        interval: seconds between two looks for new rows, at least.
        close_writer: writes all that waits to the disk; for a process that ends without `finish`.
    """

    def __init__(
        self,
        run: Path,
        allowed: Allowed,
        selection: Selection,
        report: Report,
        *,
        interval: float,
        close_writer: Callable[[], object],
    ) -> None:
        self._run = run
        self._report = report
        self._close_writer = close_writer
        self._process = os.getpid()
        self._relays: list[Relay] = []
        for adapter, destination in zip(allowed.adapters, allowed.destinations, strict=True):
            plan = new_plan(run, adapter, destination, selection, allowed.policy)
            # After a preemption nobody may know yet that the process that served it is gone.
            waits = plan.info.attempt > 0
            self._relays.append(Relay(plan, report, interval=interval, opened=_come_first_at_exit, waits=waits))

    def start(self) -> None:
        """Begin. Raises nothing: a mirror that cannot begin is reported, and `sync` can do it later."""
        for relay in list(self._relays):
            try:
                relay.start()
            except (MirrorError, LogError, OSError) as error:
                self._relays.remove(relay)
                self._report(
                    "mirror_stopped",
                    f"{relay.plan.title} could not begin: {error}. Deliver the record later with: statsbridge sync "
                    f"{self._run} --to {_spelled(relay.plan.destination)}",
                    cause=f"mirror_stopped {relay.plan.state.name}",
                    warn=True,
                )
        _open.append(self)
        _come_first_at_exit()

    def finish(self, timeout: float, status: str, *, exiting: bool = False) -> None:
        """Let all of them deliver what is on disk, together at most `timeout` seconds; say what remains."""
        if self in _open:
            _open.remove(self)
        if self._process != os.getpid():
            return
        deadline = time.monotonic() + timeout
        for relay in self._relays:
            relay.begin_finish(status, exiting=exiting)
        for relay in self._relays:
            relay.join(deadline - time.monotonic())
        for relay in self._relays:
            if not relay.join(0):
                relay.give_up(f"it did not end within the time that the run had left ({timeout:.0f} s)")
                self._tell_rest(relay)
            # One that never got its turn has said so itself.
            elif relay.began and relay.state.status == "remaining":
                self._tell_rest(relay)

    def at_exit(self) -> None:
        """The process ends without `finish`."""
        if self._process == os.getpid():
            self._close_writer()
            self.finish(EXIT_SECONDS, "stopped", exiting=True)

    def _tell_rest(self, relay: Relay) -> None:
        state, reason = relay.state, relay.state.reason
        if not relay.began:
            reason = "another process serves it, or did until a moment ago"
            with suppress(LogError):
                state = load_state(state_file(self._run, state.name))
        rows = remaining(self._run, state.cursor)
        self._report(
            "mirror_remaining",
            f"{relay.plan.title} has not delivered {counted(rows, 'row')} of the record ({reason}). "
            f"Deliver them with: statsbridge sync {self._run}",
            cause=f"mirror_remaining {relay.plan.state.name}",
            warn=True,
        )


def _spelled(destination: Destination) -> str:
    """What `sync --to` takes for the mirror to `destination`, as far as that can be told."""
    name = mirror_name(destination)
    # The address first: the name alone means what it means only in this folder and environment.
    for spelled in (f"{destination.backend}:{without_secrets(destination.address)}", destination.backend):
        with suppress(Exception):  # not every adapter takes its address as a target, and they are anybody's
            if mirror_name(make_adapters(spelled)[0].destination()) == name:
                return spelled
    return f"{destination.backend}:TARGET, with the target that you gave in backend="


_open: list[Mirrors] = []


def _come_first_at_exit() -> None:
    """Be called before the exit handlers of trackers, which end what we still need: the last to come is first."""
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _at_exit() -> None:
    for mirrors in list(_open):
        mirrors.at_exit()


if hasattr(os, "register_at_fork"):
    # The threads are the parent's; in a child there is nothing to finish.
    os.register_at_fork(after_in_child=_open.clear)

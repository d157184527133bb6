"""One adapter, opened as a mirror opens it: in a thread of its own, from which every call must come back."""

from __future__ import annotations

import math
import queue
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

from statsbridge.errors import Reject, Retry
from statsbridge.mirror.contract import Adapter, Batch, Destination, Point, Reading, RunInfo

BOUND = 120.0
"""Seconds within which any one call must return: far beyond what a working tracker takes."""

T = TypeVar("T")
Entry = tuple[str, int, bytes]


class MirrorThread:
    """Runs calls, one after another, in one daemon thread, and waits `bound` seconds for each."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="statsbridge-kit", daemon=True).start()

    def _work(self) -> None:
        while True:
            call, answer = self._calls.get()
            try:
                answer.put((True, call()))
            except BaseException as error:  # raised again where the call was made
                answer.put((False, error))

    def call(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`; raises what it raises, and AssertionError where it does not come back."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((lambda: function(*arguments), answer))
        try:
            returned, value = answer.get(timeout=self.bound)
        except queue.Empty:
            raise AssertionError(f"{what} did not return within {self.bound:g} s") from None
        if not returned:
            raise value
        result: T = value
        return result


class Session:
    """An adapter from `open` to `close`, with the points that it has acknowledged."""

    def __init__(
        self,
        adapter: Adapter,
        run: RunInfo,
        *,
        destination: Destination | None = None,
        memory: MutableMapping[str, str] | None = None,
        bound: float = BOUND,
    ) -> None:
        self.adapter = adapter
        self.run = run
        self.destination = adapter.destination() if destination is None else destination
        self.memory: MutableMapping[str, str] = {} if memory is None else memory
        self.acknowledged: list[Point] = []
        self._thread = MirrorThread(bound)
        self.call("open", adapter.open, run, self.destination, self.memory)

    def call(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call one of the adapter's methods in the mirror's thread."""
        return self._thread.call(what, function, *arguments)

    def send(self, batch: Batch) -> None:
        """Send until it is acknowledged; what the adapter refuses for good does not count as acknowledged."""
        refused: set[int] = set()
        end = time.monotonic() + self._thread.bound
        while True:
            try:
                self.call("send", self.adapter.send, batch)
                break
            except Reject as error:
                points = batch.points if error.points is None else error.points
                refused = {id(point) for point in points}
                break
            except Retry as error:
                if time.monotonic() > end:
                    raise AssertionError(f"send asked to try again for {self._thread.bound:g} s: {error}") from error
                time.sleep(min(error.after or 0.1, 1.0))
        self.acknowledged += [point for point in batch.points if id(point) not in refused]

    def close(self, status: str = "finished") -> None:
        """Close the adapter."""
        self.call("close", self.adapter.close, status)


def read(adapter: Adapter, run: RunInfo, destination: Destination, memory: Mapping[str, str]) -> list[Reading]:
    """All that the tracker's store holds of this mirror, read by a fresh adapter in a thread of its own."""
    before = dict(memory)
    readings = MirrorThread(BOUND).call("read_back", lambda: list(adapter.read_back(run, destination, memory)))
    assert dict(memory) == before, "read_back changed the memory"
    return readings


def expected(adapter: Adapter, points: Iterable[Point]) -> list[Reading]:
    """What must lie in the store after `points` have been sent in this order."""
    wanted = [
        Reading(adapter.key(point.series), point.step, point.time, adapter.stored(point.value)) for point in points
    ]
    if adapter.keeps == "all":
        return wanted
    return list({(reading.key, reading.step): reading for reading in wanted}.values())


def compare(found: Iterable[Reading], wanted: Iterable[Reading]) -> None:
    """Raise AssertionError unless both hold the same values, bit for bit, as often, at the same recorded times.

    A tracker may keep times to the millisecond, or none (None).
    """
    found, wanted = list(found), list(wanted)
    left, right = Counter(map(_entry, found)), Counter(map(_entry, wanted))
    if left != right:
        raise AssertionError(
            f"the store holds {len(found)} values, {len(wanted)} were acknowledged;"
            f" missing: {_some(right - left)}; extra: {_some(left - right)}"
        )
    times: dict[Entry, list[int]] = {}
    for reading in wanted:
        times.setdefault(_entry(reading), []).append(reading.time or 0)
    for reading in found:
        time_, near = reading.time, times[_entry(reading)]
        if time_ is not None and not any(abs(time_ - other) <= 1000 for other in near):
            raise AssertionError(f"{reading.key!r} at step {reading.step} has the time {time_}, recorded: {near}")


def same(left: float, right: float) -> bool:
    """Whether two values are the same number, bit for bit; every NaN is the same."""
    return _bits(left) == _bits(right)


def _bits(value: float) -> bytes:
    return b"NaN" if math.isnan(value) else struct.pack("<d", value)


def _entry(reading: Reading) -> Entry:
    return reading.key, reading.step, _bits(reading.value)


def _some(entries: Counter[Entry], most: int = 5) -> str:
    shown = [
        f"{key!r} step {step} = {'NaN' if bits == b'NaN' else repr(struct.unpack('<d', bits)[0])} ({count}×)"
        for (key, step, bits), count in sorted(entries.items())[:most]
    ]
    more = len(entries) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "") if shown else "none"

"""The writer of one rank of a run: a queue, and one thread that turns it into parts."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import pyarrow as pa

from ..errors import LogError
from ..wording import counted
from .attempts import attempt_file
from .background import Compactor
from .backlog import BACKLOG_BYTES, PART_BYTES, Backlog
from .check import next_numbers
from .ending import unwatch, watch
from .failures import Failures
from .files import make_folder
from .folder import HEARTBEAT, last_attempt, this_writer, write_state, writer_file
from .following import Follower, Following
from .queued import Work, WorkQueue
from .schema import to_table
from .size import SizeLimit

# Work that waits for the writer's thread, in rows by the caller's count (work of no rows counts as one).
QUEUE_ROWS = 200_000
# For a merge under way at the end of a run to notice that it should stop: it can be done again at any time.
COMPACTOR_SECONDS = 1.0
# At the end of a run: what the work of one flush submits itself is for the next. A failure that is reported takes two.
LAST_FLUSHES = 10


@dataclass(eq=False, slots=True)
class _Request:
    """Flush; and then, where `state` is given, stop in that state."""

    state: str | None = None
    done: threading.Event = field(default_factory=threading.Event)
    succeeded: bool = False


_WORK = _Request()  # there is work: flush when the interval is over


class Writer:
    """Writes the rows of one rank of a run, from a daemon thread.

    Files appear about once each `flush_interval` seconds, also where work comes faster than it can be converted, and at
    once for urgent work, at `close`, at exit and at SIGTERM where nobody else handles it. In a forked child it does
    nothing at all.

    Nothing here raises into training. Where the disk refuses, rows wait in a bounded buffer
    (`BACKLOG_BYTES`); `on_warning` (by default `warnings.warn`) hears each cause once, from the writer's
    thread; rows that found no room are counted in `dropped` and recorded as events `rows_dropped` once
    writing works again.

    Where a later attempt has begun, because this process seemed dead, it writes nothing more: one warning.

    `attempt` goes into every row; of a run that was written before, it has to be a later one than the last, and
    numbers go on after all that any part has used.

    Raises LogError if another writer has this rank of the run, or if the run folder cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int = 0,
        attempt: int = 0,
        flush_interval: float = 1.0,
        max_bytes: int | None = None,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        self._path = Path(path)
        self._process = os.getpid()
        self._interval = flush_interval
        self._failures = Failures(lambda rows: self._backlog.add("events", rows), on_warning)
        self._identity = this_writer(rank, attempt)
        self._taken_over = False
        self._claim(rank)
        self._compactor = Compactor(self._path, rank, self._may_write)
        self._limit = SizeLimit(self._path, rank, max_bytes)
        first = next_numbers(self._path, rank)
        self._backlog = Backlog(self._path, rank, attempt, self._wrote, may_write=self._may_write, first=first)
        self._following = Following(attempt)
        self._flushed_at = self._beat_at = time.monotonic()  # when the last flush began

        self._queue = WorkQueue()
        # SimpleQueue.put may be called from a signal handler, whatever that has interrupted.
        self._requests: SimpleQueue[_Request] = SimpleQueue()
        self._awake = False
        self._closing: _Request | None = None
        self._ended = False
        # The first array makes Arrow import pandas, where that is installed. Done by our thread, others that look for
        # it meanwhile, as Plotly does, would find half of it.
        pa.array([0])
        self._thread = threading.Thread(target=self._serve, name="statsbridge-writer", daemon=True)
        self._thread.start()
        watch(self)

    def _claim(self, rank: int) -> None:
        file = writer_file(self._path, rank)
        before = last_attempt(file)
        if before is not None and before >= self._identity.attempt:
            raise LogError(f"{file} exists: rank {rank} of this run has been written already; start a new run")
        try:
            make_folder(file.parent)
            write_state(self._path, self._identity, "running")
        except OSError as error:
            raise LogError(f"cannot write {file}: {error.strerror or error}") from error

    def follow(self, follower: Follower) -> None:
        """Show `follower`, from now on and in the writer's thread, the rows of each flush; its own are written too.

        Where it raises, that is an event, and it is not asked again.
        """
        self._following.follower = follower

    # ---- the training thread -------------------------------------------------------------------------------

    def submit(self, work: Work, *, rows: int = 0, urgent: bool = False) -> bool:
        """Queue `work`; the writer's thread calls it to get {table: columns} (see `schema.to_table`).

        All its rows of one table go into one part. `rows` is about how many rows it makes. Never blocks,
        never raises. False where the work was refused: the queue is full, the writer is closed (to work itself, and
        what follows the rows, only when all that waited is written), or this is a forked child.
        """
        if self._taken_over or self._process != os.getpid() or (self._closing is not None and not self._submits_last()):
            return False
        if not self._queue.add(work, rows, QUEUE_ROWS):
            return False
        if urgent:
            self._requests.put(_Request())
        elif not self._awake:
            # Once an interval, not once a step: waking the thread costs training the interpreter lock.
            self._awake = True
            self._requests.put(_WORK)
        return True

    def _submits_last(self) -> bool:
        """Whether this is the writer's thread, which still works the queue off while the writer is being closed."""
        return threading.current_thread() is self._thread and not self._ended

    def flush(self, timeout: float | None = 10) -> bool:
        """Wait until all that was submitted so far is on disk, or recorded there as dropped.

        False where that is not so after `timeout` seconds (None: no limit), and in a forked child.
        """
        if self._process != os.getpid():
            return False
        request = self._closing or _Request()
        if request is not self._closing:
            self._requests.put(request)
        return request.done.wait(timeout) and request.succeeded

    def close(self, timeout: float = 60, state: str = "finished") -> bool:
        """Write everything and stop, waiting at most `timeout` seconds; what `flush` returns.

        `state` is what the run folder then says of this writer. Call it as often as you like.
        """
        if self._process != os.getpid():
            return False
        done = self.begin_close(state).wait(timeout)
        unwatch(self)
        return done and self._closing is not None and self._closing.succeeded

    def begin_close(self, state: str) -> threading.Event:
        """Ask the thread to write everything and stop; the event that says it has. Never waits."""
        if self._closing is None:
            self._closing = _Request(state)
            self._requests.put(self._closing)
        return self._closing.done

    @property
    def dropped(self) -> dict[str, int]:
        """Table → rows lost so far; "queue": rows, by the caller's count, of work that was refused."""
        refused = {"queue": self._queue.refused} if self._queue.refused else {}
        return {**self._backlog.dropped, **refused}

    @property
    def full(self) -> bool:
        """Whether the parts of this rank take `max_bytes`: nothing large should be submitted any more."""
        return self._limit.reached

    # ---- the writer's thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        state = None
        while state is None:
            requests = self._wait()
            # Before the queue is emptied: work that comes from now on wakes us again.
            self._awake = False
            succeeded = self._flush()
            state = next((request.state for request in requests if request.state is not None), None)
            if state is None:
                self._beat("running", every=HEARTBEAT)
                self._compactor.start_if_due()
            else:
                succeeded = self._end(succeeded)
                self._stop(state)
            for request in requests:
                request.succeeded = succeeded
                request.done.set()

    def _wait(self) -> list[_Request]:
        """Sleep until a flush is due; the requests that it will satisfy."""
        request = self._next_request(HEARTBEAT)
        while request is _WORK:
            request = self._next_request(self._flushed_at + self._interval - time.monotonic())
        requests = []
        while request is not None:
            requests.append(request)
            request = self._next_request(0)
        return requests

    def _next_request(self, timeout: float) -> _Request | None:
        try:
            return self._requests.get(timeout=max(timeout, 0))
        except Empty:
            return None

    def _wrote(self, table: str, size: int) -> None:
        self._compactor.wrote(table)
        self._limit.wrote(size)

    def _may_write(self) -> bool:
        """Whether the run is still ours: no later attempt at it has begun."""
        if not self._taken_over and os.path.exists(attempt_file(self._path, self._identity.attempt + 1)):
            self._taken_over = True
            self._failures.say(
                "taken_over", f"another process has resumed {self._path}: this one records nothing more into it"
            )
        return not self._taken_over

    def _flush(self) -> bool:
        """Convert all that is queued by now; whether it is on disk, or recorded there as dropped."""
        if not self._may_write():
            self._queue.clear()
            self._backlog.give_up()
            return False
        try:
            failure = self._work_off()
        except Exception as error:  # this thread outlives everything: a dead one would lose the rest of the run
            failure = error
            self._say_not_written(error)
        return failure is None and not self._taken_over

    def _work_off(self) -> Exception | None:
        """Convert and write all that is queued by now; why the rest is not on disk."""
        # From beginning to beginning: what has come during a long flush does not wait for yet another interval.
        self._flushed_at = began = time.monotonic()
        # First what an earlier flush could not write: where it can be now, that makes room for the rest.
        failure = self._backlog.write()
        ended = time.monotonic()
        for _ in range(len(self._queue)):
            self._convert(self._queue.take())
            # A thread that falls behind writes each interval too, lest a kill cost all that it has converted. Where
            # writing takes longer than that, half of the time is left for converting: else it would never catch up.
            overdue = time.monotonic() - ended >= max(self._interval, ended - began)
            if overdue or (failure is None and self._backlog.nbytes >= PART_BYTES):
                began = time.monotonic()
                failure = self._save()
                ended = time.monotonic()
                self._beat("running", every=HEARTBEAT)
        return self._save()

    def _save(self) -> Exception | None:
        """Write all that is converted, and show it to the follower; what has gone wrong."""
        failure = self._backlog.write()
        if failure is None and self._failures.dropped(self.dropped):
            failure = self._backlog.write()
        # After the rows are safe, before a request is: what follows from them is on disk with them.
        if self._tell_follower():
            failure = self._backlog.write() or failure
        if failure is not None:
            self._say_not_written(failure)
        return failure

    def _say_not_written(self, failure: Exception) -> None:
        waiting = f"rows wait in memory (up to {BACKLOG_BYTES >> 20} MiB) and writing is tried again"
        self._failures.say("write", f"cannot write to {self._path}: {failure}; training goes on, {waiting}")

    def _convert(self, work: Work) -> None:
        try:
            tables = work()
        except BaseException:  # SystemExit too: it would end this thread in silence
            self._failures.internal_error()
            return
        for name, columns in tables.items():
            try:
                rows = to_table(name, columns)
            except Exception:  # columns that fit no table: the work's other tables are fine
                self._failures.internal_error()
            else:
                if rows.num_rows:
                    self._backlog.add(name, rows)
                    self._following.add(name, rows)

    def _tell_follower(self) -> bool:
        """Whether rows follow from those of this flush."""
        try:
            following = {name: to_table(name, columns) for name, columns in self._following.tell().items()}
        except BaseException:  # SystemExit too, as above: the rows themselves are safe
            self._failures.internal_error()
            return True
        for name, rows in following.items():
            self._backlog.add(name, rows)
        return bool(following)

    def _beat(self, state: str, every: float) -> None:
        now = time.monotonic()
        if now - self._beat_at >= every:
            self._beat_at = now
            if not self._may_write():
                return
            with suppress(OSError):  # the rows matter; the next beat tries again
                write_state(self._path, self._identity, state)

    def _end(self, succeeded: bool) -> bool:
        """After the flush that was to be the last: write what its own work has submitted, but not for ever."""
        for _ in range(LAST_FLUSHES):
            if not self._queue:
                break
            succeeded = self._flush()
        self._ended = True
        return self._flush() if self._queue.refuse_all() else succeeded

    def _stop(self, state: str) -> None:
        lost = self._backlog.give_up()
        if lost:
            self._failures.say("lost", f"{counted(lost, 'row')} could not be written to {self._path}: lost")
        with suppress(Exception):  # parts that are covered are only in the way of plain globs
            self._compactor.stop(COMPACTOR_SECONDS)
        self._beat(state, every=0)

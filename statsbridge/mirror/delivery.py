"""Calling an adapter until it takes what it is given, or never will."""

from __future__ import annotations

import time
from collections.abc import Callable

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from ..errors import MirrorError, PolicyError, Reject, Retry

# An adapter that raises what it should not is tried so often: it may be a passing trouble of its tracker.
UNEXPECTED_ATTEMPTS = 3

LONGEST_WAIT = 30.0
# Once a run is ending its trackers are asked often: somebody waits.
LONGEST_WAIT_AT_THE_END = 1.0

_GROWING = wait_random_exponential(multiplier=0.5, max=LONGEST_WAIT)  # full jitter: many runs share one server


class Delivery:
    """Calls that are repeated while the tracker cannot be reached.

    Args:
        pause: sleeps that many seconds, or less when there is reason to hurry; may raise to end all.
        may_go_on: False ends the repeating.
        ending: whether the run is ending.
        trouble: hears why, once an outage.
        recovered: hears when an outage is over, with its seconds.
        patience: seconds without any success after which to give up; None for never.
    """

    def __init__(
        self,
        *,
        pause: Callable[[float], None],
        may_go_on: Callable[[], bool],
        ending: Callable[[], bool],
        trouble: Callable[[str], None],
        recovered: Callable[[float], None],
        patience: float | None,
    ) -> None:
        self._pause = pause
        self._may_go_on = may_go_on
        self._ending = ending
        self._trouble = trouble
        self._recovered = recovered
        self._patience = patience
        self._since: float | None = None  # the outage, by the monotonic clock
        self._unexpected = 0
        self._retrying = Retrying(
            sleep=pause,
            retry=retry_if_exception(_may_pass),
            stop=self._stop,
            wait=self._wait,
            reraise=True,
        )

    def __call__(self, work: Callable[[], None]) -> None:
        """Do `work`, again and again while it raises Retry.

        Raises what it raised last: Retry where that was given up, Reject, MirrorError, PolicyError at once,
        anything else after `UNEXPECTED_ATTEMPTS`.
        """
        self._pause(0)
        self._unexpected = 0
        try:
            self._retrying(work)
        except Reject:  # it can be reached
            self._end_outage()
            raise
        self._end_outage()

    def _end_outage(self) -> None:
        if self._since is not None:
            seconds, self._since = time.monotonic() - self._since, None
            self._recovered(seconds)

    def _stop(self, state: RetryCallState) -> bool:
        if not self._may_go_on():
            return True
        error = _error(state)
        if not isinstance(error, Retry):
            self._unexpected += 1
            return self._unexpected >= UNEXPECTED_ATTEMPTS
        if self._since is None:
            self._since = time.monotonic()
            self._trouble(str(error))
        return self._patience is not None and time.monotonic() - self._since > self._patience

    def _wait(self, state: RetryCallState) -> float:
        seconds = max(0.05, _GROWING(state))
        if self._ending():
            seconds = min(seconds, LONGEST_WAIT_AT_THE_END)
        error = _error(state)
        return max(seconds, error.after or 0.0) if isinstance(error, Retry) else seconds


def _error(state: RetryCallState) -> BaseException | None:
    return None if state.outcome is None else state.outcome.exception()


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, Retry):
        return True
    return isinstance(error, Exception) and not isinstance(error, MirrorError | PolicyError | Reject)

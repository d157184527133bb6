"""Storing many values: in requests of bounded size, several at once, and without those that MLflow refuses."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from .store import Metric, Refused, Slow, Store, TooLarge

FEWEST = 50
SUCCESSES_IN_A_ROW = 10


class Pace:
    """How many values a request takes: what MLflow allows, and fewer where that is too slow or too large."""

    def __init__(self, most: int) -> None:
        self._limit = most
        self._successes = 0
        self.most = most

    def stored(self) -> None:
        """A request succeeded: after some of them a larger one is tried."""
        self._successes += 1
        if self._successes % SUCCESSES_IN_A_ROW == 0:
            self.most = min(self._limit, self.most * 2)

    def too_slow(self) -> None:
        """A request was given up: one as large would be again."""
        self._successes = 0
        self.most = max(FEWEST, self.most // 2)

    def too_large(self, count: int) -> None:
        """A request of `count` values was too large."""
        self._limit = self.most = max(1, count // 2)


class Delivery:
    """Values on their way. What is stored is not sent again, however often `run` is called."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.refused: dict[int, str] = {}
        """Place of each value that is refused, with the reason."""
        self._metrics = metrics
        self._waiting = deque([range(len(metrics))] if metrics else ())
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []

    def run(self, store: Store, run_id: str, pace: Pace, check: Callable[[], object]) -> None:
        """Store all that is not stored yet, but for what is refused.

        A request is refused as a whole for one bad value, so it is halved until that one is found. `check` is
        called before, and raises where it is not the values that are the reason. Raises the first error of the
        store, when all requests have ended.
        """
        self._errors.clear()
        requests = sum(-(-len(places) // pace.most) for places in self._waiting)
        arguments = (store, run_id, pace, check)
        # Daemons, unlike the threads of concurrent.futures: a request that hangs must not keep the process alive.
        helpers = [
            threading.Thread(target=self._work, args=arguments, name="statsbridge-mlflow", daemon=True)
            for _ in range(min(store.at_once, requests) - 1)
        ]
        for helper in helpers:
            helper.start()
        self._work(*arguments)
        for helper in helpers:
            helper.join()
        if self._errors:
            raise self._errors[0]

    def _work(self, store: Store, run_id: str, pace: Pace, check: Callable[[], object]) -> None:
        while (places := self._take(pace.most)) is not None:
            try:
                self._log(places, store, run_id, pace, check)
            except BaseException as error:  # in a helper it would end unseen: the sending thread raises it
                self._waiting.appendleft(places)
                self._errors.append(error)

    def _take(self, most: int) -> range | None:
        with self._lock:
            if self._errors or not self._waiting:
                return None
            places = self._waiting.popleft()
            if len(places) > most:
                self._waiting.appendleft(places[most:])
            return places[:most]

    def _log(self, places: range, store: Store, run_id: str, pace: Pace, check: Callable[[], object]) -> None:
        try:
            store.log_metrics(run_id, [self._metrics[place] for place in places])
        except Slow:
            pace.too_slow()
            raise
        except Refused as error:
            if isinstance(error, TooLarge):
                pace.too_large(len(places))
            else:
                check()
            if len(places) == 1:
                self.refused[places[0]] = str(error)
            else:
                middle = len(places) // 2
                self._waiting.extendleft((places[middle:], places[:middle]))
        else:
            pace.stored()

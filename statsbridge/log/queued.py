"""Work on its way from the training to the writer's thread."""

import threading
from collections import deque
from collections.abc import Callable, Mapping

from .schema import Columns

Work = Callable[[], Mapping[str, Columns]]


class WorkQueue:
    """Any thread adds, also from a signal handler; one thread takes.

    Work weighs as many rows as its caller says that it makes, and at least one.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Work]] = deque()
        # Reentrant, because a signal handler of the user's may add while adding is under way.
        self._counting = threading.RLock()
        self._given = 0
        self._taken = 0
        self.refused = 0  # rows

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: Work, rows: int, limit: int) -> bool:
        """Queue `work`; False, and counted, where then more than `limit` rows would wait."""
        weight = max(rows, 1)
        with self._counting:
            if self._given - self._taken + weight > limit and self._waiting:
                self.refused += weight
                return False
            self._given += weight
        self._waiting.append((weight, work))
        return True

    def take(self) -> Work:
        """The work that has waited longest. Raises IndexError where there is none."""
        weight, work = self._waiting.popleft()
        self._taken += weight
        return work

    def refuse_all(self) -> bool:
        """Count what waits as refused; whether there was any."""
        some = bool(self._waiting)
        while self._waiting:
            weight, _ = self._waiting.popleft()
            with self._counting:
                self._taken += weight
                self.refused += weight
        return some

    def clear(self) -> None:
        """Forget what waits."""
        while self._waiting:
            self.take()

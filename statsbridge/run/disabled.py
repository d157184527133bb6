"""What `init()` returns where `$STATSBRIDGE_DISABLED` is 1."""

from __future__ import annotations

from .recording import Run


class DisabledRun(Run):
    """A run that does nothing, for `$STATSBRIDGE_DISABLED=1`."""

    def __init__(self) -> None:
        self._finished = True

    @property
    def path(self) -> None:
        """There is no folder."""

    @property
    def id(self) -> None:
        """There is no run."""

    def __getstate__(self) -> dict[str, object]:
        return {"_finished": True}

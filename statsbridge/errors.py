"""The errors and the warning that statsbridge raises. A leaf: imports nothing of ours."""

from collections.abc import Sequence


class StatsBridgeError(Exception):
    """Base of every error raised by statsbridge. Never raised from inside a training step."""


class ConfigError(StatsBridgeError, ValueError):
    """An argument of `init()`, of a command or of an offline function is wrong; says what to do."""


class UnknownBackendError(StatsBridgeError, ValueError):
    """A backend that is not installed; names what is, and the extra to install."""


class LogError(StatsBridgeError):
    """A run on disk cannot be read or written."""


class DamagedPart(LogError):  # noqa: N818 - the name says what is wrong, as KeyboardInterrupt does
    """One part of a run is unreadable or differs from its checksum."""


class SchemaTooNew(LogError):  # noqa: N818
    """A run was written by a newer statsbridge than the one reading it."""


class PolicyError(StatsBridgeError):
    """The policy in force forbids it; names the rule and the file that holds it."""


class MirrorError(StatsBridgeError):
    """A mirror cannot go on by itself: wrong credentials, a run that does not exist. Trying again will not help."""


class Retry(MirrorError):  # noqa: N818
    """The tracker cannot be reached now. `after`: seconds that it asked to wait, None where it did not say."""

    def __init__(self, reason: str, *, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Reject(MirrorError):  # noqa: N818
    """The tracker will never take these points; all others of the batch have been taken.

    `points`: what is refused (points or histograms of the batch, None for all of them).
    """

    def __init__(self, reason: str, points: Sequence[object] | None = None) -> None:
        super().__init__(reason)
        self.points = points


class StatsBridgeWarning(UserWarning):
    """Something could not be recorded. Training goes on; each cause is said once a run."""

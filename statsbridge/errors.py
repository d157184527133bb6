"""The errors and the warning that statsbridge raises. A leaf: imports nothing of ours."""


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


class StatsBridgeWarning(UserWarning):
    """Something could not be recorded. Training goes on; each cause is said once a run."""

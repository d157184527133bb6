"""statsbridge: statistics of every module of a PyTorch model, in data-flow order, on your own disk.

Importing it imports neither torch nor pyarrow nor a tracker: the names below are loaded when first used.
"""

from typing import TYPE_CHECKING, Any

from .errors import (
    ConfigError,
    DamagedPart,
    LogError,
    MirrorError,
    PolicyError,
    Reject,
    Retry,
    SchemaTooNew,
    StatsBridgeError,
    StatsBridgeWarning,
    UnknownBackendError,
)

if TYPE_CHECKING:
    from .collect.sampling import Sampling
    from .log import RunData, load
    from .mirror import Selection
    from .run import Run, init
    from .tracing import trace

__version__ = "0.1.0"

_LAZY = {
    "init": ".run",
    "Run": ".run",
    "Sampling": ".collect.sampling",
    "load": ".log",
    "RunData": ".log",
    "Selection": ".mirror",
    "trace": ".tracing",
}

__all__ = [
    "ConfigError",
    "DamagedPart",
    "LogError",
    "MirrorError",
    "PolicyError",
    "Reject",
    "Retry",
    "Run",
    "RunData",
    "Sampling",
    "SchemaTooNew",
    "Selection",
    "StatsBridgeError",
    "StatsBridgeWarning",
    "UnknownBackendError",
    "__version__",
    "init",
    "load",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

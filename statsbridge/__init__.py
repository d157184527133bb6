"""statsbridge: statistics of every module of a PyTorch model, in data-flow order, on your own disk.

Importing it imports neither torch nor pyarrow nor a tracker: the names below are loaded when first used.
"""

from typing import TYPE_CHECKING, Any

from .errors import (
    ConfigError,
    DamagedPart,
    LogError,
    SchemaTooNew,
    StatsBridgeError,
    StatsBridgeWarning,
    UnknownBackendError,
)

if TYPE_CHECKING:
    from .collect.sampling import Sampling
    from .log import RunData, load
    from .run import Run, init

__version__ = "0.1.0"

_LAZY = {
    "init": ".run",
    "Run": ".run",
    "Sampling": ".collect.sampling",
    "load": ".log",
    "RunData": ".log",
}

__all__ = [
    "ConfigError",
    "DamagedPart",
    "LogError",
    "Run",
    "RunData",
    "Sampling",
    "SchemaTooNew",
    "StatsBridgeError",
    "StatsBridgeWarning",
    "UnknownBackendError",
    "__version__",
    "init",
    "load",
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

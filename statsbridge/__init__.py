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
    from .analyze.baseline import Baseline, baseline
    from .analyze.comparison import Comparison, compare
    from .analyze.curves import Curves, curves
    from .analyze.diagnosis import diagnose
    from .analyze.findings import Finding
    from .analyze.run_data import RunData, load
    from .analyze.thresholds import Thresholds
    from .collect.sampling import Sampling
    from .mirror import Selection
    from .run import Run, init
    from .tracing import trace

__version__ = "0.1.0"

_LAZY = {
    "Baseline": ".analyze.baseline",
    "Comparison": ".analyze.comparison",
    "Curves": ".analyze.curves",
    "Finding": ".analyze.findings",
    "Thresholds": ".analyze.thresholds",
    "baseline": ".analyze.baseline",
    "compare": ".analyze.comparison",
    "curves": ".analyze.curves",
    "diagnose": ".analyze.diagnosis",
    "init": ".run",
    "Run": ".run",
    "Sampling": ".collect.sampling",
    "load": ".analyze.run_data",
    "RunData": ".analyze.run_data",
    "Selection": ".mirror",
    "trace": ".tracing",
}

__all__ = [
    "Baseline",
    "Comparison",
    "ConfigError",
    "Curves",
    "DamagedPart",
    "Finding",
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
    "Thresholds",
    "UnknownBackendError",
    "__version__",
    "baseline",
    "compare",
    "curves",
    "diagnose",
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

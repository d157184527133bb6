"""The conformance kit: what any adapter must show, for its author's own tests. Needs no test framework.

Each check takes `make`, which returns a new adapter each time it is called, always for the same place, and `folder`,
an empty folder for the made-up run's own files. A check raises AssertionError with what was missing, extra or
different, sends made-up points of a run of its own, and compares what `read_back` finds with what was sent.
"""

from .checks import (
    check_adapter,
    check_channels,
    check_key,
    check_names,
    check_order,
    check_replay,
    check_steps,
    check_values,
)
from .crash import check_crash, check_destination, check_restricted
from .made import HARD_NAMES, HARD_VALUES, made_batches, made_event, made_histogram, made_point, made_run, made_series
from .outage import check_outage
from .session import Session, compare, expected, read

__all__ = [
    "HARD_NAMES",
    "HARD_VALUES",
    "Session",
    "check_adapter",
    "check_channels",
    "check_crash",
    "check_destination",
    "check_key",
    "check_names",
    "check_order",
    "check_outage",
    "check_replay",
    "check_restricted",
    "check_steps",
    "check_values",
    "compare",
    "expected",
    "made_batches",
    "made_event",
    "made_histogram",
    "made_point",
    "made_run",
    "made_series",
    "read",
]

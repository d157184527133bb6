"""The choices that a message names."""

import difflib
from collections.abc import Sequence

_SHOWN = 20  # choices in a message that must stay readable


def choices(wanted: str, there: Sequence[object]) -> str:
    """What there is, what resembles `wanted` first."""
    names = [str(value) for value in there]
    close = difflib.get_close_matches(wanted, names, n=5, cutoff=0.5)
    ordered = close + [name for name in names if name not in close]
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(repr(name) for name in ordered[:_SHOWN]) + more

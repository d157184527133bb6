"""The message for a word that names nothing: what was meant, and what there is."""

import difflib
from collections.abc import Iterable

from statsbridge.errors import ConfigError


def unknown_choice(what: str, given: object, choices: Iterable[object], shown: int = 12) -> ConfigError:
    """The error for a word that is none of `choices`: one line, the likeliest choices first."""
    valid = list(dict.fromkeys(str(choice) for choice in choices))
    close = difflib.get_close_matches(str(given), valid, n=3, cutoff=0.5)
    ordered = close + [choice for choice in valid if choice not in close]
    hint = f"did you mean {close[0]}? " if close else ""
    more = f" and {len(ordered) - shown} more" if len(ordered) > shown else ""
    return ConfigError(f"unknown {what} {given!s}: {hint}Choices: {', '.join(ordered[:shown])}{more}")

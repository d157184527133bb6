"""Names as MLflow takes them: renamed where they must be, and never two of ours to one of MLflow's."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

PREFIX = "statsbridge/"
"""Before every metric and parameter, so that none can be one of the user's."""

LONGEST_KEY = 250
LONGEST_PARAMETER = 6000
LONGEST_TAG = 5000

# MLflow takes a colon too, but not where its server runs on Windows.
_NOT_ALLOWED = re.compile(r"[^/\w.\- ]| $")
_HASH_DIGITS = 16
_LOOKS_HASHED = re.compile(rf"-[0-9a-f]{{{_HASH_DIGITS}}}$")


@lru_cache(maxsize=65536)
def key(name: str) -> str:
    """The name of a metric or parameter: `statsbridge/<name>`, as `plain` makes it."""
    return plain(PREFIX + name)


def plain(name: str) -> str:
    """`name` in letters, digits, `_ - . /` and spaces, at most 250 of them, with no empty, `.` or `..` part.

    Where that changes it, 64 bits of a hash of the whole name follow. A name that already ends like such a hash
    gets one too: so names differ after it wherever they differed before.
    """
    parts = _NOT_ALLOWED.sub("_", name).split("/")
    made = "/".join("_" * max(1, len(part)) if part in {"", ".", ".."} else part for part in parts)
    if made == name and len(name) <= LONGEST_KEY and not _LOOKS_HASHED.search(name):
        return name
    # Surrogates that belong to no character are part of a name all the same.
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_HASH_DIGITS // 2).hexdigest()
    return f"{made[: LONGEST_KEY - 1 - _HASH_DIGITS].rstrip('/ ')}-{digest}"


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """A configuration as MLflow's flat parameters: names joined with dots, values as text, cut at 6,000 characters."""
    made: dict[str, str] = {}
    for path, value in _leaves(config, ()):
        name = key(".".join(path))
        # {"a": {"b": 1}, "a.b": 2}: the second needs another name.
        made[name if name not in made else key(json.dumps(path))] = value[:LONGEST_PARAMETER]
    return made


def _leaves(value: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, (*path, str(name)))
    elif isinstance(value, Mapping | list | tuple):
        yield path, json.dumps(value, default=str, ensure_ascii=False)
    else:
        yield path, str(value)

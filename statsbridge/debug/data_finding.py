"""What is wrong with the data: the record that the rules on inputs, labels and splits make."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from ..analyze.findings import Severity

SHOWN = 5
_COLUMNS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFinding:
    """One thing that is wrong with the data.

    `kind`: which rule. `severity`: `"critical"` where training on it fails or learns something false. `split`:
    `"training"`, `"validation"` or `"test"`. `part`: path of the input or target, `""` where a batch has just one, or
    it concerns the split. `value` against `threshold`: what was measured, and the limit. `indices`: some samples.
    """

    kind: str
    severity: Severity
    split: str
    message: str
    suggestion: str
    part: str = ""
    value: float | None = None
    threshold: float | None = None
    indices: tuple[int, ...] = ()


def listed(items: Iterable[object], shown: int = SHOWN) -> str:
    """Items with commas between, the first few and how many more."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - shown} more" if len(texts) > shown else ""
    return ", ".join(texts[:shown]) + more


def named(part: str, word: str) -> str:
    """`input`, or `input 'image.left'` where there are several."""
    return f"{word} {part!r}" if part else word


def wrapped(text: str, indent: str = "") -> list[str]:
    """The lines of a text, long ones broken; what goes on is set two columns further in."""
    lines: list[str] = []
    for line in text.splitlines():
        further = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(line, _COLUMNS, initial_indent=indent, subsequent_indent=indent + further) or [""]
    return lines

"""One line on the terminal while a test runs; silent where standard error is a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

_INTERVAL = 0.1  # seconds between two looks of the line


def progress(items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
    """The items one by one, while a line counts them; it is gone when they end, however they end.

    `total`: how many there will be; None where that is not known.
    """
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield from items
        return
    last, width = 0.0, 0
    try:
        for number, item in enumerate(items):
            now = time.monotonic()
            if now - last >= _INTERVAL:
                text = f"{label}: {number}" + ("" if total is None else f" of {total}")
                stream.write("\r" + text.ljust(width))
                stream.flush()
                last, width = now, len(text)
            yield item
    finally:
        stream.write("\r" + " " * width + "\r")
        stream.flush()

"""A series of numbers in a few characters, for tables in a terminal and in a log."""

import math
from collections.abc import Sequence

import numpy as np

GLYPHS = "▁▂▃▄▅▆▇█"
GAP = " "
NONFINITE = "×"
# A constant has no scale of its own: the middle says neither low nor high.
CONSTANT = GLYPHS[3]


def sparkline(values: Sequence[float | None], width: int = 8) -> str:
    """Draw a series as at most `width` characters, one glyph a cell, lowest value ▁ and highest █.

    Args:
        values: the series in the order of its steps; None is a missing value, NaN and infinities are kept.
        width: the most cells to draw; a longer series is cut into `width` runs of neighbours.

    A cell that stands for several values shows the one farthest from the median of the whole series, so a
    single spike or dip is never averaged away. A cell with a NaN or an infinity in it is ×, a cell without
    any value is a space, and a constant series is a line at half height.

    Raises:
        ValueError: `width` is below 1.
    """
    if width < 1:
        raise ValueError(f"a sparkline needs at least one cell, not {width}")
    if not values:
        return ""
    present = np.array([value is not None for value in values])
    # Halves, because the difference of two finite numbers may overflow.
    numbers = np.array([math.nan if value is None else value / 2 for value in values], dtype=np.float64)
    finite = numbers[np.isfinite(numbers)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    glyphs = GLYPHS if high > low else CONSTANT
    levels = (numbers - low) / (high - low) if high > low else numbers - low
    median = float(np.median(levels[np.isfinite(levels)])) if finite.size else 0.0
    cells = np.array_split(np.arange(len(values)), min(width, len(values)))
    return "".join(_glyph(levels[cell], present[cell], median, glyphs) for cell in cells)


def _glyph(levels: np.ndarray, present: np.ndarray, median: float, glyphs: str) -> str:
    if not present.any():
        return GAP
    finite = np.isfinite(levels)
    if (present & ~finite).any():
        return NONFINITE
    extreme = levels[finite][np.argmax(np.abs(levels[finite] - median))]
    return glyphs[min(int(extreme * len(glyphs)), len(glyphs) - 1)]

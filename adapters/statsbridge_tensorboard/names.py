"""Tags. One tag of TensorBoard holds one kind of data, so that a curve and a histogram of one name need two."""

from __future__ import annotations

from statsbridge.mirror import Series

HISTOGRAM = " (histogram)"
TEXT = " (text)"
SCALAR = " (scalar)"


def tag_of(series: Series) -> str:
    """The curve's own name; ` (scalar)` follows where that ends as the tags of something else do."""
    name = series.name
    return name + SCALAR if name.endswith((HISTOGRAM, TEXT, SCALAR)) else name

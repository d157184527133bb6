"""The figures that the user logged, as a tracker gets them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from ..errors import LogError
from ..log.figures import stored_figures

if TYPE_CHECKING:
    import plotly.graph_objects as go

#: Our own figures begin so: one of the user's must not take the place of theirs.
_OURS = "heatmap/"


def logged_figures(run: Path, events: pa.Table) -> tuple[list[tuple[str, go.Figure, int]], list[str]]:
    """The figures that these rows of `events`, of rank 0, tell of, as (name, figure, step); and what went wrong.

    The second says of each figure that cannot be shown why.
    """
    stored = stored_figures(run, events, rank=0)
    if not stored:
        return [], []
    if find_spec("plotly") is None:
        return [], [f"{len(stored)} figures are not sent: plotly is not installed (pip install 'statsbridge[figures]')"]
    import plotly.graph_objects as go

    found, wrong = [], []
    for one in stored:
        try:
            figure = go.Figure(one.read())
        except (LogError, ValueError) as error:
            wrong.append(f"figure {one.name!r} is not sent: {error}")
        else:
            name = f"~{one.name}" if one.name.startswith((_OURS, "~")) else one.name
            found.append((name, figure, one.step or 0))
    return found, wrong

"""W&B's names of curves, histograms and figures: different for different ones, and never the user's."""

from __future__ import annotations

import hashlib
import json
import re

import numpy as np
import numpy.typing as npt

from statsbridge.mirror import Event

PREFIX = "statsbridge/"
"""Before every key of ours in a run of the user's."""

STEP = PREFIX + "step"
"""In a run of the user's: the key that holds our training step."""

MOST_BINS = 512
"""Bins of a histogram that W&B's client takes."""

_RESERVED = ("_", "~", "histograms/", "figures/")  # W&B's own keys begin with "_"; the others are ours
_FIGURE = re.compile(r"[^\w ./×-]|\.\.")


def series_key(name: str, *, attached: bool) -> str:
    """W&B's key of the curve `name`: the name itself, after "~" where W&B or another of our keys would clash."""
    try:
        name.encode()
    except UnicodeEncodeError:
        key = "~" + json.dumps(name)  # a lone surrogate cannot be stored; no other key begins with ~"
    else:
        reserved = not name or name.startswith(_RESERVED) or (attached and name == "step")
        key = "~" + name if reserved else name
    return PREFIX + key if attached else key


def histogram_key(name: str, *, attached: bool) -> str:
    """W&B's key of the histogram `name`."""
    inner = series_key(name, attached=False)
    return f"{PREFIX if attached else ''}histograms/{inner}"


def figure_key(name: str, *, attached: bool) -> str:
    """W&B's key of the figure `name`, of which W&B makes a file name: other characters become "_" and a hash."""
    plain = _FIGURE.sub("_", name)[:120]
    if plain != name:
        plain += "-" + hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{PREFIX if attached else ''}figures/{plain}"


def histogram_value(counts: npt.NDArray[np.int64], edges: npt.NDArray[np.float64]) -> tuple[list[int], list[float]]:
    """Counts and edges as W&B takes them: at most `MOST_BINS` bins, finite edges.

    Neighbouring bins are added together where there are more; an infinite outer edge becomes twice its neighbour.
    """
    group = -(-len(counts) // MOST_BINS)
    if group > 1:
        starts = np.arange(0, len(counts), group)
        counts, edges = np.add.reduceat(counts, starts), np.append(edges[starts], edges[-1])
    finite = [float(edge) for edge in edges]
    if len(finite) > 1:
        finite[0] = _finite(finite[0], finite[1])
        finite[-1] = _finite(finite[-1], finite[-2])
    return [int(count) for count in counts], finite


def _finite(edge: float, neighbour: float) -> float:
    return edge if np.isfinite(edge) else 2 * neighbour


def alert_title(event: Event) -> str:
    """What happened, and where."""
    return f"{event.kind}: {event.module}" if event.module else event.kind


def alert_text(event: Event) -> str:
    """The message, and below it the fields that have a value."""
    names = ("step", "module", "site", "tensor", "value", "threshold")
    fields = [f"{name}: {getattr(event, name)}" for name in names if getattr(event, name) not in (None, "")]
    return "\n".join([event.message, *fields])

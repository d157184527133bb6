"""The mirrors: trackers follow the local record, under a policy, and can be checked against it."""

from .contract import CHANNELS, Adapter, Batch, Destination, Event, Histogram, Point, Reading, RunInfo, Series
from .selection import Selection

__all__ = [
    "CHANNELS",
    "Adapter",
    "Batch",
    "Destination",
    "Event",
    "Histogram",
    "Point",
    "Reading",
    "RunInfo",
    "Selection",
    "Series",
]

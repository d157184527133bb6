"""How large a record is, how fast it grows, and whether it has grown large enough."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from .parts import list_parts
from .reader import RunData
from .schema import SCHEMAS

_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Growth:
    """The size of all parts of a run in bytes, and the seconds of training that they are about."""

    bytes: int
    seconds: float

    @property
    def bytes_a_day(self) -> float | None:
        """What a day of this training would take; None where there is less than a second of it to go by."""
        return self.bytes * _DAY / self.seconds if self.seconds >= 1 else None


def growth(data: RunData) -> Growth:
    """How much is on disk, and for how long a training: from the first to the last step of each attempt."""
    times = data.scalars.select(["attempt", "time"]).group_by("attempt").aggregate([("time", "min"), ("time", "max")])
    spans = pc.subtract(times["time_max"].cast(pa.int64()), times["time_min"].cast(pa.int64()))
    seconds = (pc.sum(spans).as_py() or 0) / 1e6
    return Growth(sum(part.size for table in SCHEMAS for part in list_parts(data.path, table)), seconds)


class SizeLimit:
    """Whether the parts of one rank take `limit` bytes (None: no limit). Told of each part by the writer's thread.

    Once `reached`, it stays so: rows that come and go as parts are merged would be of no use to anybody.
    """

    def __init__(self, run: Path, rank: int, limit: int | None) -> None:
        self._run = run
        self._rank = rank
        self._limit = limit
        self._bytes = 0
        self.reached = False
        if limit is not None:
            self.wrote(self._on_disk())

    def wrote(self, size: int) -> None:
        """Some part of `size` bytes is on disk."""
        self._bytes += size
        if self._limit is not None and self._bytes >= self._limit and not self.reached:
            # What has been merged since takes less than it did.
            self._bytes = self._on_disk()
            self.reached = self._bytes >= self._limit

    def _on_disk(self) -> int:
        parts = (part for table in SCHEMAS for part in list_parts(self._run, table))
        return sum(part.size for part in parts if part.rank == self._rank)

"""What the adapter needs of an MLflow store, by REST or by MLflow's own client, and how either fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from statsbridge.errors import MirrorError, Reject, Retry


class Metric(NamedTuple):
    """One value as MLflow keeps it. `time`: milliseconds since the epoch."""

    key: str
    value: float
    time: int
    step: int


@dataclass(frozen=True, slots=True)
class RunState:
    """A run as it is in the store. `deleted`: in MLflow's trash, where it takes no values."""

    id: str
    status: str
    deleted: bool
    artifacts: str
    tags: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    metrics: frozenset[str] = frozenset()


class Refused(Reject):
    """The store will not take this request as it is, however often it is made."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, points=())


class TooLarge(Refused):
    """The request is too large for the server, or for a proxy before it."""


class NotFoundError(MirrorError):
    """There is no such run or experiment."""


class Slow(Retry):
    """The store did not answer in time: smaller requests may pass."""


class Store(Protocol):
    """Runs in one MLflow store. Methods raise `Refused`, `NotFoundError`, `TooLarge` and the errors of an adapter."""

    at_once: int
    """How many requests it may be given at the same time."""

    def run(self, run_id: str) -> RunState:
        """The run."""

    def experiment(self, name: str) -> str:
        """The id of the experiment called `name`, which is made if it does not exist."""

    def find_run(self, experiment: str, tags: Mapping[str, str]) -> str | None:
        """The id of a run with all these tags."""

    def create_run(self, experiment: str, name: str, *, start: int, tags: Mapping[str, str]) -> str:
        """Make a run that began at `start`, milliseconds since the epoch; returns its id."""

    def log_metrics(self, run_id: str, metrics: Sequence[Metric]) -> None:
        """Store up to 1,000 values, all or none."""

    def log_parameters(self, run_id: str, parameters: Mapping[str, str]) -> None:
        """Store parameters that the run does not have yet."""

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags, in place of those of the same names."""

    def set_status(self, run_id: str, status: str, *, end: int | None) -> None:
        """Set the run's status, and when it ended, in milliseconds since the epoch."""

    def history(self, run_id: str, key: str) -> Iterator[Metric]:
        """All values of one metric."""

    def upload(self, run: RunState, file: Path, path: str) -> None:
        """Store a file as `path` among the run's artifacts."""

    def own_artifacts(self, run: RunState) -> bool:
        """Whether the run's artifacts lie at the store's own address, not at a third place."""


def tag_filter(tags: Mapping[str, str]) -> str:
    """A search for runs with these tags, whose values hold no quotes."""
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())

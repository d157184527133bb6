"""Which steps of a run are sampled, and which sites: as `init` was told, until somebody asks for something else."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..collect.sampling import Sampling
from ..log.control import Wish


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds at a time. `stopped`: no step is sampled, whatever `sampling` says."""

    sampling: Sampling
    sites: frozenset[str]
    stopped: bool = False

    def __str__(self) -> str:
        if self.stopped:
            return "no step is sampled"
        every = int(self.sampling.every)
        return "every step is sampled" if every == 1 else f"every {every} steps one is sampled"


class Schedule:
    """Decides for each iteration whether it is sampled. Used by the training thread only."""

    def __init__(self, sampling: Sampling, sites: frozenset[str]) -> None:
        self.now = self._usual = Settings(sampling, sites)
        self._back_at: int | None = None
        self._burst_until = 0

    def sampled(self, iteration: int) -> bool:
        """Whether the step with this iteration number is sampled."""
        if self.now.stopped:
            return False
        return iteration < self._burst_until or self.now.sampling.sampled(iteration)

    def grant(self, wish: Wish, iteration: int) -> None:
        """Do as was asked, from this iteration on: for a while, or for good."""
        sampling, sites = self._usual.sampling, self._usual.sites
        if wish.every is not None:
            sampling = replace(sampling, every=wish.every)
        self.now = Settings(sampling, sites if wish.sites is None else frozenset(wish.sites), wish.stop)
        if wish.steps is None:
            self._usual, self._back_at = self.now, None
        else:
            self._back_at = iteration + wish.steps

    def go_back(self, iteration: int) -> bool:
        """Return to what held before, where the time of a wish is over; whether that was so."""
        if self._back_at is None or iteration < self._back_at:
            return False
        self.now, self._back_at = self._usual, None
        return True

    def burst(self, iteration: int) -> int:
        """Sample the next steps too, from this iteration on; how many, 0 where a burst is under way."""
        if self.now.stopped or iteration < self._burst_until:
            return 0
        length = int(self.now.sampling.burst)
        self._burst_until = iteration + length
        return length

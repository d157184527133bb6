"""What there is to choose from in a run: sites, sampled steps, modules, scalars. Reads a few columns, no numbers."""

from __future__ import annotations

import glob
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...analyze.profiles import STATISTICS
from ...analyze.run_data import RunData
from ...errors import ConfigError
from ...log.attempts import Superseded, read_attempts
from ...log.parts import Part, glance, live_parts

ROOT = "(model)"
"""What the root module, whose path is empty, is called."""

_KEPT_RUNS = 64
_OWN_SCALARS = frozenset({"grad_norm", "grad_norm_applied", "param_norm", "step_time", "update_ratio"})


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """One module as it was traced last. `depth` and `order` are None where it was never called."""

    path: str
    type: str
    parent: str
    depth: int | None
    order: int | None
    calls: int


class Facts:
    """The choices that a run offers, each found out when it is first asked for."""

    def __init__(self, data: RunData, steps: StepsOfParts) -> None:
        self._data = data
        self._steps_of_parts = steps

    @property
    def sites(self) -> list[str]:
        """The sites that were recorded, in the order in which a training step comes by them."""
        return list(self._data.sites)

    @cached_property
    def steps(self) -> npt.NDArray[np.int64]:
        """The sampled steps, ascending."""
        return self._steps_of_parts.read(self._data.path)

    def nearest_step(self, step: int | None) -> int | None:
        """The sampled step nearest to `step`; None, for the last one, where that is None or nothing was sampled."""
        if step is None or len(self.steps) == 0:
            return None
        return int(self.steps[np.argmin(np.abs(self.steps - step))])

    @cached_property
    def modules(self) -> dict[str, ModuleFacts]:
        """Path → module, in data-flow order; what was never called comes last."""
        table = self._data.modules
        columns = ("module", "type", "parent", "depth", "order", "call")
        calls: dict[str, int] = {}
        found: dict[str, ModuleFacts] = {}
        for path, kind, parent, depth, order, call in zip(*(table[name].to_pylist() for name in columns), strict=True):
            calls[path] = max(calls.get(path, 0), call or 0)
            if not call:
                found[path] = ModuleFacts(path, kind or "", parent or "", depth, order, 1)
        inside = sorted(found.values(), key=flow)
        return {
            one.path: ModuleFacts(one.path, one.type, one.parent, one.depth, one.order, calls[one.path] + 1)
            for one in inside
        }

    def tensors(self, module: str, site: str) -> list[str]:
        """The tensors of one module at one site."""
        try:
            rows = self._data.select(modules=[glob_of(module)], sites=site, columns=["tensor"])
        except ConfigError:
            return []
        return [name or "" for name in pc.unique(rows["tensor"].cast(pa.string())).to_pylist()]

    def module_in(self, text: str) -> str | None:
        """The module that a label of a picture names, alone or with a tensor, a call or its depth; None for none."""
        name = re.sub(r"^\d+ · ", "", html.unescape(text))
        for known in (name, re.sub(r" call \d+$", "", name)):
            if known == ROOT and "" in self.modules:
                return ""
            while known:
                if known in self.modules:
                    return known
                known = known.rpartition(".")[0]
        return None

    @cached_property
    def scalars(self) -> list[str]:
        """The names of the scalars: the loss first, the user's next, then what is recorded by itself."""
        names = [str(name) for name in pc.unique(self._data.scalars["name"].cast(pa.string())).to_pylist()]
        return sorted(names, key=lambda name: (name != "loss", name in _OWN_SCALARS or name.startswith("lr/")))


class StepsOfParts:
    """The sampled steps of runs. A part never changes: of each the steps are read once, however often a run grows."""

    def __init__(self) -> None:
        self._known: dict[Path, dict[str, npt.NDArray[np.int64]]] = {}

    def read(self, run: Path) -> npt.NDArray[np.int64]:
        """The sampled steps of the run, of its lowest rank, that no later attempt has superseded; ascending."""
        superseded = Superseded(read_attempts(run))
        parts = live_parts(run, "stats")
        before = self._known.get(run, {})
        known = {}
        for part in parts:
            if part.rank == parts[0].rank:
                # What counts of a part changes with each attempt.
                key = f"{part.name} {len(superseded.attempts)}"
                steps = before.get(key)
                known[key] = _steps_in(part, superseded) if steps is None else steps
        while len(self._known) >= _KEPT_RUNS and run not in self._known:
            del self._known[next(iter(self._known))]
        self._known[run] = known
        return np.unique(np.concatenate(list(known.values()))) if known else np.array([], np.int64)


def _steps_in(part: Part, superseded: Superseded) -> npt.NDArray[np.int64]:
    columns = ["attempt", "step"] if superseded.attempts else ["step"]
    rows = glance(part, columns)
    if rows is None:
        return np.array([], np.int64)
    counted = superseded.drop(rows) if superseded.attempts else rows
    steps: npt.NDArray[np.int64] = counted["step"].drop_null().unique().to_numpy()
    return steps


def glob_of(module: str) -> str:
    """The glob that fits this module alone: names may hold what a glob gives a meaning to."""
    return glob.escape(module)


def statistics_of(site: str) -> Sequence[str]:
    """The statistics that there is a picture of, for one site."""
    return [name for name in STATISTICS if name != "update_ratio" or site == "update"]


def flow(module: ModuleFacts) -> tuple[float, float, str]:
    """The place of a module in the data flow. A container is as deep as its output, and lies before what is in it."""
    far = float("inf")
    return (
        far if module.depth is None else module.depth,
        far if module.order is None else module.order,
        module.path,
    )

"""Runs beside a good one: at which step and in which module they part from it, and what was set differently."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import ConfigError
from .baseline import Baseline, Identity, identities_of
from .profiles import Matrix, check_statistic
from .run_data import RunData

Flags = npt.NDArray[np.bool_]

#: What is compared at each site, unless said otherwise.
COMPARED: Mapping[str, tuple[str, ...]] = {
    "parameter": ("l2", "abs_max"),
    "activation": ("std", "abs_mean", "abs_max", "zero_fraction"),
    "activation_grad": ("l2", "zero_fraction"),
    "parameter_grad": ("l2", "zero_fraction"),
    "update": ("update_ratio", "l2"),
    "tensor": ("std", "abs_mean", "abs_max"),
    "tensor_grad": ("l2",),
}
# Backward the cause lies behind: what is nearest to the loss is first.
_BACKWARD = ("activation_grad", "parameter_grad", "tensor_grad")
_PERSISTENT = 3  # sampled steps: one bad batch is not a parting of ways

Kind = Literal["outside", "not finite", "missing"]


@dataclass(frozen=True, slots=True)
class Parting:
    """Where one statistic of one site leaves the range of the good runs, first: the step, and the first module there.

    First in data-flow order, for gradients against it. `kind`: `outside` of `low` to `high`; `not finite`, NaN or
    infinite elements that the good runs do not have; `missing`, a number that the good runs have and this one has not.
    `modules`: how many module calls and tensors part at any step.
    """

    site: str
    statistic: str
    kind: Kind
    step: int
    module: str
    call: int
    tensor: str
    type: str
    depth: int | None
    value: float | None
    low: float | None
    high: float | None
    modules: int


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of `config` or `versions` that differs: `good` has one entry for each good run; None where not set."""

    name: str
    good: tuple[Any, ...]
    other: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run beside the good ones.

    `partings`: one for each statistic that parts, first cause first: by step; within one step in the order of a
    training step (parameters, activations, gradients, updates). `steps`: the first and last step compared, None where
    the runs share none. `only_good`, `only_other`: modules that only the one side has.
    """

    good: tuple[str, ...]
    other: str
    name: str
    steps: tuple[int, int] | None
    partings: tuple[Parting, ...]
    settings: tuple[Setting, ...]
    only_good: tuple[str, ...]
    only_other: tuple[str, ...]

    @property
    def first(self) -> Parting | None:
        """Where the run parts first, None where it does not."""
        return self.partings[0] if self.partings else None

    def to_json(self) -> dict[str, Any]:
        """As a dictionary of plain values."""
        return asdict(self)


def compare(
    good: RunData | Sequence[RunData],
    *others: RunData,
    factor: float | None = None,
    statistics: Mapping[str, Sequence[str]] | None = None,
) -> list[Comparison]:
    """Where each of `others` parts from a good run, or from several, and what was set differently.

    A number has parted at the first step from which on it lies outside of the good range for three sampled steps in a
    row (for fewer where the run ends). The range: see `baseline`. Steps after the last one of the good runs are not
    compared.

    Args:
        good: one run, or several of the same model, which say how much it varies from seed to seed.
        others: the runs in question.
        factor: by how much sizes may lie outside of what the good runs had; None for 5, or 2.5 with several of them.
        statistics: site → columns of `stats`; None for the usual ones.

    Raises ConfigError without a run on either side, and where a statistic is unknown.
    """
    runs = [good] if isinstance(good, RunData) else list(good)
    if not others:
        raise ConfigError("compare() needs a good run and at least one other")
    compared = COMPARED if statistics is None else statistics
    for site, names in compared.items():
        for name in names:
            check_statistic(name, site)
    measure = Baseline(runs, factor=factor)
    return [_compare(measure, other, compared) for other in others]


def _compare(measure: Baseline, other: RunData, compared: Mapping[str, Sequence[str]]) -> Comparison:
    good_sites = {site for run in measure.runs for site in run.sites}
    partings, steps = [], []
    there: dict[str, list[Identity]] = {}
    begun: list[int] = []
    for site, names in compared.items():
        if site not in good_sites or site not in other.sites:
            continue
        for run in (*measure.runs, other):  # read together, and kept for what follows
            if site in run.sites:
                run.matrices(site, [*names, "nan_count"])
        for name in names:
            parted, shared = _parting(measure, other, site, name)
            partings += [] if parted is None else [parted]
            steps += shared
        nonfinite = _nonfinite(measure, other, site)
        partings += [] if nonfinite is None else [nonfinite]
        counts = other.matrix(site, "nan_count")
        there[site] = identities_of(counts)
        begun.append(int(counts.steps[0]))
    measured = {identity[0] for identities in there.values() for identity in identities}
    for site, names in compared.items():
        # Of a site that this run was to measure there may be nothing: no optimizer ever stepped.
        if begun and (site in there or site in (other.info.get("sites") or ())):
            absent = _absent(measure, other, site, names[0], there.get(site, ()), measured, min(begun))
            partings += [] if absent is None else [absent]
    order = list(compared)
    partings.sort(key=lambda one: (one.step, order.index(one.site)))
    good_modules = dict.fromkeys(name for run in measure.runs for name in _modules(run))
    other_modules = dict.fromkeys(_modules(other))
    return Comparison(
        good=tuple(run.id for run in measure.runs),
        other=other.id,
        name=str(other.info["name"]),
        steps=(min(steps), max(steps)) if steps else None,
        partings=tuple(partings),
        settings=tuple(_settings([run.info for run in measure.runs], other.info)),
        only_good=tuple(name for name in good_modules if name not in other_modules),
        only_other=tuple(name for name in other_modules if name not in good_modules),
    )


def _parting(measure: Baseline, other: RunData, site: str, statistic: str) -> tuple[Parting | None, list[int]]:
    band = measure.band(site, statistic)
    if band is None:
        return None, []
    found = other.matrix(site, statistic)
    if np.isnan(found.values).all() and (other.matrix(site, "count").values > 0).any():
        return None, []  # there were elements, and of them this statistic was not asked for
    identities = identities_of(found)
    low, high = band.at(identities, found.steps)
    known = ~np.isnan(low)
    complete = np.array([identity in band.rows and band.complete[band.rows[identity]] for identity in identities], bool)
    missing = np.isnan(found.values) & known & ~found.nonfinite & complete[:, None]
    outside = known & ((found.values < low) | (found.values > high))
    here = np.flatnonzero(known.any(axis=0))
    shared = [int(found.steps[here[0]]), int(found.steps[here[-1]])] if len(here) else []
    where = _first(_persistent(outside | missing, known), site)
    if where is None:
        return None, shared
    row, column, count = where
    kind: Kind = "missing" if missing[row, column] else "outside"
    return _describe(found, kind, row, column, (low[row, column], high[row, column]), count), shared


def _absent(
    measure: Baseline,
    other: RunData,
    site: str,
    statistic: str,
    here: Sequence[Identity],
    measured: set[str],
    step: int,
) -> Parting | None:
    """What the good runs have at every step, and this run, some number of whose module was measured, never."""
    band = measure.band(site, statistic)
    if band is None or step > band.end:
        return None
    known = set(here)
    lost = [one for one, row in band.rows.items() if band.complete[row] and one[0] in measured and one not in known]
    if not lost:
        return None
    identity = lost[-1] if site in _BACKWARD else lost[0]
    row = band.rows[identity]
    types = {name: kind for run in (*measure.runs, other) for name, kind in _types(run)}
    type_, depth = types.get(identity[0], ("", None))
    low, high = _number(band.low[row, 0]), _number(band.high[row, 0])
    return Parting(site, statistic, "missing", step, *identity, type_, depth, None, low, high, len(lost))


def _nonfinite(measure: Baseline, other: RunData, site: str) -> Parting | None:
    """Where NaN or infinite elements arise in a row that never had one in the good runs."""
    found = other.matrix(site, "nan_count")
    broken_before = set()
    for run in measure.runs:
        if site in run.sites:
            good = run.matrix(site, "nan_count")
            names = identities_of(good)
            broken_before |= {names[row] for row in np.flatnonzero(good.nonfinite.any(axis=1))}
    allowed = np.array([identity in broken_before for identity in identities_of(found)], bool)
    where = _first(found.nonfinite & ~allowed[:, None], site)
    if where is None:
        return None
    row, column, count = where
    return _describe(found, "not finite", row, column, (np.nan, np.nan), count)


def _persistent(parted: Flags, known: Flags) -> Flags:
    """Where a stretch of `_PERSISTENT` parted steps begins; at the end, of two at least."""
    steps = parted.shape[1]
    result = parted.copy()
    for ahead in range(1, _PERSISTENT):
        later = np.ones_like(parted)
        later[:, : max(steps - ahead, 0)] = (parted | ~known)[:, ahead:]
        result &= later
    if steps > 1:
        result[:, -1] = False
    return result


def _first(begins: Flags, site: str) -> tuple[int, int, int] | None:
    """(row, column, rows that part at any step) of the first beginning."""
    columns = np.flatnonzero(begins.any(axis=0))
    if len(columns) == 0:
        return None
    rows = np.flatnonzero(begins[:, columns[0]])
    row = rows[-1] if site in _BACKWARD else rows[0]
    return int(row), int(columns[0]), int(begins.any(axis=1).sum())


def _describe(found: Matrix, kind: Kind, row: int, column: int, limits: tuple[float, float], modules: int) -> Parting:
    named = found.rows.slice(row, 1).to_pylist()[0]
    return Parting(
        site=found.site,
        statistic=found.statistic,
        kind=kind,
        step=int(found.steps[column]),
        module=named["module"],
        call=named["call"],
        tensor=named["tensor"],
        type=named["type"],
        depth=named["depth"],
        value=_number(found.values[row, column]),
        low=_number(limits[0]),
        high=_number(limits[1]),
        modules=modules,
    )


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _modules(run: RunData) -> list[str]:
    names = run.modules["module"].cast(pa.string()).unique().to_pylist()
    return [str(name) for name in names]


def _types(run: RunData) -> Iterator[tuple[str, tuple[str, int | None]]]:
    """(module, (type, depth)) of the first calls."""
    columns = (run.modules[name].to_pylist() for name in ("module", "type", "depth", "call"))
    for module, kind, depth, call in zip(*columns, strict=True):
        if call == 0:
            yield module, (kind or "", depth)


def _settings(good: Sequence[Mapping[str, Any]], other: Mapping[str, Any]) -> Iterator[Setting]:
    for part, prefix in (("config", "config."), ("versions", "versions.")):
        goods = [dict(_flat(_mapping(info.get(part)), prefix)) for info in good]
        mine = dict(_flat(_mapping(other.get(part)), prefix))
        for name in dict.fromkeys([*mine, *(name for one in goods for name in one)]):
            values = tuple(one.get(name) for one in goods)
            if any(value != mine.get(name) for value in values):
                yield Setting(name, values, mine.get(name))


def _mapping(value: Any) -> Mapping[str, Any]:
    """What `run.json` holds as config; what somebody else wrote there may be no mapping, and is no setting then."""
    return value if isinstance(value, Mapping) else {}


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

"""Scalars of a run as curves, and two of them at the same places."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ConfigError
from ..log.reader import RunData
from .choices import unknown_choice
from .scaling import mean

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_BINS = 50  # points that a curve of many steps is averaged to before its shape is judged
_PREFERRED = ("recomputed", "epoch_mean", None, "batch")


@dataclass(frozen=True, slots=True)
class Curve:
    """One scalar over the steps, [points] each. `epochs`: NaN where not given. `kind`: how it was made, if said."""

    name: str
    kind: str | None
    steps: Integers
    epochs: Floats
    values: Floats


def curve(data: RunData, name: str, kind: str | None = None) -> tuple[Curve, tuple[Curve, ...]]:
    """A scalar as a curve, and the same name in other kinds: a batch's loss and the recomputed one are two curves.

    The curve is that of `kind`; for None of the kind that says most: recomputed, epoch_mean, none given, batch. Of
    several values at a step the last one recorded counts. Raises ConfigError that names what was recorded.
    """
    scalars = data.scalars.filter(pc.is_valid(data.scalars["step"]))
    rows = scalars.filter(pc.equal(scalars["name"].cast(pa.string()), name))
    if rows.num_rows == 0:
        names = pc.unique(scalars["name"].cast(pa.string())).to_pylist()
        if not names:
            raise ConfigError(f"no scalars in run {data.id} yet")
        raise unknown_choice("scalar", name, sorted(filter(None, names)))
    rows = rows.filter(pc.equal(rows["rank"], pc.min(rows["rank"])))
    kinds = rows["kind"].cast(pa.string())
    found = {one: _curve(name, one, rows, kinds) for one in sorted(pc.unique(kinds).to_pylist(), key=_rank)}
    if kind is not None and kind not in found:
        raise unknown_choice(f"kind of {name}", kind, [one or "(none given)" for one in found])
    chosen = next(iter(found)) if kind is None else kind
    return found.pop(chosen), tuple(found.values())


def _rank(kind: str | None) -> int:
    return _PREFERRED.index(kind) if kind in _PREFERRED else len(_PREFERRED)


def _curve(name: str, kind: str | None, rows: pa.Table, kinds: pa.ChunkedArray) -> Curve:
    chosen = rows.filter(pc.is_null(kinds) if kind is None else pc.fill_null(pc.equal(kinds, kind), False))
    chosen = chosen.sort_by([("step", "ascending"), ("seq", "ascending")])
    steps, values = chosen["step"].to_numpy(), chosen["value"].to_numpy()
    last = np.append(np.diff(steps) > 0, True)
    return Curve(name, kind, steps[last], chosen["epoch"].to_numpy()[last], values[last])


def common_points(train: Curve, validation: Curve | None) -> pa.Table:
    """Both curves at the same places: those of the validation, or of the training averaged to at most some 50.

    Columns point (from 1), step, epoch, train (of batches the mean since the point before), validation.
    """
    ends = _ends(train) if validation is None else np.searchsorted(train.steps, validation.steps, side="right")
    if train.kind in ("recomputed", "epoch_mean"):
        means = [float(train.values[end - 1]) if end else None for end in ends]
    else:
        means = [_mean(train.values[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    shown = train if validation is None else validation
    at = ends - 1 if validation is None else np.arange(len(ends))
    columns = {
        "point": pa.array(np.arange(1, len(ends) + 1)),
        "step": pa.array(shown.steps[at]),
        "epoch": pa.array(shown.epochs[at], from_pandas=True),
        "train": pa.array(means, pa.float64()),
        "validation": pa.nulls(len(ends), pa.float64()) if validation is None else pa.array(validation.values),
    }
    return pa.table(columns)


def _ends(train: Curve) -> Integers:
    """Where the pieces end that are averaged to one point: epochs, or equal shares of the steps."""
    count = len(train.values)
    if count <= _BINS:
        return np.arange(1, count + 1)
    epochs = np.floor(train.epochs)
    if not np.isnan(epochs).any() and 1 < len(np.unique(epochs)) < count:
        return np.append(np.flatnonzero(np.diff(epochs)) + 1, count)
    return np.linspace(0, count, _BINS + 1).round().astype(np.int64)[1:]


def _mean(values: Floats) -> float | None:
    return mean(values) if len(values) else None

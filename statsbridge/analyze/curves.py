"""Learning curves: training against validation, what their shape says, and what explains it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ConfigError
from ..log.reader import RunData
from ..wording import counted
from .curve_data import Curve, common_points, curve
from .curve_shape import Limits, Shape, Verdict, judge, shape
from .curve_steps import Floats, Smoothed, jumps, smoothed
from .scaling import mean

_CHANGE = math.log(1.5)  # of a learning rate from one step to the next
_STEADY = math.log(1.05)
_WORDS = {
    "batch": "values of single batches",
    "epoch_mean": "means over an epoch, of batches that the weights of their time made",
    "recomputed": "of the whole data by the weights at that step",
}


@dataclass(frozen=True, slots=True)
class LevelChange:
    """At `step` the training curve goes on at another level, by `size`. `cause`: the learning rate that changed there.

    `before` and `after`: that learning rate; None where no learning rate changed.
    """

    step: int
    size: float
    cause: str | None = None
    before: float | None = None
    after: float | None = None


@dataclass(frozen=True, slots=True)
class Curves:
    """A training curve and, where there is one, a validation curve, with what they say.

    `points`: what was judged, one row a validation or, without, a training value (means of many): columns point (from
    1), step, epoch, train, validation. `smoothed`: the training curve as recorded, beside its moving averages.
    `best_step`, `best_epoch`: where validation is lowest; the epoch is the recorded one, else the number of the point.
    """

    train: Curve
    validation: Curve | None
    points: pa.Table
    shape: Shape
    verdict: Verdict
    smoothed: Smoothed
    level_changes: tuple[LevelChange, ...]
    notes: tuple[str, ...]
    best_step: int | None
    best_epoch: float | None

    def to_json(self) -> dict[str, Any]:
        """The numbers, the verdict and the notes, as a dictionary that JSON can hold."""
        found = self.shape
        return {
            "train": {"name": self.train.name, "kind": self.train.kind, "values": len(self.train.values)},
            "validation": None
            if self.validation is None
            else {
                "name": self.validation.name,
                "kind": self.validation.kind,
                "values": len(self.validation.values),
            },
            "points": found.points,
            "last_train": found.last_train,
            "last_validation": found.last_validation,
            "lowest_validation": None if self.validation is None else found.lowest_validation,
            "lowest_step": self.best_step,
            "lowest_epoch": self.best_epoch,
            "gap": found.gap,
            "slope": found.slope,
            "slope_points": found.last,
            "wiggle": found.wiggle,
            "validation_below_training": found.below,
            "nonfinite": found.nonfinite,
            "verdict": self.verdict.word,
            "reasons": list(self.verdict.reasons),
            "level_changes": [
                {name: getattr(one, name) for name in ("step", "size", "cause", "before", "after")}
                for one in self.level_changes
            ],
            "smoothing": {
                "weight": self.smoothed.weight,
                "last": last_number(self.smoothed.corrected),
                "last_uncorrected": last_number(self.smoothed.uncorrected),
                "spikes": len(self.smoothed.spikes),
                "hidden_spikes": len(self.smoothed.hidden),
            },
            "notes": list(self.notes),
        }


def curves(
    data: RunData,
    *,
    train: str = "loss",
    validation: str | None = None,
    smoothing: float = 0.9,
    last: int = 10,
    limits: Limits | None = None,
) -> Curves:
    """Compare a training curve with a validation curve of a run.

    Args:
        data: the run. Of several ranks the lowest one's values count.
        train: the name of the training loss. Batch values are averaged from one validation to the next.
        validation: the name of the validation loss; None for none.
        smoothing: the weight w of the moving averages, between 0 and 1.
        last: how many of the last points the slope is of.
        limits: where one verdict ends and the next begins; None for the usual.

    Raises ConfigError for a name that was not recorded, a weight that is none, and `last` below 3.
    """
    if last < 3:
        raise ConfigError(f"last={last}: a slope needs at least 3 points")
    trained, others = curve(data, train)
    validated, other_validations = (None, ()) if validation is None else curve(data, validation)
    points = common_points(trained, validated)
    judged = points["train"].to_numpy(), None if validated is None else points["validation"].to_numpy()
    found = _without_absent(shape(*judged, last=last), points["train"], judged[1])
    average = smoothed(trained.values, smoothing)
    changes = _level_changes(data, trained)
    best = None if validated is None or found.lowest is None else points.slice(found.lowest - 1, 1).to_pylist()[0]
    notes = [
        *_about_kinds(trained, others),
        *(() if validated is None else _about_kinds(validated, other_validations)),
        *_about_validation(trained, validated, found),
        *_about_values(trained, average, found),
        *map(_about_change, changes),
    ]
    return Curves(
        train=trained,
        validation=validated,
        points=points,
        shape=found,
        verdict=judge(found, limits),
        smoothed=average,
        level_changes=changes,
        notes=tuple(notes),
        best_step=None if best is None else best["step"],
        best_epoch=None if best is None else _first_number(best["epoch"], best["point"]),
    )


def _without_absent(found: Shape, train: pa.ChunkedArray, validation: Floats | None) -> Shape:
    """A validation with no training since the one before is a point without training value: that is not NaN."""
    if not train.null_count:
        return found
    ends = [train.drop_null().to_numpy()[-1:], np.zeros(0) if validation is None else validation[-1:]]
    return replace(
        found,
        nonfinite=found.nonfinite - train.null_count,
        ends_nonfinite=not np.isfinite(np.concatenate(ends)).all(),
    )


def _level_changes(data: RunData, train: Curve) -> tuple[LevelChange, ...]:
    rates = _rate_changes(data)
    places = {int(np.searchsorted(train.steps, step)): (name, before, after) for step, name, before, after in rates}
    changes = []
    for jump in jumps(train.values, sorted(places)):
        near = [place for place in places if abs(place - jump.place) <= 2]
        cause = places[min(near, key=lambda place: abs(place - jump.place))] if near else (None, None, None)
        changes.append(LevelChange(int(train.steps[jump.place]), jump.size, *cause))
    return tuple(changes)


def _rate_changes(data: RunData) -> Iterator[tuple[int, str, float, float]]:
    """(first step with it, name, before, after) of each change of a learning rate by half or more at one blow."""
    names = [name for name in pc.unique(data.scalars["name"].cast(pa.string())).to_pylist() if _is_rate(name)]
    for name in names:
        rate = curve(data, name)[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = np.abs(np.diff(np.log(rate.values)))
        moved = np.where(np.isnan(moved), 0.0, moved)
        # A warm-up or a decay moves at every step: nothing happens at one of them.
        calm = np.concatenate(([True], moved[:-1] < _STEADY)) & np.concatenate((moved[1:] < _STEADY, [True]))
        for place in np.flatnonzero((moved > _CHANGE) & calm):
            yield int(rate.steps[place + 1]), name, float(rate.values[place]), float(rate.values[place + 1])


def _is_rate(name: str | None) -> bool:
    return name is not None and name.startswith("lr/")


def _about_kinds(chosen: Curve, others: Sequence[Curve]) -> Iterator[str]:
    if chosen.kind is not None:
        yield f"{chosen.name}: {_WORDS.get(chosen.kind, chosen.kind)} ({chosen.kind})"
    for other in others:
        average, last = _number(mean(other.values)), _number(last_number(other.values))
        yield (
            f"{chosen.name} was recorded as {other.kind or 'no kind given'} too: mean {average}, last {last}; "
            "that is another number of the same name, and is not compared"
        )


def _about_validation(train: Curve, validation: Curve | None, found: Shape) -> Iterator[str]:
    if validation is None or found.below is None or found.below < 0.5:
        return
    causes = ["dropout and augmentation make the training loss harder than the validation loss"]
    if train.kind != "recomputed":
        causes.insert(0, "the training values are means over steps that came before the validation")
    yield f"validation lies below training at {found.below:.0%} of the points: {'; '.join(causes)}"


def _about_values(train: Curve, average: Smoothed, found: Shape) -> Iterator[str]:
    if found.nonfinite:
        yield f"{found.nonfinite} of the points compared are NaN or infinite and were passed over"
    if len(average.spikes):
        yield (
            f"{train.name} has {counted(len(average.spikes), 'spike')} of more than 6 standard deviations of its "
            f"noise; the average with weight {average.weight:g} hides {len(average.hidden)} of them"
        )


def _about_change(change: LevelChange) -> str:
    way = "rises" if change.size > 0 else "falls"
    text = f"at step {change.step} training {way} by {abs(change.size):.3g} at one blow"
    if change.cause is None:
        return f"{text}; no learning rate changed there"
    return f"{text}: {change.cause} went from {change.before:g} to {change.after:g}"


def _first_number(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def last_number(values: Floats) -> float | None:
    """The last value that is not NaN."""
    there = values[~np.isnan(values)]
    return float(there[-1]) if len(there) else None


def _number(value: float | None) -> str:
    return "none" if value is None or math.isnan(value) else f"{value:#.4g}"

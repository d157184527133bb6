"""What the labels of a split are like: how many of each class, in which order, and of what kind."""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .data_features import dtype_name

Array = npt.NDArray[Any]
Label = int | float | str

#: What torch's losses leave out by default: `ignore_index` of `torch.nn.functional.cross_entropy`.
IGNORED = -100
_MOST_LABELS = 10_000


@dataclass(slots=True)
class Labels:
    """What has been seen so far of one array of targets.

    `counts`: how often each value came, of integers and texts and of floats that are whole; emptied once there are
    more than ten thousand (`many`). `changes`: how often a sample's label differed from the one before it. `low` and
    `high`: the least and largest whole number, what losses ignore left out.
    """

    path: str
    dtypes: dict[str, int] = field(default_factory=dict)
    shapes: dict[tuple[int, ...], int] = field(default_factory=dict)
    counts: collections.Counter[Label] = field(default_factory=collections.Counter)
    many: bool = False
    whole: bool = True
    ignored: int = 0
    samples: int = 0
    changes: int = 0
    one_hot: bool = True
    low: float = math.inf
    high: float = -math.inf
    _last: Label | None = None

    def add(self, array: Array) -> None:
        """Take in targets `[samples, ...]`."""
        name = dtype_name(array)
        self.dtypes[name] = self.dtypes.get(name, 0) + len(array)
        self.shapes[array.shape[1:]] = self.shapes.get(array.shape[1:], 0) + len(array)
        self.samples += len(array)
        self.whole = self.whole and array.dtype.kind != "c"
        if not array.size or not self.whole:
            return
        if self.one_hot and not _is_one_hot(array):
            self.one_hot = False
            self._forget()
        if self.one_hot:
            array = array.argmax(axis=1)
        if array.dtype.kind == "f":
            finite = array[np.isfinite(array)]
            self.whole = bool((finite == np.floor(finite)).all())
            array = finite
        if self.whole:
            self._count(array.reshape(-1), ordered=self.per_sample or self.one_hot)
        else:
            self._forget()

    def _count(self, values: Array, *, ordered: bool) -> None:
        if values.dtype.kind in "if":
            kept = values != IGNORED
            self.ignored += int((~kept).sum())
            values = values[kept]
        if not values.size:
            return
        if ordered:
            self.changes += int((values[1:] != values[:-1]).sum())
            self.changes += int(self._last is not None and values[0].item() != self._last)
            self._last = values[-1].item()
        self.low = min(self.low, float(values.min())) if values.dtype.kind != "U" else self.low
        self.high = max(self.high, float(values.max())) if values.dtype.kind != "U" else self.high
        if self.many:
            return
        found, counts = np.unique(values, return_counts=True)
        self.counts.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        if len(self.counts) > _MOST_LABELS:
            self.many = True
            self.counts.clear()

    def _forget(self) -> None:
        self.counts.clear()
        self.changes, self._last, self.low, self.high = 0, None, math.inf, -math.inf

    @property
    def per_sample(self) -> bool:
        """Whether each sample has one label, be it in an array of shape `[]` or `[1]`."""
        return bool(self.shapes) and all(int(np.prod(shape)) == 1 for shape in self.shapes)

    @property
    def kinds(self) -> set[str]:
        """What the values are: "text", "bool", "integer", "float" or "complex"."""
        names = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "c": "complex"}
        return {"text" if dtype == "text" else names[np.dtype(dtype).kind] for dtype in self.dtypes}

    @property
    def are_classes(self) -> bool:
        """Whether they can only be classes: one text or integer a sample (each met more than once, on average), or
        one-hot rows.
        """
        if self.many or not self.counts:
            return False
        if self.one_hot:
            return True
        repeated = self.samples >= 2 * len(self.counts)
        return self.per_sample and self.kinds <= {"text", "bool", "integer"} and repeated

    @property
    def changes_expected(self) -> float | None:
        """How often the label would change from sample to sample in random order; None where it is one label."""
        total = sum(self.counts.values())
        if total < 2 or len(self.counts) < 2:
            return None
        same = sum(count * (count - 1) for count in self.counts.values()) / (total * (total - 1))
        return (total - 1) * (1 - same)


def _is_one_hot(array: Array) -> bool:
    if array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind not in "biuf":
        return False
    return bool(((array == 0) | (array == 1)).all() and (array.sum(axis=1) == 1).all())

"""What the values of a split are like, feature by feature: moments, ranges, and where they are not finite."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

# Elements that are turned into float64 together; features that are told apart; places and forms that are kept.
_ELEMENTS_TOGETHER = 1 << 21
MOST_FEATURES = 1 << 20
PLACES_SHOWN = 5
_FORMS_SHOWN = 20
_COLOURS = (1, 3, 4)


def feature_axis(shape: tuple[int, ...]) -> int:
    """Which axis of an array `[samples, ...]` tells features or channels apart.

    Axis 1 of 2-D, 4-D and 5-D arrays; the last of 3-D ones (a sequence of vectors), and of images whose colours
    come last. 0 where a sample is one number.
    """
    if len(shape) < 2:
        return 0
    colours_last = len(shape) >= 4 and shape[-1] in _COLOURS and shape[1] not in _COLOURS
    return len(shape) - 1 if len(shape) == 3 or colours_last else 1


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether one sample of this shape is a picture: height, width and at most four colours, first or last."""
    if len(shape) == 2:
        return min(shape) > 3
    return len(shape) == 3 and (shape[0] in _COLOURS or shape[-1] in _COLOURS)


def dtype_name(array: Array) -> str:
    """The dtype of an array; "text" for text, of which numpy has one for each length."""
    return "text" if array.dtype.kind == "U" else str(array.dtype)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is not finite: of which sample, in which feature."""

    index: int
    feature: int


@dataclass(slots=True)
class Moments:
    """Of each feature, over its finite values: how many, their mean, squared deviations, least and largest.

    Merged by Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979).
    """

    count: Floats
    mean: Floats
    squares: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, values: Array) -> Moments:
        """Of an array `[samples, features, places]` of numbers."""
        number = float(values.shape[0] * values.shape[2])
        sums = values.sum(axis=(0, 2), dtype=np.float64)
        if np.isfinite(sums).all():  # a sum is finite only where all that it adds up is
            mean = sums / number
            squares = np.square(values - mean[:, None]).sum(axis=(0, 2))
            low, high = values.min(axis=(0, 2)), values.max(axis=(0, 2))
            count = np.full(len(sums), number)
            return cls(count, mean, squares, low.astype(np.float64), high.astype(np.float64))
        values = values.astype(np.float64)
        finite = np.isfinite(values)
        count = finite.sum(axis=(0, 2)).astype(np.float64)
        mean = np.where(finite, values, 0.0).sum(axis=(0, 2)) / np.maximum(count, 1)
        squares = np.square(np.where(finite, values - mean[:, None], 0.0)).sum(axis=(0, 2))
        low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
        return cls(count, mean, squares, low.min(axis=(0, 2)), high.max(axis=(0, 2)))

    def merged(self, other: Moments) -> Moments:
        """Both together."""
        count = self.count + other.count
        difference = other.mean - self.mean
        share = other.count / np.maximum(count, 1)
        return Moments(
            count,
            self.mean + difference * share,
            self.squares + other.squares + difference**2 * self.count * share,
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )

    def pooled(self) -> Moments:
        """All features as one."""
        total = np.maximum(self.count.sum(), 1)
        mean = (self.mean * self.count).sum() / total
        squares = self.squares.sum() + (self.count * (self.mean - mean) ** 2).sum()
        sums = (self.count.sum(), mean, squares, self.low.min(), self.high.max())
        return Moments(*(np.array([value], np.float64) for value in sums))

    @property
    def std(self) -> Floats:
        """Standard deviation of each feature, divided by n."""
        return np.sqrt(self.squares / np.maximum(self.count, 1))


def _by_feature(array: Array, axis: int) -> Array:
    """As `[samples, features, places]`; half precision and integers, whose squares overflow, as float64."""
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float64)
    if array.ndim == 1:
        return array[:, None, None]
    if axis == array.ndim - 1 and array.ndim > 2:  # every place of a sequence, or of an image whose colours come last
        array = np.moveaxis(array, axis, 1)
    return array.reshape(len(array), array.shape[1], -1)


@dataclass(slots=True)
class Feature:
    """What has been seen so far of one array of the structure, such as the images.

    `forms`: pairs of dtype and shape of a sample, in the order met. `moments`: by feature; of all values together
    once the number of features has changed, or where there are more than a million. None before any number.
    """

    path: str
    axis: int = 1
    forms: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    moments: Moments | None = None
    nan_count: int = 0
    inf_count: int = 0
    samples: int = 0
    places: list[Place] = field(default_factory=list)
    nonfinite_samples: int = 0
    nonfinite_features: set[int] = field(default_factory=set)
    pooled: bool = False

    def add(self, array: Array, indices: npt.NDArray[np.int64]) -> None:
        """Take in an array `[samples, ...]`; `indices` says which samples they are."""
        form = (dtype_name(array), array.shape[1:])
        if form in self.forms or len(self.forms) < _FORMS_SHOWN:
            self.forms[form] = self.forms.get(form, 0) + len(array)
        self.samples += len(array)
        if array.dtype.kind not in "biuf" or not array.size:
            return
        self.axis = feature_axis(array.shape)
        together = max(1, _ELEMENTS_TOGETHER // max(1, array[0].size))
        for start in range(0, len(array), together):
            self._add_numbers(array[start : start + together], indices[start : start + together])

    def _add_numbers(self, array: Array, indices: npt.NDArray[np.int64]) -> None:
        values = _by_feature(array, self.axis)
        features = values.shape[1]
        found = Moments.of(values)
        if found.count.sum() < values.size:
            self._find_nonfinite(values, indices)
        if self.moments is None:
            self.pooled = features > MOST_FEATURES
            self.moments = found.pooled() if self.pooled else found
            return
        if not self.pooled and features != len(self.moments.count):
            self.pooled, self.moments = True, self.moments.pooled()
        self.moments = self.moments.merged(found.pooled() if self.pooled else found)

    def _find_nonfinite(self, values: Array, indices: npt.NDArray[np.int64]) -> None:
        broken = ~np.isfinite(values)
        nan = int(np.isnan(values).sum())
        self.nan_count += nan
        self.inf_count += int(broken.sum()) - nan
        sample, feature = np.nonzero(broken.any(axis=2))
        pairs = [Place(int(indices[one]), int(other)) for one, other in zip(sample, feature, strict=True)]
        self.places += pairs[: PLACES_SHOWN - len(self.places)]
        self.nonfinite_samples += len(np.unique(sample))
        self.nonfinite_features.update(np.unique(feature).tolist())

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes met."""
        return tuple(dict.fromkeys(dtype for dtype, _ in self.forms))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a sample met."""
        return tuple(dict.fromkeys(shape for _, shape in self.forms))

    @property
    def floating(self) -> bool:
        """Whether the values are floating-point numbers, in every sample."""
        return bool(self.forms) and all(dtype.startswith("float") for dtype in self.dtypes)

    @property
    def word(self) -> str:
        """What one of its features is called: channel in an image or volume, else feature."""
        return "channel" if self.shapes and len(self.shapes[0]) >= 3 else "feature"

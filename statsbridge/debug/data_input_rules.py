"""Rules on the values of inputs and targets: not finite, of a wrong range, type or scale, constant."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..wording import counted
from .data_features import Feature
from .data_finding import DataFinding, listed, named
from .data_split import Split

#: Root mean square of a feature from which on it drives a network out of the range that its initialisation assumes.
LARGEST_SCALE = 10.0
#: The same of all values together, below which hardly any signal comes in.
SMALLEST_SCALE = 0.01
#: Ratio of the largest magnitudes of two features.
LARGEST_SPREAD = 1000.0
#: Above it, values from 0 to 255 at most are taken for pixels that nobody scaled.
UNSCALED_PIXEL = 50.0
_HIGHEST_PIXEL = 255.0


def value_findings(split: Split) -> Iterator[DataFinding]:
    """What is wrong with the values of a split, one input or target after the other."""
    for word, features in (("input", split.inputs), ("target", split.targets)):
        for feature in features.values():
            yield from _nonfinite(split, feature, word)
            yield from _forms(split, feature, word)
    # The other splits are held against the training data instead, which are to be scaled and varied enough.
    for feature in split.inputs.values() if split.name == "training" else ():
        yield from _range(split, feature)
        yield from _constant(split, feature)


def _nonfinite(split: Split, feature: Feature, word: str) -> Iterator[DataFinding]:
    broken = feature.nan_count + feature.inf_count
    if not broken:
        return
    kinds = " and ".join(
        f"{count:,} {kind}" for kind, count in (("NaN", feature.nan_count), ("infinite", feature.inf_count)) if count
    )
    several = len(feature.shapes[0]) > 0
    where = listed(
        f"sample {place.index}" + (f", {feature.word} {place.feature}" if several else "") for place in feature.places
    )
    rest = feature.nonfinite_samples
    yield DataFinding(
        kind=f"nonfinite_{word}",
        severity="critical",
        split=split.name,
        part=feature.path,
        message=f"{named(feature.path, word)} has {kinds} {'value' if broken == 1 else 'values'} in "
        f"{counted(rest, 'sample')}"
        + (f" and {counted(len(feature.nonfinite_features), feature.word)}" if several else "")
        + f": {where}",
        suggestion="drop these samples or fill in the values; one of them makes all weights NaN",
        value=float(broken),
        threshold=0.0,
        indices=tuple(dict.fromkeys(place.index for place in feature.places)),
    )


def _forms(split: Split, feature: Feature, word: str) -> Iterator[DataFinding]:
    for noun, forms in (("shape", [list(shape) for shape in feature.shapes]), ("dtype", list(feature.dtypes))):
        if len(forms) > 1 and not (word == "target" and noun == "shape"):
            yield DataFinding(
                kind=f"{noun}s_differ",
                # Batches of their own lengths are what a collate function is for; single samples have to be stacked.
                severity="info" if noun == "shape" and split.source.batched else "warning",
                split=split.name,
                part=feature.path,
                message=f"{named(feature.path, word)} comes in {len(forms)} {noun}s: {listed(forms)}",
                suggestion="give all samples one, or pad and crop them in collate_fn"
                if noun == "shape"
                else "convert all samples to one",
                value=float(len(forms)),
                threshold=1.0,
            )
    if "float64" in feature.dtypes:
        yield DataFinding(
            kind=f"float64_{word}",
            severity="warning",
            split=split.name,
            part=feature.path,
            message=f"{named(feature.path, word)} is float64; the weights of a model are float32 by default",
            suggestion="convert with .float(), or make the model .double()",
        )


def _range(split: Split, feature: Feature) -> Iterator[DataFinding]:
    moments = feature.moments
    if moments is None or not moments.count.sum():
        return
    low, high = float(moments.low.min()), float(moments.high.max())

    def finding(kind: str, message: str, suggestion: str, value: float, threshold: float) -> DataFinding:
        return DataFinding(
            kind=kind,
            severity="warning",
            split=split.name,
            part=feature.path,
            message=f"{named(feature.path, 'input')} {message}",
            suggestion=suggestion,
            value=value,
            threshold=threshold,
        )

    scale = "divide by 255 and subtract the mean (torchvision: ToTensor and Normalize)"
    if "uint8" in feature.dtypes and high > 1:
        yield finding("uint8_input", f"is uint8, {low:g} to {high:g}", f"convert to float, {scale}", high, 1.0)
    elif feature.floating:
        deep = max(map(len, feature.shapes)) >= 2
        if deep and low >= 0 and UNSCALED_PIXEL < high <= _HIGHEST_PIXEL:
            yield finding("unscaled_pixels", f"runs from {low:g} to {high:g}: pixels not scaled", scale, high, 1.0)
            return
        yield from (finding(*said) for said in _scale(feature))


def _scale(feature: Feature) -> Iterator[tuple[str, str, str, float, float]]:
    """Kind, message, suggestion, value and threshold of what is wrong with the scale of a floating-point input."""
    assert feature.moments is not None
    moments = feature.moments
    sizes = np.sqrt(moments.mean**2 + moments.std**2)
    standardise = "subtract the mean and divide by the standard deviation, computed on the training data"
    worst = int(np.argmax(sizes))
    if sizes[worst] > LARGEST_SCALE:
        many = int((sizes > LARGEST_SCALE).sum())
        where = f"{many} of {counted(len(sizes), feature.word)}" if len(sizes) > 1 else "its values"
        message = (
            f"is far from mean 0 and std 1 in {where}; the worst{_of(feature, worst)}: "
            f"mean {moments.mean[worst]:.4g}, std {moments.std[worst]:.4g}"
        )
        yield "large_input", message, standardise, float(sizes[worst]), LARGEST_SCALE
    whole = moments.pooled()
    size = float(np.sqrt(whole.mean[0] ** 2 + whole.std[0] ** 2))
    if 0 < size < SMALLEST_SCALE:
        message = f"is tiny: mean {whole.mean[0]:.4g}, std {whole.std[0]:.4g}"
        yield "small_input", message, standardise, size, SMALLEST_SCALE
    largest = np.where(moments.count > 0, np.maximum(np.abs(moments.low), np.abs(moments.high)), 0.0)
    smallest = np.where(largest > 0, largest, np.inf)
    top, bottom = int(np.argmax(largest)), int(np.argmin(smallest))
    ratio = float(largest[top] / smallest[bottom])
    if np.isfinite(smallest[bottom]) and ratio > LARGEST_SPREAD:
        message = (
            f"has {feature.word}s of very different size: {feature.word} {top} reaches {largest[top]:.3g}, "
            f"{feature.word} {bottom} {largest[bottom]:.3g}"
        )
        yield "uneven_features", message, standardise, ratio, LARGEST_SPREAD


def _of(feature: Feature, number: int) -> str:
    assert feature.moments is not None
    return f", {feature.word} {number}" if len(feature.moments.count) > 1 else ""


def _constant(split: Split, feature: Feature) -> Iterator[DataFinding]:
    moments = feature.moments
    # Masks are often all ones, and token sequences begin alike.
    measured = feature.floating or "uint8" in feature.dtypes
    if moments is None or feature.samples < 2 or not measured:
        return
    constant = np.flatnonzero((moments.low == moments.high) & (moments.count > 0))
    if not len(constant):
        return
    every = len(constant) == len(moments.count)
    numbers = "" if feature.pooled else f": {listed(constant.tolist(), 8)}"
    if len(moments.count) == 1:
        said = f"is the same in all samples: {moments.low[0]:g}"
    else:
        change = "change" if len(constant) > 1 else "changes"
        said = f"has {counted(len(constant), feature.word)} of {len(moments.count):,} that never {change}{numbers}"
    yield DataFinding(
        kind="constant_feature",
        severity="critical" if every and len(split.inputs) == 1 else "warning",
        split=split.name,
        part=feature.path,
        message=f"{named(feature.path, 'input')} {said}",
        suggestion="look where the values are read; leave out what never changes: to divide by its std of 0 makes NaN",
        value=float(len(constant)),
        threshold=0.0,
    )

"""Rules on labels: of the wrong kind, outside the classes, missing, unbalanced, in order."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

import numpy as np

from ..analyze.findings import Severity
from ..wording import counted
from .data_features import Feature
from .data_finding import SHOWN, DataFinding, listed, named
from .data_labels import Label, Labels
from .data_split import Split

#: Largest class to smallest; notes of the field call more than 10 : 1 imbalanced.
LARGEST_IMBALANCE = 10.0
#: Label changes from sample to sample, against those of a random order.
FEWEST_CHANGES = 0.5
_FEWEST_SAMPLES = 20
_DEVIATIONS = 5.0


def label_findings(split: Split, classes: int | None) -> Iterator[DataFinding]:
    """What is wrong with the labels of a split. `classes`: how many there are, None where that is not known."""
    labels = split.class_labels()
    judged = labels is not None and labels.samples > 0 and (labels.are_classes or classes is not None)
    if labels is not None and judged:
        yield from _kind(split, labels, classes)
        yield from _range(split, labels, classes)
        if labels.counts:
            yield from _balance(split, labels, classes)
            yield from _order(split, labels)
    for path, feature in split.targets.items():
        if not (judged and labels is not None and path == labels.path):
            yield from _constant(split, feature)


def _constant(split: Split, feature: Feature) -> Iterator[DataFinding]:
    moments = feature.moments
    if not feature.floating or moments is None or feature.samples < 2 or not moments.count.sum():
        return
    if moments.low.min() == moments.high.max():
        said = f"is {moments.low[0]:g} in all samples"
        yield _finding(split, feature.path, "constant_target", "critical", said, "look where the targets are read")


def _finding(
    split: Split,
    part: str,
    kind: str,
    severity: Severity,
    message: str,
    suggestion: str,
    value: float | None = None,
    threshold: float | None = None,
) -> DataFinding:
    return DataFinding(
        kind=kind,
        severity=severity,
        split=split.name,
        part=part,
        message=f"{named(part, 'target')} {message}",
        suggestion=suggestion,
        value=value,
        threshold=threshold,
    )


def _kind(split: Split, labels: Labels, classes: int | None) -> Iterator[DataFinding]:
    kinds, dtypes = labels.kinds, listed(labels.dtypes)
    if classes is not None and not labels.one_hot and "float" in kinds:
        shapes = {shape[:1] for shape in labels.shapes}
        soft = shapes == {(classes,)}
        # A loss with a sigmoid takes 0.0 and 1.0, and cross_entropy a row of probabilities for each sample.
        binary = labels.whole and set(labels.counts) <= {0.0, 1.0} and classes <= 2
        if not (soft or binary):
            yield _finding(
                split,
                labels.path,
                "float_labels",
                "critical",
                f"is {dtypes}, not whole numbers of class",
                "convert the labels with .long()",
            )
    if "integer" in kinds and not labels.one_hot and "int64" not in labels.dtypes:
        yield _finding(
            split,
            labels.path,
            "label_dtype",
            "warning",
            f"is {dtypes}; cross_entropy takes int64 alone",
            "convert the labels with .long()",
        )
    if labels.per_sample and "integer" in kinds and any(len(shape) for shape in labels.shapes):
        yield _finding(
            split,
            labels.path,
            "label_shape",
            "warning",
            f"has shape {[None, *next(iter(labels.shapes))]} in a batch".replace("None", "batch")
            + "; cross_entropy takes one number a sample",
            "take the last axis away with .squeeze(-1)",
        )


def _range(split: Split, labels: Labels, classes: int | None) -> Iterator[DataFinding]:
    if labels.kinds & {"text", "bool"} or not labels.whole or not np.isfinite(labels.low):
        return
    low, high = int(labels.low), int(labels.high)
    suggestion = "number the classes 0 to C − 1; −100 is what torch's losses ignore"
    # A small split may just lack class 0.
    from_one = low == 1 and (high == classes or (classes is None and split.name == "training"))
    if from_one:
        message, suggestion = f"counts its classes from 1 to {high}", "subtract 1: torch counts them from 0"
    elif classes is not None and (low < 0 or high >= classes):
        message = f"runs from {low} to {high}; {classes} classes are 0 to {classes - 1}"
    elif low < 0:
        message = f"has negative class labels, down to {low}"
    else:
        return
    severity: Severity = "warning" if from_one and classes is None else "critical"
    worst, limit = float(low if low < 0 else high), float(high if classes is None else classes - 1)
    yield _finding(split, labels.path, "label_out_of_range", severity, message, suggestion, worst, limit)


def _balance(split: Split, labels: Labels, classes: int | None) -> Iterator[DataFinding]:
    if not (labels.per_sample or labels.one_hot):
        return
    part, counts = labels.path, _valid(labels, classes)
    if not counts:
        return
    if len(counts) == 1 and (classes is None or classes > 1) and labels.samples > 1:
        only = next(iter(counts))
        yield _finding(
            split,
            part,
            "single_class",
            "critical" if split.name == "training" else "warning",
            f"is {_class(only)} in all samples",
            "look where the labels are read",
            1.0,
            2.0,
        )
        return
    missing, first = _missing(labels, classes)
    if missing and split.name == "training":
        yield _finding(
            split,
            part,
            "missing_classes",
            "warning",
            f"has no sample of {', '.join(map(_class, first))}"
            + (f" and {missing - len(first):,} more" if missing > len(first) else ""),
            "add samples of them, or leave the classes out",
            float(missing),
            0.0,
        )
    (most, largest), (least, smallest) = counts.most_common()[0], counts.most_common()[-1]
    if largest / smallest > LARGEST_IMBALANCE:
        yield _finding(
            split,
            part,
            "class_imbalance",
            "warning" if split.name == "training" else "info",
            f"has {largest:,} of {_class(most)} and {smallest:,} of {_class(least)}, {largest / smallest:.3g} : 1",
            "weigh the loss by class or draw with WeightedRandomSampler; judge by a metric for each class",
            largest / smallest,
            LARGEST_IMBALANCE,
        )


def _valid(labels: Labels, classes: int | None) -> collections.Counter[Label]:
    """How many samples each class has, without the labels that are none."""
    if labels.kinds & {"text", "bool"}:
        return labels.counts
    highest = labels.high if classes is None else classes - 1
    valid = {label: count for label, count in labels.counts.items() if 0 <= float(label) <= highest}
    return collections.Counter(valid)


def _missing(labels: Labels, classes: int | None) -> tuple[int, list[int]]:
    """How many classes have no sample, and the first of them: labels may be numbers of millions."""
    if labels.kinds & {"text", "bool"}:
        return 0, []
    first, end = 1 if classes is None and labels.low == 1 else 0, classes or int(labels.high) + 1
    there = sum(isinstance(one, int | float) and first <= one < end and one == int(one) for one in labels.counts)
    gone = (number for number in range(first, end) if number not in labels.counts)
    missing = end - first - there
    return missing, list(itertools.islice(gone, min(missing, SHOWN)))


def _class(label: object) -> str:
    return f"class {int(label) if isinstance(label, float) else label!r}"


def _order(split: Split, labels: Labels) -> Iterator[DataFinding]:
    expected = labels.changes_expected
    told_apart = labels.per_sample or labels.one_hot
    if split.name != "training" or not split.source.batched or not told_apart:
        return
    if expected is None or split.samples < _FEWEST_SAMPLES:
        return
    few = labels.changes < FEWEST_CHANGES * expected
    # Of a source whose order may be random, chance has to be left room.
    beyond_chance = expected - labels.changes > _DEVIATIONS * np.sqrt(2 * expected)
    if few and (split.source.sequential or beyond_chance):
        yield _finding(
            split,
            labels.path,
            "sorted_labels",
            "warning",
            f"comes in runs of one class: {labels.changes:,} changes from sample to sample, {expected:,.0f} in random "
            "order",
            "shuffle: DataLoader(…, shuffle=True)",
            float(labels.changes),
            FEWEST_CHANGES * expected,
        )
    elif split.source.sequential:
        yield DataFinding(
            kind="not_shuffled",
            severity="info",
            split=split.name,
            message="the loader gives the samples in the same order in each epoch",
            suggestion="shuffle: DataLoader(…, shuffle=True)",
        )


def label_line(labels: Labels) -> str:
    """The labels of a split in one line."""
    dtypes = listed(labels.dtypes)
    ignored = f", {counted(labels.ignored, 'label')} of −100 left out" if labels.ignored else ""
    if labels.many:
        return f"{dtypes}, more than 10,000 different values{ignored}"
    if not labels.are_classes:
        return f"{dtypes}{ignored}"
    sizes = sorted(labels.counts.values())
    each = f"{sizes[0]:,}" if sizes[0] == sizes[-1] else f"{sizes[0]:,} to {sizes[-1]:,}"
    return f"{dtypes}, {counted(len(sizes), 'class')} of {each} samples{ignored}"

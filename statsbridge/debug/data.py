"""Is this data worth training on? Everything that can be told by reading it once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader

from ..analyze.findings import SEVERITIES
from ..errors import ConfigError
from ..wording import counted
from .data_features import Feature
from .data_finding import DataFinding, listed, wrapped
from .data_input_rules import value_findings
from .data_label_rules import label_findings, label_line
from .data_parts import Part, check_parts
from .data_reading import source
from .data_split import Sample, Split, look_through
from .data_split_rules import difference_findings, duplicate_findings, last_batch_size, reading_findings
from .preserving import preserved
from .result import Number, Result

if TYPE_CHECKING:
    import plotly.graph_objects as go

MARKS = {"critical": "✗", "warning": "!", "info": "·"}
_FURTHER = (
    "Only copies equal to the bit were looked for. For near-duplicates there are fastdup and imagededup, for wrong "
    "labels cleanlab."
)
_SPLITS = ("training", "validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataResult(Result):
    """What `check_data` found. `findings`: the worst first. `splits`: what was seen of each, by name."""

    findings: tuple[DataFinding, ...]
    splits: Mapping[str, Split] = field(repr=False)

    def __str__(self) -> str:
        """What a terminal shows: the numbers, each split with its first samples, and what is wrong."""
        return "\n".join([Result.__str__(replace(self, explanation="")), *wrapped(self.explanation, "  ")])

    def figure(self) -> go.Figure:
        """Five samples and their labels, the features' means and spreads, and the classes.

        Raises ConfigError where plotly is not installed.
        """
        from .data_figures import data_figure

        return data_figure(self)


def check_data(
    data: Any,
    *,
    validation: Any = None,
    test: Any = None,
    inputs: Part = None,
    targets: Part = None,
    classes: int | None = None,
    limit: int | None = None,
) -> DataResult:
    """Read training data (and the other splits) once and say what is wrong with them.

    Looked for are values that are not finite, constant features, scales that no network is initialised for, pixels
    and labels of the wrong kind or range, copies within and across splits, missing and unbalanced classes, shapes
    that differ, samples that cannot be read, a last batch of one, and a loader that does not shuffle.

    Args:
        data: the training data: a DataLoader, a torch Dataset, or a list (or other re-iterable) of batches.
        validation: the same of the validation data.
        test: the same of the test data.
        inputs: which part of a batch (or sample) is input: a position, a key, or a function of it. By default all
            but the target.
        targets: which part is the target. By default the last of a tuple or list, and what is called labels,
            label, targets, target or y; `lambda batch: None` where there is none.
        classes: how many classes the labels are to have: 0 to classes − 1. Where None, whole numbers that come
            more than once are taken for classes up to the highest one met.
        limit: how many samples of each split to read, all where None.

    Returns:
        A result that passed unless a finding is critical. Its `table` has a row for each finding.

    The random generators of Python, NumPy, torch and of the loaders are as before afterwards; a generator that a
    data set keeps to itself is not. Memory is that of a batch, of the sums of each feature, and of 32 bytes a sample.

    Raises:
        ConfigError: what was given cannot be read, or can be read only once; a part asked for is not in a batch.
    """
    check_numbers(classes, limit)
    check_parts(inputs, "inputs")
    check_parts(targets, "targets")
    given = {
        name: source(one, "data" if name == "training" else name)
        for name, one in zip(_SPLITS, (data, validation, test), strict=True)
        if one is not None or name == "training"
    }
    loaders = [one.data for one in given.values() if isinstance(one.data, DataLoader)]
    with preserved(nn.Module(), also=loaders):
        splits = {name: look_through(one, name, inputs, targets, limit) for name, one in given.items()}
    training, *others = splits.values()
    found = [*duplicate_findings(training, others)]
    for split in splits.values():
        found += [*reading_findings(split), *value_findings(split), *label_findings(split, classes)]
    for other in others:
        found += difference_findings(training, other)
    return data_result(splits, found)


def check_numbers(classes: int | None, limit: int | None) -> None:
    """Raise ConfigError where `classes` or `limit` is none of the numbers that they may be."""
    for name, value, least in (("classes", classes, 2), ("limit", limit, 1)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"{name}={value!r} is no whole number of at least {least}")


def data_result(splits: Mapping[str, Split], findings: list[DataFinding]) -> DataResult:
    """The result of these findings, ordered by severity."""
    ordered = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
    columns = ("split", "severity", "kind", "part", "value", "threshold", "message", "suggestion")
    return DataResult(
        name="check_data",
        passed=not any(finding.severity == "critical" for finding in ordered),
        numbers=_numbers(splits, ordered),
        explanation=_explanation(splits, ordered),
        table={column: [getattr(finding, column) for finding in ordered] for column in columns},
        findings=tuple(ordered),
        splits=dict(splits),
    )


def _numbers(splits: Mapping[str, Split], findings: list[DataFinding]) -> dict[str, Number]:
    training = splits["training"]
    numbers: dict[str, Number] = {f"{name}_samples": split.samples for name, split in splits.items()}
    if training.source.batched:
        numbers["batches"] = sum(training.batch_sizes.values())
        numbers["last_batch"] = last_batch_size(training)
    features = [*training.inputs.values(), *training.targets.values()]
    numbers["nan_count"] = sum(feature.nan_count for feature in features)
    numbers["inf_count"] = sum(feature.inf_count for feature in features)
    whole = [one.moments.pooled() for one in training.inputs.values() if one.moments is not None]
    if len(whole) == 1 and whole[0].count[0]:
        numbers |= {"input_mean": float(whole[0].mean[0]), "input_std": float(whole[0].std[0])}
    numbers["duplicates"] = _sum(findings, "duplicates")
    labels = training.class_labels()
    if labels is not None and labels.are_classes:
        sizes = labels.counts.values()
        numbers |= {"classes": len(sizes), "imbalance": max(sizes) / min(sizes)}
    for severity in ("critical", "warning"):
        numbers[f"{severity}_findings"] = sum(finding.severity == severity for finding in findings)
    return numbers


def _sum(findings: list[DataFinding], kind: str) -> int:
    return int(sum(finding.value or 0 for finding in findings if finding.kind == kind))


# ------------------------------------------------------------------ the text


def _explanation(splits: Mapping[str, Split], findings: list[DataFinding]) -> str:
    lines = [line for split in splits.values() for line in _described(split)]
    lines += [line for finding in findings for line in finding_lines(finding)]
    if not findings:
        lines.append("Nothing is wrong with it as far as this check can see.")
    return "\n".join([*lines, _FURTHER])


def finding_lines(finding: DataFinding) -> list[str]:
    """A finding as lines of text: what is wrong, and what to do."""
    return [
        f"{MARKS[finding.severity]} {finding.split}: {finding.message}",
        f"    {finding.suggestion}",
    ]


def _described(split: Split) -> list[str]:
    sizes = sorted(split.batch_sizes)
    of = f" in {counted(sum(split.batch_sizes.values()), 'batch')} of {sizes[-1]}" if sizes else ""
    part = "" if split.complete else " (not all were read)"
    lines = [f"{split.name}: {counted(split.samples, 'sample')}{of}{part}"]
    lines += [f"  input{_name(path)}: {_feature_line(feature)}" for path, feature in split.inputs.items()]
    for path, labels in split.labels.items():
        feature = split.targets[path]
        line = label_line(labels) if labels.are_classes or labels.many else _feature_line(feature)
        lines.append(f"  target{_name(path)}: {line}")
    if split.name == "training":
        lines += [f"  sample {sample.index}: {sample_line(sample)}" for sample in split.shown]
    return lines


def _name(path: str) -> str:
    return f" {path}" if path else ""


def _feature_line(feature: Feature) -> str:
    forms = listed((f"{dtype} {list(shape)}" for dtype, shape in feature.forms), 3)
    moments = feature.moments
    if moments is None or not moments.count.sum():
        return forms
    whole = moments.pooled()
    line = f"{forms}, {whole.low[0]:.4g} to {whole.high[0]:.4g}, mean {whole.mean[0]:.4g}, std {whole.std[0]:.4g}"
    return f"{line}; {scale_word(feature)}" if feature.floating else line


def scale_word(feature: Feature) -> str:
    """How a floating-point input is scaled, by feature: standardised, from 0 to 1, from −1 to 1, or none of these."""
    assert feature.moments is not None
    moments = feature.moments
    varies = moments.high > moments.low
    if varies.any() and (np.abs(moments.mean[varies]) <= 0.5).all():
        stds = moments.std[varies]
        if (stds >= 0.5).all() and (stds <= 2).all():
            return f"standardised by {feature.word}" if len(moments.count) > 1 else "standardised"
    low, high = moments.low.min(), moments.high.max()
    if low >= 0 and high <= 1:
        return "within 0 and 1"
    return "within −1 and 1" if low >= -1 and high <= 1 else "not normalised"


def sample_line(sample: Sample) -> str:
    """One sample in a line: the shape and range of each input, and its target."""
    inputs = [f"{path + ' ' if path else ''}{_array_text(array)}" for path, array in sample.inputs.items()]
    targets = [f"{path + ' ' if path else ''}{_array_text(array)}" for path, array in sample.targets.items()]
    return ", ".join(inputs) + (f" → {', '.join(targets)}" if targets else "")


def _array_text(array: Any) -> str:
    if array.size == 1:
        value = array.item()
        return f"{value:.4g}" if isinstance(value, float) else repr(value)
    if array.dtype.kind not in "biuf" or not array.size:
        return f"{list(array.shape)}"
    finite = array[np.isfinite(array)]
    broken = "" if len(finite) == array.size else f" and {array.size - finite.size} not finite"
    form = ".4g" if array.dtype.kind == "f" else ""
    ends = f" {finite.min():{form}} to {finite.max():{form}}" if finite.size else ""
    return f"{list(array.shape)}{ends}{broken}"

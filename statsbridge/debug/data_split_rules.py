"""Rules on a split as a whole, and between splits: unreadable, badly batched, duplicated, leaked, unlike each other."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np

from ..wording import counted
from .data_duplicates import Duplicates, duplicates_across, duplicates_within
from .data_finding import DataFinding, listed, named
from .data_split import Split

#: Share of a split that is also in the training data, above which its numbers mean nothing.
LARGEST_LEAK = 0.01
#: Difference of the means of two splits, in standard deviations of the training data.
LARGEST_SHIFT = 0.5
#: Ratio of their standard deviations, either way.
LARGEST_STRETCH = 2.0
_FEWEST_SAMPLES = 20


def reading_findings(split: Split) -> Iterator[DataFinding]:
    """What could not be read, and what the batches are like."""
    if split.unreadable_count:
        first = split.unreadable[0]
        more = f" and {split.unreadable_count - 1} more" if split.unreadable_count > 1 else ""
        yield DataFinding(
            kind="unreadable",
            severity="critical",
            split=split.name,
            message=f"{first.where}{more} could not be read: {first.error}",
            suggestion="mend or leave out these samples; a training would stop there",
            value=float(split.unreadable_count),
            threshold=0.0,
        )
    if not split.samples:
        yield DataFinding(
            kind="empty",
            severity="critical",
            split=split.name,
            message="there is no sample with a number in it",
            suggestion="check the folder or filter; drop_last=True drops all of less than one batch",
        )
    if split.skipped:
        yield DataFinding(
            kind="not_looked_at",
            severity="info",
            split=split.name,
            message=f"not looked at: {listed(split.skipped)}",
            suggestion="say by inputs= and targets= which parts to look at",
        )
    if split.name == "training":
        yield from _batches(split)


def last_batch_size(split: Split) -> int | None:
    """Samples in the last batch of an epoch; None where that is not known."""
    if split.complete:
        return split.last_batch
    batches = getattr(split.source.data, "batch_sampler", None)
    size, sampler = getattr(batches, "batch_size", None), getattr(batches, "sampler", None)
    if not isinstance(size, int) or not isinstance(sampler, Sized):
        return None
    return size if getattr(batches, "drop_last", False) else len(sampler) % size or size


def _batches(split: Split) -> Iterator[DataFinding]:
    last, usual = last_batch_size(split), max(split.batch_sizes, default=0)
    if last == 1 and usual > 1:
        yield DataFinding(
            kind="small_last_batch",
            severity="warning",
            split=split.name,
            message=f"the last batch has 1 sample, the others up to {usual}: its batch statistics mean nothing, and "
            "BatchNorm1d stops there with an error",
            suggestion="drop_last=True, or another batch size",
            value=1.0,
            threshold=2.0,
        )


def duplicate_findings(training: Split, others: list[Split]) -> Iterator[DataFinding]:
    """Samples that are in a split twice, and samples of the other splits that are in an earlier one too."""
    splits = [training, *others]
    for split in splits:
        found = duplicates_within(split.digests)
        if found is not None:
            yield _duplicates(found, split)
        if found is not None and found.conflicting:
            yield DataFinding(
                kind="conflicting_targets",
                severity="warning",
                split=split.name,
                message=f"{counted(found.conflicting, 'duplicate')} of an earlier sample with another target",
                suggestion="look at both: one label is wrong, or the inputs do not tell",
                value=float(found.conflicting),
                threshold=0.0,
            )
    for number, split in enumerate(splits):
        for earlier in splits[:number]:
            leaked = duplicates_across(earlier.digests, split.digests)
            if leaked is not None:
                yield _leak(leaked, earlier, split)


def _duplicates(found: Duplicates, split: Split) -> DataFinding:
    pairs = listed(f"{second} (= {first})" for first, second in found.pairs)
    equal = "equals" if found.count == 1 else "equal"
    return DataFinding(
        kind="duplicates",
        severity="warning",
        split=split.name,
        message=f"{counted(found.count, 'sample')} of {found.of:,} {equal} an earlier one to the bit: {pairs}",
        suggestion="leave the copies out, or know why they are there",
        value=float(found.count),
        threshold=0.0,
        indices=tuple(second for _, second in found.pairs),
    )


def _leak(found: Duplicates, earlier: Split, split: Split) -> DataFinding:
    share = found.count / found.of
    pairs = listed(f"{second} (= {first} there)" for first, second in found.pairs)
    of = f"{counted(found.count, 'sample')} of {found.of:,} ({share:.2%})"
    return DataFinding(
        kind="leakage",
        severity="critical" if share > LARGEST_LEAK else "warning",
        split=split.name,
        message=f"{of} {'is' if found.count == 1 else 'are'} in the {earlier.name} data too: {pairs}",
        suggestion="split before augmenting or oversampling, by group where samples belong together",
        value=share,
        threshold=LARGEST_LEAK,
        indices=tuple(second for _, second in found.pairs),
    )


def difference_findings(training: Split, other: Split) -> Iterator[DataFinding]:
    """Where another split is unlike the training data: forms, scale, classes."""
    for path, feature in training.inputs.items():
        theirs = other.inputs.get(path)
        if theirs is None or not other.samples:
            continue
        if set(feature.forms).isdisjoint(theirs.forms):
            yield _unlike(
                other,
                "split_form",
                path,
                f"is {_form(theirs.forms)}, in the training data {_form(feature.forms)}",
                "read both through the same transforms",
            )
        yield from _shift(training, other, path)
    mine, labels = training.class_labels(), other.class_labels()
    if mine is not None and labels is not None and mine.are_classes and labels.are_classes and training.complete:
        unseen = sorted(set(labels.counts) - set(mine.counts), key=str)
        if unseen:
            yield _unlike(
                other,
                "unseen_classes",
                labels.path,
                f"has classes that the training data lack: {listed(unseen)}",
                "split by class (stratified), and number the classes once for all splits",
                float(len(unseen)),
                0.0,
                word="target",
            )


def _form(forms: dict[tuple[str, tuple[int, ...]], int]) -> str:
    dtype, shape = next(iter(forms))
    return f"{dtype} {list(shape)}"


def _unlike(
    split: Split,
    kind: str,
    part: str,
    message: str,
    suggestion: str,
    value: float | None = None,
    threshold: float | None = None,
    *,
    word: str = "input",
) -> DataFinding:
    return DataFinding(
        kind=kind,
        severity="warning",
        split=split.name,
        part=part,
        message=f"{named(part, word)} {message}",
        suggestion=suggestion,
        value=value,
        threshold=threshold,
    )


def _shift(training: Split, other: Split, path: str) -> Iterator[DataFinding]:
    feature, theirs = training.inputs[path], other.inputs[path]
    if feature.moments is None or theirs.moments is None or not (feature.floating and theirs.floating):
        return
    if min(training.samples, other.samples) < _FEWEST_SAMPLES:
        return
    mine, yours = feature.moments.pooled(), theirs.moments.pooled()
    (mean, std), (other_mean, other_std) = ((float(one.mean[0]), float(one.std[0])) for one in (mine, yours))
    if std == 0 or not yours.count[0]:
        return
    shift, stretch = abs(other_mean - mean) / std, other_std / std
    if shift > LARGEST_SHIFT or not 1 / LARGEST_STRETCH <= stretch <= LARGEST_STRETCH:
        shifted = shift > LARGEST_SHIFT
        yield _unlike(
            other,
            "split_shift",
            path,
            f"has mean {other_mean:.4g} and std {other_std:.4g}, in the training data {mean:.4g} and {std:.4g}",
            "normalise all splits with the numbers of the training data; check that they are drawn alike",
            shift if shifted else float(np.maximum(stretch, 1 / stretch if stretch else np.inf)),
            LARGEST_SHIFT if shifted else LARGEST_STRETCH,
        )

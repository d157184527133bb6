"""All that is known of one split after reading it once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from .data_duplicates import Digests
from .data_features import Feature
from .data_labels import Labels
from .data_parts import TARGET_KEYS, Part
from .data_reading import Block, Source, Unreadable, read, size_of
from .progress import progress

Array = npt.NDArray[Any]

SAMPLES_SHOWN = 5
_TROUBLES_SHOWN = 5
_LARGEST_SHOWN = 1 << 20  # elements of a sample that is kept for the picture


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample to look at: its index, and its input and target arrays by path."""

    index: int
    inputs: dict[str, Array]
    targets: dict[str, Array]


@dataclass(slots=True)
class Split:
    """What has been seen of a split: `"training"`, `"validation"` or `"test"`.

    `batch_sizes`: how many batches came with each number of samples; `last_batch`: the samples of the last one, None
    where the reading ended before it. `complete`: whether all was read.
    """

    name: str
    source: Source
    inputs: dict[str, Feature] = field(default_factory=dict)
    targets: dict[str, Feature] = field(default_factory=dict)
    labels: dict[str, Labels] = field(default_factory=dict)
    digests: Digests = field(default_factory=Digests)
    batch_sizes: dict[int, int] = field(default_factory=dict)
    last_batch: int | None = None
    samples: int = 0
    complete: bool = False
    shown: list[Sample] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    unreadable_count: int = 0
    skipped: dict[str, None] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        """Take in some samples."""
        if block.batch is not None:
            self.batch_sizes[block.batch] = self.batch_sizes.get(block.batch, 0) + 1
            self.last_batch = block.batch
        self.skipped |= dict.fromkeys(block.skipped)
        self.samples += len(block.indices)
        for path, array in block.inputs.items():
            self.inputs.setdefault(path, Feature(path)).add(array, block.indices)
        for path, array in block.targets.items():
            self.targets.setdefault(path, Feature(path)).add(array, block.indices)
            self.labels.setdefault(path, Labels(path)).add(array)
        self.digests.add(block.inputs, block.targets, block.indices)
        self._show(block)

    def _show(self, block: Block) -> None:
        for number in range(min(len(block.indices), SAMPLES_SHOWN - len(self.shown))):
            inputs, targets = (
                {path: array[number].copy() for path, array in part.items() if array[number].size <= _LARGEST_SHOWN}
                for part in (block.inputs, block.targets)
            )
            self.shown.append(Sample(int(block.indices[number]), inputs, targets))

    def class_labels(self) -> Labels | None:
        """The targets that are class labels, if any are: the only ones, or those that are called so."""
        named = [labels for path, labels in self.labels.items() if path.rpartition(".")[2] in TARGET_KEYS]
        candidates = list(self.labels.values()) if len(self.labels) == 1 else named[:1]
        return candidates[0] if candidates else None


def look_through(source: Source, name: str, inputs: Part, targets: Part, limit: int | None) -> Split:
    """Read a split once. Raises ConfigError where a part asked for is not in it."""
    split = Split(name, source)
    known = size_of(source)
    total = known if limit is None or known is None else min(known, limit)
    for block in progress(_by_sample(source, inputs, targets, limit), f"reading {name} data, sample", total):
        if isinstance(block, Unreadable):
            split.unreadable_count += 1
            split.unreadable += [block] if len(split.unreadable) < _TROUBLES_SHOWN else []
        elif isinstance(block, Block):
            split.add(block)
    split.complete = limit is None or split.samples < limit or split.samples == known
    return split


def _by_sample(source: Source, inputs: Part, targets: Part, limit: int | None) -> Iterator[Block | Unreadable | None]:
    """The blocks, each followed by None for every further sample in it: the line on the terminal counts samples."""
    for block in read(source, inputs, targets, limit):
        yield block
        if isinstance(block, Block):
            for _ in range(len(block.indices) - 1):
                yield None

"""Samples out of anything that trainings read: loaders, data sets and lists of batches, of any structure, once."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from ..errors import ConfigError
from .data_drawn import recorded, which
from .data_parts import Array, Part, Picker, arrays_in

# Samples of a data set that are looked at together, and the elements they may have: memory stays bounded.
_SAMPLES_TOGETHER = 256
_ELEMENTS_TOGETHER = 1 << 22


@dataclass(frozen=True, slots=True)
class Block:
    """Some samples of equal structure.

    `indices`: the place of each sample, in the data set where that is known, else in the order of reading. `inputs`
    and `targets`: path of each array in the structure, and the array `[samples, ...]`. `batch`: samples of the
    batch that the block begins; None where it begins none. `skipped`: what could not be read as numbers.
    """

    indices: npt.NDArray[np.int64]
    inputs: dict[str, Array]
    targets: dict[str, Array]
    batch: int | None = None
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What was raised instead of a sample or a batch. `where`: which one, as text."""

    where: str
    error: str


@dataclass(frozen=True, slots=True)
class Source:
    """What is read. `batched`: whether it gives batches. `sequential`: whether a loader keeps the data set's order;
    None where that is not known or means nothing. `indexed`: whether indices are the data set's own.
    """

    data: Any
    batched: bool
    indexed: bool
    sequential: bool | None


def source(data: Any, name: str) -> Source:
    """What kind of thing was given. Raises ConfigError where it cannot be read, or be read only once."""
    if isinstance(data, Dataset):
        if not isinstance(data, IterableDataset) and not hasattr(data, "__len__"):
            raise ConfigError(
                f"{name} is a {type(data).__name__} without __len__: it has to say how many samples it has"
            )
        return Source(data, batched=False, indexed=not isinstance(data, IterableDataset), sequential=None)
    if isinstance(data, DataLoader):
        iterated = isinstance(data.dataset, IterableDataset)
        # Batches that a sampler of the user's own draws have the order that it gives them, whatever it draws from.
        usual = data.batch_sampler is None or type(data.batch_sampler) is BatchSampler
        sampler = getattr(data.batch_sampler, "sampler", data.sampler)
        # A loader of the user's own class may give anything: its batches are taken as they come.
        indexed = type(data) is DataLoader and not iterated and data.batch_sampler is not None
        return Source(data, True, indexed, type(sampler) is SequentialSampler if usual and not iterated else None)
    if isinstance(data, Iterator):
        raise ConfigError(
            f"{name} is a {type(data).__name__}, which can be read only once and would be used up: give the loader "
            "or data set itself"
        )
    if isinstance(data, (str, bytes, Mapping, torch.Tensor, np.ndarray)) or not isinstance(data, Iterable):
        raise ConfigError(
            f"{name} is a {type(data).__name__}: give a DataLoader, a torch Dataset or a list of batches; arrays as "
            "torch.utils.data.TensorDataset(inputs, targets)"
        )
    return Source(data, batched=True, indexed=False, sequential=None)


def size_of(given: Source) -> int | None:
    """How many samples there will be; None where that is not known."""
    data = given.data.dataset if given.indexed and given.batched else given.data
    if not given.indexed:
        return None
    try:
        return len(data)
    except TypeError:
        return None


def read(given: Source, inputs: Part, targets: Part, limit: int | None) -> Iterator[Block | Unreadable]:
    """The samples, at most `limit` of them, once and in order, in blocks of bounded size.

    A sample of a data set that raises is told and passed over; a loader that raises is told and ends the reading.
    """
    pick = Picker(inputs, targets)
    blocks = _read_batches(given, pick) if given.batched else _read_samples(given, pick, limit)
    left = math.inf if limit is None else limit
    for block in blocks:
        if isinstance(block, Block) and len(block.indices) > left:
            yield _first(block, int(left))
            return
        yield block
        left -= len(block.indices) if isinstance(block, Block) else 0
        if left <= 0:
            return


def _first(block: Block, samples: int) -> Block:
    return dataclasses.replace(
        block,
        indices=block.indices[:samples],
        inputs={path: array[:samples] for path, array in block.inputs.items()},
        targets={path: array[:samples] for path, array in block.targets.items()},
    )


# ------------------------------------------------------------------ batches and samples


def _read_batches(given: Source, pick: Picker) -> Iterator[Block | Unreadable]:
    loader, drawn = recorded(given.data) if given.indexed else (given.data, None)
    position = 0
    batches = iter(loader)
    for number in itertools.count():
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:  # whatever the user's data raise is what is to be told
            yield Unreadable(f"batch {number}{which(drawn)}", _said(error))
            return
        known = drawn.popleft() if drawn else None
        for block in _blocks(*pick(batch), position, known):
            position += len(block.indices)
            yield block


def _read_samples(given: Source, pick: Picker, limit: int | None) -> Iterator[Block | Unreadable]:
    waiting = _Waiting()
    for index, sample in itertools.islice(_samples(given), limit):
        if isinstance(sample, Unreadable):
            yield sample
            continue
        (inputs, skipped), (targets, also) = (arrays_in(part) for part in pick(sample))
        yield from waiting.add(index, inputs, targets, (*skipped, *also))
    yield from waiting.flush()


def _samples(given: Source) -> Iterator[tuple[int, Any]]:
    samples = enumerate(given.data) if not given.indexed else None
    for index in itertools.count() if samples is not None else range(len(given.data)):
        try:
            yield next(samples) if samples is not None else (index, given.data[index])
        except StopIteration:
            return
        except Exception as error:  # whatever the user's data raise is what is to be told
            yield index, Unreadable(f"sample {index}", _said(error))
            if samples is not None:
                return


def _said(error: Exception) -> str:
    # A worker's error carries its whole traceback; the last line is what happened.
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[-1]}" if text else type(error).__name__


@dataclass(slots=True)
class _Waiting:
    """Samples of equal structure that wait to be looked at together."""

    signature: object = None
    indices: list[int] = field(default_factory=list)
    samples: list[tuple[dict[str, Array], dict[str, Array]]] = field(default_factory=list)
    skipped: tuple[str, ...] = ()
    elements: int = 0

    def add(
        self, index: int, inputs: dict[str, Array], targets: dict[str, Array], skipped: tuple[str, ...]
    ) -> Iterator[Block]:
        signature = [(path, array.shape, array.dtype.kind, array.dtype.itemsize) for path, array in inputs.items()]
        signature += [(path, array.shape, array.dtype.kind, 0) for path, array in targets.items()]
        full = len(self.indices) >= _SAMPLES_TOGETHER or self.elements >= _ELEMENTS_TOGETHER
        if full or (self.indices and signature != self.signature):
            yield from self.flush()
        self.signature = signature
        self.indices.append(index)
        self.samples.append((inputs, targets))
        self.skipped = tuple(dict.fromkeys((*self.skipped, *skipped)))
        self.elements += sum(array.size for array in inputs.values())

    def flush(self) -> Iterator[Block]:
        if not self.indices:
            return
        inputs, targets = (
            {path: np.stack([sample[part][path] for sample in self.samples]) for path in self.samples[0][part]}
            for part in (0, 1)
        )
        yield Block(np.array(self.indices, np.int64), inputs, targets, None, self.skipped)
        self.indices, self.samples, self.skipped, self.elements = [], [], (), 0


def _blocks(inputs: Any, targets: Any, position: int, drawn: list[Any] | None) -> Iterator[Block]:
    """The blocks of one batch: one, or several where its samples have different shapes."""
    listed = _listed_samples(inputs, targets)
    if listed is not None:
        found = [arrays_in(sample) for sample in listed]
        labels = _listed_targets(targets, len(listed))
        places = _places(drawn, position, len(listed))
        waiting = _Waiting()
        blocks: list[Block] = []
        for index, (arrays, skipped), label in zip(places.tolist(), found, labels, strict=True):
            blocks += waiting.add(index, arrays, label, skipped)
        blocks += waiting.flush()
        yield dataclasses.replace(blocks[0], batch=len(listed))
        yield from blocks[1:]
        return
    (input_arrays, skipped), (target_arrays, also) = arrays_in(inputs), arrays_in(targets)
    every = [*target_arrays.values(), *input_arrays.values()]
    lengths = [len(array) for array in every if array.ndim]
    if not lengths:
        return
    # Packed sequences and graphs have more rows than samples; their targets have as many.
    samples = len(drawn) if drawn is not None and len(drawn) in lengths else max(lengths, key=lengths.count)
    of_batch = [
        path for found in (input_arrays, target_arrays) for path, array in found.items() if not _each(array, samples)
    ]
    yield Block(
        _places(drawn, position, samples),
        {path: array for path, array in input_arrays.items() if _each(array, samples)},
        {path: array for path, array in target_arrays.items() if _each(array, samples)},
        samples,
        (*skipped, *also, *(f"{path or 'a tensor'}, which has no row for each sample" for path in of_batch)),
    )


def _each(array: Array, samples: int) -> bool:
    return array.ndim > 0 and len(array) == samples


def _places(drawn: list[Any] | None, position: int, samples: int) -> npt.NDArray[np.int64]:
    if drawn is not None and len(drawn) == samples and all(isinstance(index, int) for index in drawn):
        return np.array(drawn, np.int64)
    return np.arange(position, position + samples, dtype=np.int64)


def _listed_samples(inputs: Any, targets: Any) -> Sequence[Any] | None:
    """The samples where a batch's inputs are a list of them, as in detection; None where they are stacked."""
    if (
        not isinstance(inputs, list)
        or not inputs
        or not all(isinstance(one, (torch.Tensor, np.ndarray)) for one in inputs)
    ):
        return None
    if isinstance(targets, (list, torch.Tensor, np.ndarray)) and len(inputs) != len(targets):
        return None
    lengths = {len(one) if one.ndim else None for one in inputs}
    return None if lengths == {len(inputs)} else inputs


def _listed_targets(targets: Any, samples: int) -> list[dict[str, Array]]:
    if isinstance(targets, (list, tuple)) and len(targets) == samples:
        return [arrays_in(target)[0] for target in targets]
    arrays = {path: array for path, array in arrays_in(targets)[0].items() if _each(array, samples)}
    return [{path: np.asarray(array[number]) for path, array in arrays.items()} for number in range(samples)]

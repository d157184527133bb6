"""Outputs that are the same for every sample of a batch, although what went in was not: a collapsed representation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from . import statistics
from .facts import Fact, Told
from .forward import Flow
from .modules import ModuleIndex
from .outputs import tensors_in
from .piece import SMALL, Parts
from .reduce import on_host
from .rows import Key, Rows
from .shards import is_spread
from .spread import ALIKE
from .statistics import Piece

#: Sampled steps in a row after which it is no accident: a last layer of zeros, and a rate that rises from 0, are usual.
FEWEST_STEPS = 5

#: Inputs of the model that are looked at.
_MOST_INPUTS = 4


class SmallOutput(NamedTuple):
    """An output small enough to be asked about. `sources`: rows of what its call was given; `given`: ids of it."""

    key: Key
    sources: tuple[Key, ...]
    given: tuple[int, ...]


class ModelInputs(NamedTuple):
    """What went into the outermost call: size of the batch, ids of the tensors, and whether samples differ.

    `differs`: one element, not 0 where the first sample and the last one are different; None for no batch.
    """

    batch: int
    ids: frozenset[int]
    differs: torch.Tensor | None

    @classmethod
    def of(cls, inputs: object) -> Self:
        """Some ten small operations, of which none waits for an accelerator."""
        given = [tensor for _, tensor in tensors_in(inputs)]
        batch = next((tensor.size(0) for tensor in given if tensor.dim()), 0)
        batches = [
            tensor
            for tensor in given
            if tensor.dim() and tensor.size(0) == batch and tensor.layout == torch.strided and not is_spread(tensor)
        ]
        with torch.no_grad():
            flags = [(tensor[0] != tensor[-1]).any() for tensor in batches[:_MOST_INPUTS]] if batch > 1 else []
            differs = torch.stack(flags).any().reshape(1).to(torch.float32) if flags else None
        return cls(batch, frozenset(map(id, given)), differs)


def count_samples(tensor: torch.Tensor, piece: Piece) -> int:
    """How many samples lie one after the other in the values of a piece; 0 where that cannot be told.

    A batch dimension that is expanded, or an output that no gradient flows through, is alike by design.
    """
    if piece.raw is not None or piece.status is not None or not tensor.requires_grad or not tensor.dim():
        return 0
    if tensor.layout != torch.strided or piece.count != tensor.numel() or is_spread(tensor):
        return 0
    strides, samples = tensor.stride(), tensor.size(0)
    return samples if samples > 1 and strides[0] > 0 and strides[0] == max(strides) else 0


def sources_of(
    flow: Flow, outputs: Sequence[tuple[str, torch.Tensor]], seen: Mapping[int, Any]
) -> tuple[tuple[Key, ...], tuple[int, ...]] | None:
    """Rows and ids of what a call was given; None where its outputs are too large to be asked about.

    `seen`: by id, the outputs that were measured in this pass, each with a weak `reference` and the `key` of its row.
    """
    for _, tensor in outputs:
        if tensor.numel() <= SMALL:
            break
    else:
        return None
    arguments, keywords = flow.inputs
    if len(arguments) == 1 and not keywords and isinstance(arguments[0], torch.Tensor):
        given = [arguments[0]]  # nearly every call, and the search below takes longer than all the rest
    else:
        given = [tensor for _, tensor in tensors_in(flow.inputs)]
    known = [(seen.get(id(tensor)), tensor) for tensor in given]
    keys = tuple(output.key for output, tensor in known if output is not None and output.reference() is tensor)
    return keys, tuple(map(id, given))


class AlikeOutputs:
    """`identical_outputs`, of outputs so small that their values travel to the background anyway.

    What its call was given must differ between the samples: the model's own input, or a small output of another
    module. A module that is given the same for all (positions, a parameter) puts out the same by design, and of one
    whose inputs are not known nothing is told.
    """

    def __init__(self, index: ModuleIndex) -> None:
        self._index = index
        self._told = Told()
        self._steps: dict[Key, int] = {}  # in a row, of the background thread
        self.open()

    def open(self) -> None:
        """A window begins."""
        self._calls: dict[Key, list[tuple[SmallOutput, Piece | None]]] = defaultdict(list)

    def passed(self, small: Sequence[SmallOutput], given: ModelInputs, rows: Rows) -> None:
        """A forward pass that counts has ended well."""
        flag = given.differs if small else None
        if flag is None:
            return
        host = statistics.runs_on_host(flag)
        differs = rows.keep(Piece(None, 1, values=flag.numpy()) if host else Piece(None, 1, parts=Parts(values=flag)))
        for output in small:
            self._calls[output.key].append((output, None if given.ids.isdisjoint(output.given) else differs))

    def close(self, rows: Rows) -> Callable[[], list[Fact]]:
        """The window ends; what the background is to do, once its numbers are on the host, to find the facts."""
        calls = self._calls
        return lambda: self._judge(rows, calls)

    def _judge(self, rows: Rows, calls: dict[Key, list[tuple[SmallOutput, Piece | None]]]) -> list[Fact]:
        spreads = rows.spreads()
        alike = np.flatnonzero(spreads <= ALIKE).tolist()
        if not alike and not self._steps:
            return []
        of_row = {row.key: spreads[row.number] for row in rows if not np.isnan(spreads[row.number])}
        found = {key: float(spread) for key, spread in of_row.items() if spread <= ALIKE}
        differing = [key for key in self._steps if of_row.get(key, 0.0) > ALIKE]
        self._told.gone(differing)
        for key in differing:
            del self._steps[key]
        facts = []
        for key, spread in found.items():
            if not calls.get(key) or not all(_fed_differently(*call, of_row) for call in calls[key]):
                self._steps.pop(key, None)
                continue
            self._steps[key] = self._steps.get(key, 0) + 1
            if self._steps[key] >= FEWEST_STEPS and self._told.first(key):
                facts.append(self._fact(key, spread))
        return facts

    def _fact(self, key: Key, spread: float) -> Fact:
        entry = self._index.entries[key.module]
        return Fact(
            "identical_outputs",
            f"{entry.type} puts out the same for every sample of the batch, though its inputs differ: relative "
            f"difference {spread:.2g}, at most {ALIKE:g}",
            entry.name,
            key.site,
            key.tensor or None,
            spread,
            ALIKE,
        )


def _fed_differently(output: SmallOutput, differs: Piece | None, of_row: dict[Key, float]) -> bool:
    """Whether what the call was given is known to differ between samples."""
    if any(of_row.get(source, 0.0) > ALIKE for source in output.sources if source != output.key):
        return True
    values = None if differs is None else on_host(differs)
    return values is not None and bool(values[0])

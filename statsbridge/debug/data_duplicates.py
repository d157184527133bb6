"""Samples that are equal to the bit, within a split and across splits, by a digest of each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]

PAIRS_SHOWN = 5


@dataclass(slots=True)
class Digests:
    """Of each sample its index and a digest of its inputs (128 bits) and targets (64 bits): 32 bytes a sample."""

    inputs: list[Words] = field(default_factory=list)
    targets: list[Words] = field(default_factory=list)
    indices: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def add(self, inputs: dict[str, Array], targets: dict[str, Array], indices: npt.NDArray[np.int64]) -> None:
        """Take in samples; those without any input have nothing to compare."""
        if not inputs or not len(indices):
            return
        self.inputs.append(_digests(inputs, len(indices), 16))
        self.targets.append(_digests(targets, len(indices), 8))
        self.indices.append(indices)


def _digests(arrays: dict[str, Array], samples: int, size: int) -> Words:
    hashes = [hashlib.blake2b(digest_size=size) for _ in range(samples)]
    for array in arrays.values():
        # Text is stored as wide as the widest of its block: each by itself.
        rows = array.reshape(samples, -1)
        head = f"{array.dtype.kind if array.dtype.kind == 'U' else array.dtype}{array.shape[1:]}".encode()
        for one, row in zip(hashes, rows, strict=True):
            one.update(head)
            one.update("\0".join(row.tolist()).encode() if array.dtype.kind == "U" else row.tobytes())
    return np.frombuffer(b"".join(one.digest() for one in hashes), np.uint64).reshape(samples, size // 8)


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Samples whose inputs are those of an earlier one (or of one in the other split).

    `count`: how many. `of`: out of how many samples. `conflicting`: how many of them have other targets than
    theirs. `pairs`: some, as (earlier index, index).
    """

    count: int
    of: int
    conflicting: int
    pairs: tuple[tuple[int, int], ...]


def duplicates_within(digests: Digests) -> Duplicates | None:
    """The samples of a split that came before in it; None where there are none."""
    return _duplicates(digests, None)


def duplicates_across(digests: Digests, other: Digests) -> Duplicates | None:
    """The samples of `other` that are in `digests` too; None where there are none."""
    return _duplicates(digests, other)


def _duplicates(first: Digests, second: Digests | None) -> Duplicates | None:
    both = [first] if second is None else [first, second]
    if not all(digests.inputs for digests in both):
        return None
    inputs, targets, indices = (
        np.concatenate([part for digests in both for part in getattr(digests, name)])
        for name in ("inputs", "targets", "indices")
    )
    if second is None:
        # A sampler that draws with replacement gives one sample several times: that is no duplicate.
        kept = np.sort(np.unique(indices, return_index=True)[1])
        inputs, targets, indices = inputs[kept], targets[kept], indices[kept]
    size = sum(map(len, first.inputs))
    order = np.lexsort((inputs[:, 1], inputs[:, 0]))  # stable: what came first stays first
    ordered = inputs[order]
    begins = np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])
    leader = order[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    found = ~begins if second is None else (order >= size) & (leader < size)
    if not found.any():
        return None
    copies, originals = order[found], leader[found]
    shown = np.argsort(copies, kind="stable")[:PAIRS_SHOWN]
    return Duplicates(
        count=len(copies),
        of=len(indices) if second is None else len(indices) - size,
        conflicting=int((targets[copies, 0] != targets[originals, 0]).sum()),
        pairs=tuple((int(indices[originals[place]]), int(indices[copies[place]])) for place in shown),
    )

"""What rules remember of each identity: arrays that grow as new ones appear."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Memory:
    """One value for each number from 0 on; `fill` for those that nothing was set for."""

    def __init__(self, fill: float | bool, dtype: npt.DTypeLike = np.float64) -> None:
        self._fill = fill
        self._values: npt.NDArray[Any] = np.full(64, fill, dtype)

    def __getitem__(self, numbers: Integers | int) -> Any:
        try:
            return self._values[numbers]
        except IndexError:  # rare, and looking for the largest number each time is not
            self._grow(numbers)
            return self._values[numbers]

    def set(self, numbers: Integers | int, values: Any) -> None:
        """Of several values for one number the last one counts."""
        try:
            self._values[numbers] = values
        except IndexError:
            self._grow(numbers)
            self._values[numbers] = values

    def any(self) -> bool:
        """Whether any value is not 0."""
        return bool(self._values.any())

    def _grow(self, numbers: Integers | int) -> None:
        grown = np.full(2 * (int(np.max(numbers)) + 1), self._fill, self._values.dtype)
        grown[: len(self._values)] = self._values
        self._values = grown


class Streak:
    """For how many samples in a row something has held for each identity, and since which step."""

    def __init__(self) -> None:
        self._length = Memory(0, np.int64)
        self._since = Memory(0, np.int64)
        self._any = False  # whether it may hold for any identity

    def update(self, ids: Integers, holds: Flags, step: int, needed: int) -> Flags:
        """Whether it holds for each of `ids` for the `needed`-th time at least. Other identities stay as they are."""
        holding = bool(np.count_nonzero(holds))
        if not (holding or self._any):
            return np.zeros(len(ids), bool) if needed > 0 else np.ones(len(ids), bool)
        self._any = True
        length = self._length[ids]
        self._since.set(ids[holds & (length == 0)], step)
        length = np.where(holds, length + 1, 0)
        self._length.set(ids, length)
        self._any = holding or self._length.any()
        enough: Flags = length >= needed
        return enough

    def length(self, ids: Integers) -> Integers:
        """For how many samples in a row it has held."""
        lengths: Integers = self._length[ids]
        return lengths

    def since(self, ids: Integers) -> Integers:
        """The step at which it began; only for those that it holds for."""
        steps: Integers = self._since[ids]
        return steps

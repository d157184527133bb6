"""The parts of a batch or sample: which are inputs, which are targets, and the arrays in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import PackedSequence

from ..errors import ConfigError

Array = npt.NDArray[Any]

#: Which part of a batch (or sample) is meant: a position, a key, or a function of it. None: by the usual structures.
Part = int | str | Callable[[Any], Any] | None

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
_DEEPEST = 16
_SCALARS = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Picker:
    """Takes inputs and targets out of a batch or sample.

    By default, of a tuple or list of two or more, the last is the target and the rest are inputs; of a mapping or
    dataclass, what is called labels, label, targets, target or y; anything else is input.
    """

    inputs: Part
    targets: Part

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        inputs, targets = _usual(batch)
        return (
            inputs if self.inputs is None else _part(batch, self.inputs, "inputs"),
            targets if self.targets is None else _part(batch, self.targets, "targets"),
        )


def _usual(batch: Any) -> tuple[Any, Any]:
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = {part.name: getattr(batch, part.name, None) for part in dataclasses.fields(batch)}
    if isinstance(batch, tuple) and hasattr(batch, "_fields") and any(key in batch._fields for key in TARGET_KEYS):
        batch = dict(zip(batch._fields, batch, strict=True))
    if isinstance(batch, Mapping):
        key = next((key for key in TARGET_KEYS if key in batch), None)
        rest = {name: value for name, value in batch.items() if name != key}
        return rest, None if key is None else batch[key]
    if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence) and len(batch) >= 2:
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0], None
    return batch, None


def _part(batch: Any, part: int | str | Callable[[Any], Any], name: str) -> Any:
    if callable(part):
        return part(batch)
    try:
        return batch[part]
    except (KeyError, IndexError, TypeError):
        has = f"with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"of {_length(batch)}"
        raise ConfigError(
            f"{name}={part!r} is not in a batch: it is a {type(batch).__name__} {has}; give a key, a position, or a "
            "function of the batch"
        ) from None


def _length(batch: Any) -> str:
    return f"{len(batch)} parts" if isinstance(batch, Sequence) else "no parts"


def arrays_in(value: Any) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The arrays in a structure by their path, and what could not be read as one."""
    found: dict[str, Array] = {}
    skipped: list[str] = []
    for path, leaf in _leaves(value, "", 0):
        array = _array(leaf)
        if array is None:
            skipped.append(f"{path or 'a part'} ({type(leaf).__name__})")
        else:
            found[path] = array
    return found, tuple(skipped)


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    children: Iterable[tuple[Any, Any]]
    if value is None:
        return
    if isinstance(value, PackedSequence):
        children = [("data", value.data)]
    elif isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(item, _SCALARS) for item in value):
            yield path, value
            return
        children = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = [(part.name, getattr(value, part.name, None)) for part in dataclasses.fields(value)]
    else:
        yield path, value
        return
    for key, child in children if depth < _DEEPEST else ():
        yield from _leaves(child, f"{path}.{key}" if path else str(key), depth + 1)


def _array(leaf: Any) -> Array | None:
    if isinstance(leaf, torch.Tensor):
        return _of_tensor(leaf)
    numbers = isinstance(leaf, (np.ndarray, np.generic, *_SCALARS, list, tuple))
    if not (numbers or hasattr(leaf, "__array_interface__")):
        return None
    array = np.asarray(leaf)
    return array if array.dtype.kind in "biufcU" else None


def _of_tensor(tensor: torch.Tensor) -> Array | None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        return None
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()  # numpy has no bfloat16
    return tensor.numpy()


def check_parts(part: Part, name: str) -> None:
    """Raise ConfigError where `inputs` or `targets` is none of what says a part of a batch."""
    if part is not None and not callable(part) and (not isinstance(part, (int, str)) or isinstance(part, bool)):
        raise ConfigError(f"{name} is a {type(part).__name__}: give a position, a key, or a function of the batch")

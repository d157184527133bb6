"""What one torch operation reads and writes, as far as the flow of data is concerned.

Told from its name, or from its schema where it has one: the tracer sees every operation once, as a call.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

Box = tuple[tuple[int, int], ...]  # start and stop in every dimension of a base that is longer than 1

_SHAPE_OF_FIRST = frozenset(
    {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"}
    | {"new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "new_tensor"}
)
_SHAPE_OF_OTHERS = frozenset({"type_as", "expand_as", "view_as", "reshape_as", "resize_as_", "to"})
_IN_PLACE = frozenset(
    {
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
    }
    | {"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__imatmul__"}
)


def operation_name(function: Any) -> str:
    """`add_` for `Tensor.add_`, `torch.ops.aten.add_` and its overloads."""
    return str(getattr(function, "__name__", "")).partition(".")[0]


def data_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments whose values reach the result: `zeros_like(x)` and `y.type_as(x)` use no value of x, and
    `x[:2] = y` replaces those it had.
    """
    if name == "__setitem__":
        return (*args[1:],)
    if name in _SHAPE_OF_FIRST:
        return (*args[1:], *(value for key, value in kwargs.items() if key != "input"))
    if name in _SHAPE_OF_OTHERS and args:
        return (args[0],)
    return (*args, *kwargs.values())


def is_in_place(name: str) -> bool:
    """Whether an operation of this name changes its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def written_arguments(function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What the operation changes in place: tensors, or lists of them."""
    written = []
    if name == "__setitem__" and _is_basic(args[1]):
        with torch.no_grad():
            written.append(args[0][args[1]])
    elif args and (is_in_place(name) or kwargs.get("inplace") is True or _sets_data(function, name)):
        written.append(args[0])
    if kwargs.get("out") is not None:
        written.append(kwargs["out"])
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        written.extend(_written_by_schema(function, args, kwargs))
    return written


def _is_basic(index: Any) -> bool:
    """Whether indexing gives a view: integers and slices alone."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(type(part) in (int, slice, type(None), type(Ellipsis)) for part in parts)


def _sets_data(function: Any, name: str) -> bool:
    """`x.data = y`, which torch shows as the `__set__` of a descriptor."""
    return name == "__set__" and getattr(getattr(function, "__self__", None), "__name__", "") == "data"


def _written_by_schema(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """What an operator of `torch.ops` says that it mutates; of several overloads the name must tell."""
    if isinstance(function, OpOverloadPacket):
        names: list[str] = function.overloads()  # type: ignore[no-untyped-call]
        if len(names) != 1:
            return
        function = getattr(function, names[0])
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def tensors_of(values: Any, levels: int = 6) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operation: bare, or in lists, tuples and dicts."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)) and levels:
            yield from tensors_of(value, levels - 1)
        elif isinstance(value, dict) and levels:
            yield from tensors_of(value.values(), levels - 1)


def region(tensor: torch.Tensor) -> tuple[torch.Tensor, Box | None]:
    """The tensor that owns the memory, and the box of it that `tensor` covers.

    The box is None for the owner itself and where it is no box (steps, transposed and merged dimensions,
    tensors without strides): then it may lie anywhere.
    """
    base = tensor._base
    if base is None:
        return tensor, None
    try:
        return base, _box(tensor, base)
    except (RuntimeError, NotImplementedError):  # sparse and nested tensors have no strides
        return base, None


def _box(view: torch.Tensor, base: torch.Tensor) -> Box | None:
    lengths = {stride: size for size, stride in zip(view.size(), view.stride(), strict=True) if size > 1}
    dimensions = [(stride, size) for size, stride in zip(base.size(), base.stride(), strict=True) if size > 1]
    rest = int(view.storage_offset()) - int(base.storage_offset())
    box = []
    for stride, size in sorted(dimensions, reverse=True):
        if stride == 0:
            return None
        start, rest = divmod(rest, stride)
        stop = start + lengths.pop(stride, 1)
        if start < 0 or stop > size:
            return None
        box.append((start, stop))
    return tuple(box) if rest == 0 and not lengths else None


def overlap(one: Box | None, other: Box | None) -> bool:
    """Whether two boxes of one base share an element; where one is unknown, they may."""
    if one is None or other is None:
        return True
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))

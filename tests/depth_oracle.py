"""An independent oracle for depth: poison the output of one leaf call with NaN and see where it arrives.

A call that the poison reaches is deeper than the poisoned one; the longest chain of such calls is the depth. Nothing
is said about how data flows, so views, in-place changes, skips and libraries are all as plain as they are in fact.
Integers cannot be poisoned: a model that passes data on as indices has its depths written by hand instead.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch
from tap_oracle import _replace
from torch import nn

Call = tuple[str, int]


@dataclass
class _Seen:
    """One forward: every call, in order, whether it is a leaf, and whether NaN went in or came out."""

    leaf: dict[Call, bool] = field(default_factory=dict)
    given: dict[Call, bool] = field(default_factory=dict)
    returned: dict[Call, bool] = field(default_factory=dict)
    has_output: dict[Call, bool] = field(default_factory=dict)
    before: dict[Call, list[Call]] = field(default_factory=dict)  # leaf calls inside a call


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors(inner)


def _poisoned(value: Any) -> bool:
    return any(bool(t.isnan().any()) for t in tensors(value) if t.is_floating_point())


def _poison(tensor: torch.Tensor, inputs: list[torch.Tensor], versions: Mapping[int, int]) -> torch.Tensor:
    """In place, so that whoever else holds what was returned is poisoned too; a mere view of an input is not it.

    Nor is what shares memory with an input that was handed on as it came, such as the tensor it was detached from.
    """
    if not tensor.is_floating_point():
        return tensor
    if versions.get(id(tensor)) == tensor._version:
        tensor.data = torch.full_like(tensor, float("nan"))
        return tensor
    shown = tensor._base is not None and any(tensor._base is (x if x._base is None else x._base) for x in inputs)
    if shown and not any(tensor is x for x in inputs):
        return torch.full_like(tensor, float("nan"))
    tensor.data.fill_(float("nan"))
    return tensor


def _run(model: nn.Module, args: Any, kwargs: Any, poison: Call | None, seed: int) -> _Seen:
    model = copy.deepcopy(model)
    seen = _Seen()
    stack: list[Call] = []
    versions: list[dict[int, int]] = []  # of the inputs of each open call
    counts: dict[str, int] = {}
    inside: dict[Call, bool] = {}
    open_calls: dict[str, list[Call]] = {}

    def before(name: str) -> Any:
        def hook(_module: nn.Module, given: Any, keywords: Any) -> None:
            call = (name, -1 - len(stack))  # numbered when its output is ready
            if stack:
                inside[stack[-1]] = True
            inside[call] = False
            seen.before[call] = []
            open_calls.setdefault(name, []).append(call)
            seen.given[call] = _poisoned((given, keywords))
            versions.append({id(tensor): tensor._version for tensor in tensors((given, keywords))})
            stack.append(call)

        return hook

    def after(name: str) -> Any:
        def hook(_module: nn.Module, given: Any, keywords: Any, output: Any) -> Any:
            temporary, before_it = stack.pop(), versions.pop()
            number = counts.get(name, 0)
            counts[name] = number + 1
            call = (name, number)
            seen.leaf[call] = not inside.pop(temporary)
            seen.given[call] = seen.given.pop(temporary)
            below = seen.before.pop(temporary)
            seen.before[call] = below
            if stack:
                seen.before[stack[-1]] += [*below, *([call] if seen.leaf[call] else [])]
            if call == poison:
                inputs = list(tensors((given, keywords)))
                output = _replace(output, "", lambda _, tensor: _poison(tensor, inputs, before_it))
            seen.has_output[call] = any(True for _ in tensors(output))
            seen.returned[call] = _poisoned(output)
            return output if call == poison else None

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(before(name), with_kwargs=True)
        module.register_forward_hook(after(name), with_kwargs=True)
    torch.manual_seed(seed)
    args, kwargs = copy.deepcopy((args, kwargs))
    model(*args, **kwargs)
    return seen


def poisoned_depths(model: nn.Module, *args: Any, **kwargs: Any) -> dict[Call, int]:
    """Depth of every call, in the order in which outputs were ready."""
    torch.manual_seed(0)
    plain = _run(model, args, kwargs, None, seed=1)
    assert not any(plain.returned.values()), "the model makes NaN by itself: the oracle cannot tell its own"
    reached: dict[Call, list[Call]] = {call: [] for call in plain.leaf}
    shown: dict[Call, list[Call]] = {call: [] for call in plain.leaf}
    leaves = [call for call, leaf in plain.leaf.items() if leaf]
    for poison in leaves:
        seen = _run(model, args, kwargs, poison, seed=1)
        assert list(seen.leaf) == list(plain.leaf), "the poison changed what is called"
        for call in plain.leaf:
            if seen.given[call] and call != poison:
                reached[call].append(poison)
            if seen.returned[call]:
                shown[call].append(poison)
    depth: dict[Call, int] = {}

    def deep(call: Call) -> int:
        if call not in depth:
            depth[call] = 1 + max((deep(other) for other in reached[call]), default=0)
        return depth[call]

    for call, leaf in plain.leaf.items():
        if leaf:
            deep(call)
        elif plain.has_output[call]:
            depth[call] = max((deep(other) for other in shown[call]), default=0)
        else:
            depth[call] = max((deep(other) for other in plain.before[call]), default=0)
    return {call: depth[call] for call in plain.leaf}


def table_depths(table: pa.Table) -> dict[Call, int]:
    """Depth by (module, call) of a `modules` table, in its order, of the calls that were traced."""
    return {(m["module"], m["call"]): m["depth"] for m in table.to_pylist() if m["depth"] is not None}

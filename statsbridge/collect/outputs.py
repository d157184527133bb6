"""What a module call returned: its tensors with their paths, and where the gradient of each can be seen."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

_DEEPEST = 16  # levels of nesting that are followed: no real output has as many


def tensors_in(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a module's output (or of its arguments), each with its path.

    Looks into tuples, lists, mappings (also transformers' ModelOutput), dataclasses and named tuples, at most
    16 levels deep and never round in a circle. Everything else is skipped, generators unread.

    Returns:
        Pairs of path and tensor. The path is `""` only where the value itself is one tensor; else positions,
        keys and field names joined by dots: `"0"`, `"1.hidden"`, `"logits"`. Of a PackedSequence there is
        `"data"` alone: its other tensors say where the values go.
    """
    if isinstance(value, torch.Tensor):
        return iter((("", value),))
    return _nested(value, "", ())


def _nested(value: object, prefix: str, around: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    if len(around) >= _DEEPEST or id(value) in around:
        return
    inside = (*around, id(value))
    for key, child in _children(value):
        if isinstance(child, torch.Tensor):
            yield f"{prefix}{key}", child
        elif child is not None:
            yield from _nested(child, f"{prefix}{key}.", inside)


def _children(value: object) -> Iterator[tuple[object, Any]]:
    """Keys and values of a container; nothing for anything else."""
    if isinstance(value, PackedSequence):
        yield "data", value.data
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None)
        yield from enumerate(value) if names is None else zip(names, value, strict=True)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name, None)


@dataclasses.dataclass(frozen=True, slots=True)
class ViewWatch:
    """Tells later whether the memory of an output was changed in place, without keeping that memory."""

    counter: torch.Tensor
    version: int

    def modified(self) -> bool:
        """Whether anything changed the output, or another view of the same base, since it was returned."""
        return self.counter._version != self.version


@dataclasses.dataclass(frozen=True, slots=True)
class GradientTarget:
    """Where the gradient of one output can be seen.

    Attributes:
        tensor: its `register_hook` sees the gradient: the output itself, or the base of which the output is a
            view of all elements. Such a base has the output's elements in another shape or order, so every
            statistic over elements is the output's. Holds the activation: do not keep it. Where it
            `is_leaf` (a module that returns a parameter or an input), the hook stays until its handle is
            removed.
        watch: None where the hook sees the gradient whatever happens to the output. Else keep it until the
            backward is over: if it was `modified()`, what the hook saw is not the whole gradient, or nothing
            (status `view_modified`).
    """

    tensor: torch.Tensor
    watch: ViewWatch | None


def gradient_target(
    output: torch.Tensor, leaf: bool, inputs: object = (), outputs: Sequence[torch.Tensor] = ()
) -> GradientTarget | None:
    """Where to hook the gradient of an output that a module has just returned.

    A hook on a tensor sees the gradient of its value before any later in-place change, except on a view:
    autograd then rebuilds the view's history from its base, and the hook is left out. `nn.Linear` with a bias
    returns a view for a 3-D input, and so do MultiheadAttention with `batch_first` and MaxPool1d.

    Args:
        output: a tensor of the module's output, of any shape.
        leaf: whether no other tracked module was called inside this call. Then a base made inside it serves
            nothing but its outputs, and its gradient is theirs.
        inputs: the arguments of the call, in any nesting: their bases were made before it.
        outputs: all tensors the call returned: a base that two of them share has the gradients of both.

    Returns:
        None where the output needs no gradient.
    """
    if not output.requires_grad:
        return None
    base = output._base
    if base is None:
        return GradientTarget(output, None)
    if (
        leaf
        and base.grad_fn is not None
        and _covers(output, base)
        and not any(other is not output and (other is base or other._base is base) for other in outputs)
        and not any(given is base or given._base is base for _, given in tensors_in(inputs))
    ):
        return GradientTarget(base, None)
    return GradientTarget(output, _watch(output))


def _watch(output: torch.Tensor) -> ViewWatch:
    counter = output.detach()
    # A detached tensor shares the version counter and, through it alone, what happens to the output can be
    # known later; giving it other data keeps the counter and lets go of the memory.
    counter.data = output.new_empty(0)
    return ViewWatch(counter, counter._version)


def _covers(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a view has every element of its base once, in whatever order."""
    return (
        view.numel() == base.numel()
        and view.dtype == base.dtype
        and view.is_conj() == base.is_conj()
        and view.is_neg() == base.is_neg()
        and _dense(view)
        and _dense(base)
    )


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a block of memory, none twice."""
    if tensor.layout != torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True

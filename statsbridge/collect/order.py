"""Depth of module calls in the flow of data, found while the model runs.

Every tensor carries a tag, the number of leaf module calls on the longest path from the model's inputs to it.
A `TorchFunctionMode` passes the tags from the arguments of each operation to its results; a leaf call adds
one. So branches on values, `*args`, loops, detach, frozen layers and both kinds of activation checkpointing
are as plain as anything else, and the forward computes exactly what it would without us.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from .modules import ModuleEntry
from .operations import (
    Box,
    data_arguments,
    operation_name,
    overlap,
    region,
    tensors_of,
    written_arguments,
)
from .outputs import tensors_in

_MOST_WRITES = 64  # boxes remembered for one base; beyond, they count as one that covers it all


@dataclass(slots=True)
class _Frame:
    """A module call that is running."""

    entry: ModuleEntry
    called: bool = False  # whether it has called another module, parametrizations apart
    deepest: int = 0  # depth of the deepest call inside
    read: int = 0  # deepest tag that an operation inside a leaf has read
    written: list[tuple[TensorWeakRef, Box | None]] = field(default_factory=list)

    @property
    def opaque(self) -> bool:
        """Inside a leaf tags are not passed on: what comes out is one deeper than what went in."""
        return self.entry.leaf and not self.called


class DepthTracer:
    """Traces one call of the outermost tracked module.

    `start()` before it, `enter` and `exit` around every tracked module call in it (the outermost one too),
    `stop()` after it. A mode belongs to a thread: call all of them in the thread that runs the model; calls
    of other threads are not seen.

    Modules that are not tracked count as plain code, modules in parametrizations add no depth. A leaf that
    hands back its very input (`nn.Identity`, dropout that is off) makes that tensor one deeper for all who
    use it afterwards, since it is one object. Data that leaves torch (`tolist`, numpy) loses its depth,
    unless autograd knows the way.

    Attributes:
        failed: what went wrong inside the tracer, or None. It never reaches the model; depths are void then.
    """

    def __init__(self) -> None:
        self.failed: BaseException | None = None
        self._mode = _TaggingMode(self._observe)
        self._frames: list[_Frame] = []
        self._tags: Any = WeakIdKeyDictionary()  # tensor -> depth when it was made
        self._writes: Any = WeakIdKeyDictionary()  # owner of memory -> [(box, depth)] of later changes to it
        self._nodes: dict[int, int] = {}  # sequence number of an autograd node -> depth of its results
        self._first_node = 0

    def start(self) -> None:
        """Enter the mode, below those of other people: their `with` blocks go on popping their own."""
        self._first_node = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        others = _modes()
        if not any(mode is self._mode for mode in others):
            # torch wants the default device, and nothing else, at the bottom.
            place = 1 if others and isinstance(others[0], DeviceContext) else 0
            _replace_modes([*others[:place], self._mode, *others[place:]])

    def stop(self) -> None:
        """Leave the mode, wherever it is on the stack, and forget every tag. May be called again."""
        others = _modes()
        if any(mode is self._mode for mode in others):
            _replace_modes([mode for mode in others if mode is not self._mode])
        self._forget()

    def enter(self, entry: ModuleEntry) -> None:
        """A tracked module is about to run."""
        if not entry.in_parametrization and self._frames:
            self._frames[-1].called = True
        self._frames.append(_Frame(entry))

    def exit(self, entry: ModuleEntry, args: Any, kwargs: Any, output: Any) -> int:
        """A tracked module has run.

        Returns:
            Depth of the call. Of a call inside which no other tracked module ran: one more than the deepest
            of its arguments and of whatever else it read. Of any other: the depth of its output, or of the
            deepest call inside where the output holds no tensor. 0 if the tracer has failed.
        """
        if self.failed is not None:
            return 0
        try:
            with torch._C.DisableTorchFunction():
                return self._exit(entry, args, kwargs, output)
        except Exception as error:
            self._fail(error)
            return 0

    def _exit(self, entry: ModuleEntry, args: Any, kwargs: Any, output: Any) -> int:
        if not any(frame.entry.index == entry.index for frame in self._frames):
            return 0  # a hook of somebody else raised before ours saw the call begin
        while (frame := self._frames.pop()).entry.index != entry.index:
            pass  # an interrupt that the model caught has skipped the hooks of these
        outputs = [tensor for _, tensor in tensors_in(output)]
        if frame.called:
            depth = max((self._depth_of(tensor) for tensor in outputs), default=frame.deepest)
        else:
            depth = self._leave_leaf(frame, [tensor for _, tensor in tensors_in((args, kwargs))], outputs)
        if self._frames:
            self._frames[-1].deepest = max(self._frames[-1].deepest, depth)
        return depth

    def _leave_leaf(self, frame: _Frame, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
        depth = max((self._depth_of(tensor) for tensor in inputs), default=0)
        depth = max(depth, frame.read) + (not frame.entry.in_parametrization)
        given = {id(tensor if tensor._base is None else tensor._base) for tensor in inputs}
        for reference, box in frame.written:
            owner = reference()
            # What a leaf writes to its own buffers (running means) is its state and flows nowhere.
            if owner is not None and (id(owner) in given or owner in self._tags):
                self._write(owner, box, depth)
        for tensor in outputs:
            self._tag(tensor, depth)
        return depth

    def _observe(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation has run: pass on the tags."""
        if self.failed is not None:
            return
        try:
            with torch._C.DisableTorchFunction():
                name = operation_name(function)
                changed = tensors_of(written_arguments(function, name, args, kwargs))
                written = [tensor for tensor in changed if tensor.numel()]
                results = list(tensors_of((result,)))
                if written or results:
                    self._pass_on(list(tensors_of(data_arguments(name, args, kwargs))), written, results)
        except Exception as error:
            self._fail(error)

    def _pass_on(self, inputs: list[torch.Tensor], written: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        frame = self._frames[-1] if self._frames else None
        if frame is not None and frame.opaque:
            for tensor in inputs:
                frame.read = max(frame.read, self._depth_of(tensor, search=False))
            for tensor in written:
                owner, box = region(tensor)
                frame.written.append((TensorWeakRef(owner), box))
            return
        depth = max((self._depth_of(tensor) for tensor in inputs), default=0)
        for tensor in written:
            self._write(*region(tensor), depth)
            self._tag_node(tensor, depth)
        for tensor in results:
            # `x.contiguous()` may be x itself: no value of it is new.
            if not any(tensor is other for other in inputs):
                self._tag(tensor, self._depth_of_result(tensor, inputs, depth))

    def _tag(self, tensor: torch.Tensor, depth: int) -> None:
        self._tags[tensor] = depth
        self._tag_node(tensor, depth)

    def _tag_node(self, tensor: torch.Tensor, depth: int) -> None:
        node = _node(tensor)
        if node is not None:
            number = node._sequence_nr()
            self._nodes[number] = max(depth, self._nodes.get(number, 0))

    def _write(self, owner: torch.Tensor, box: Box | None, depth: int) -> None:
        writes = self._writes.get(owner)
        if writes is None:
            self._writes[owner] = writes = []
        writes.append((box, depth))
        if len(writes) > _MOST_WRITES:
            writes[:] = [(None, max(deep for _, deep in writes))]

    def _made_at(self, tensor: torch.Tensor, search: bool = True) -> int:
        """Depth of a tensor when it was made; `search` looks for a lost tag."""
        depth: int | None = self._tags.get(tensor)
        if depth is None and search:
            depth = self._search(tensor)
            if depth:
                self._tags[tensor] = depth
        return depth or 0

    def _depth_of(self, tensor: torch.Tensor, search: bool = True) -> int:
        """Depth of the values in a tensor now: when it was made, or of what was written to its memory."""
        depth = self._made_at(tensor, search)
        if self._writes:
            owner, box = region(tensor)
            for written, deep in self._writes.get(owner, ()):
                if deep > depth and overlap(box, written):
                    depth = deep
        return depth

    def _depth_of_result(self, result: torch.Tensor, inputs: list[torch.Tensor], depth: int) -> int:
        """Depth of what an operation has made; of a view, that of the memory it shows.

        What was written elsewhere in that memory, and the other arguments (`broadcast_tensors`), are not in it.
        """
        owner = result._base
        if owner is None:
            return depth
        shown = [tensor for tensor in inputs if tensor is owner or tensor._base is owner]
        return max((self._made_at(tensor) for tensor in shown), default=depth)

    def _search(self, tensor: torch.Tensor) -> int:
        """Depth of a tensor made where the mode does not look: in a kernel of an autograd function, or a
        scripted one. Found from the autograd nodes before it, and from the tensor of which it is a view.
        """
        depth = 0 if tensor._base is None else self._made_at(tensor._base)
        seen: set[int] = set()
        nodes = [_node(tensor)]
        while nodes:
            node = nodes.pop()
            if node is None or (number := node._sequence_nr()) in seen or number < self._first_node:
                continue
            seen.add(number)
            known = self._nodes.get(number)
            if known is not None:
                depth = max(depth, known)
            else:
                nodes.extend(before for before, _ in node.next_functions)
        return depth

    def _fail(self, error: Exception) -> None:
        # The traceback would keep the tensors of every frame alive: only its text stays.
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
        self.failed = error.with_traceback(None)
        self._forget()

    def _forget(self) -> None:
        self._frames.clear()
        self._tags.clear()
        self._writes.clear()
        self._nodes.clear()


class _TaggingMode(TorchFunctionMode):
    """Runs every operation unchanged and reports it."""

    def __init__(self, observe: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        self._observe = observe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._observe(func, args, kwargs, result)
        return result


def _node(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view made under no_grad, after its base was changed in place: torch refuses to say
        return None


def _modes() -> list[Any]:
    """The modes of this thread, bottom first."""
    return [torch._C._get_function_stack_at(level) for level in range(torch._C._len_torch_function_stack())]


def _replace_modes(modes: list[Any]) -> None:
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)

"""Small models for the tests of order, depth, outputs and modules, and a stand-in for the collector."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from statsbridge.collect.modules import ModuleEntry, ModuleIndex
from statsbridge.collect.order import DepthTracer


class Traced:
    """Owns the global module hooks round a tracer, as the collector does. Use it as a context manager.

    `order` and `depth` map (module, call) to the position in execution and the depth of that call.
    """

    def __init__(self, model: nn.Module, index: ModuleIndex | None = None) -> None:
        self.index = ModuleIndex(model) if index is None else index
        self.tracer = DepthTracer()
        self.order: dict[tuple[str, int], int] = {}
        self.depth: dict[tuple[str, int], int] = {}
        self._calls: dict[str, int] = {}
        self._open: list[ModuleEntry] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> Traced:
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
            # torch leaves this behind, and another test counts the hooks of the process.
            torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)
        self.tracer.stop()

    def _before(self, module: nn.Module, _args: Any) -> None:
        entry = self.index.entry(module)
        if entry is None or threading.get_ident() != self._thread:
            return
        if not self._open:
            self.tracer.start()
        self._open.append(entry)
        self.tracer.enter(entry)

    def _after(self, module: nn.Module, args: Any, *rest: Any) -> None:
        entry = self.index.entry(module)
        if entry is None or entry not in self._open or threading.get_ident() != self._thread:
            return
        while self._open.pop() is not entry:
            pass
        kwargs = rest[0] if len(rest) == 2 else {}
        call = self._calls.get(entry.name, 0)
        self._calls[entry.name] = call + 1
        self.depth[entry.name, call] = self.tracer.exit(entry, args, kwargs, rest[-1])
        self.order[entry.name, call] = len(self.order)
        if not self._open:
            self.tracer.stop()


def depths(model: nn.Module, *args: Any, **kwargs: Any) -> dict[tuple[str, int], int]:
    """Depth of every call of one traced forward; the tracer must not have failed nor left its mode."""
    modes = torch._C._len_torch_function_stack()
    with Traced(model) as traced:
        model(*args, **kwargs)
        assert torch._C._len_torch_function_stack() == modes
    assert traced.tracer.failed is None, traced.tracer.failed
    return traced.depth


def first_calls(depth: dict[tuple[str, int], int]) -> dict[str, int]:
    """Where no module is reused: by name alone."""
    assert all(call == 0 for _, call in depth)
    return {name: deep for (name, _), deep in depth.items()}


def linear(*names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(3, 3) for name in names}


def rows(count: int = 4) -> Tensor:
    return torch.randn(count, 3)


class Plain(nn.Module):
    """A module whose children and forward are given: `Plain(lambda m, x: m.a(x), a=nn.Linear(3, 3))`."""

    def __init__(self, run: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class One(Plain):
    """A `Plain` of one argument and an optional one, for torch.fx, which cannot pass on `*args`."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.run(self, x) if mask is None else self.run(self, x * mask)


class UNet(nn.Module):
    """Two levels, skip connections by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(2)
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.bottom = nn.Conv2d(8, 8, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.merge2 = nn.Conv2d(16, 4, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.merge1 = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(self.pool(skip1))
        deep = self.bottom(self.pool(skip2))
        middle = self.merge2(torch.cat([skip2, self.up2(deep)], dim=1))
        return self.merge1(torch.cat([skip1, self.up1(middle)], dim=1))


UNET_DEPTH = {
    ("down1.0", 0): 1,
    ("down1.1", 0): 2,
    ("down1", 0): 2,
    ("pool", 0): 3,
    ("down2.0", 0): 4,
    ("down2.1", 0): 5,
    ("down2", 0): 5,
    ("pool", 1): 6,
    ("bottom", 0): 7,
    ("up2", 0): 8,
    ("merge2", 0): 9,
    ("up1", 0): 10,
    ("merge1", 0): 11,
    ("", 0): 11,
}


class Residual(nn.Module):
    """Two convolutions; the other branch is the input, or a convolution of it."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.down = nn.Conv2d(channels, out, 1) if channels != out else None

    def forward(self, x: Tensor) -> Tensor:
        other = x if self.down is None else self.down(x)
        y = self.conv2(self.relu(self.bn1(self.conv1(x))))
        y += other
        return functional.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.block1 = Residual(4, 4)
        self.block2 = Residual(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.block1(self.stem(x)))
        return self.head(x.mean(dim=(2, 3)))


RESNET_DEPTH = {
    "stem": 1,
    "block1.conv1": 2,
    "block1.bn1": 3,
    "block1.relu": 4,
    "block1.conv2": 5,
    "block1": 5,
    "block2.down": 6,
    "block2.conv1": 6,
    "block2.bn1": 7,
    "block2.relu": 8,
    "block2.conv2": 9,
    "block2": 9,
    "head": 10,
    "": 10,
}


class Recurrent(nn.Module):
    """An LSTM, then an LSTMCell in a loop over time, then one Linear over all its states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.cell = nn.LSTMCell(4, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        sequence, (h, _) = self.lstm(x)
        state = (h.new_zeros(x.shape[0], 5), h.new_zeros(x.shape[0], 5))
        states = []
        for t in range(sequence.shape[1]):
            state = self.cell(sequence[:, t], state)
            states.append(state[0])
        return self.head(torch.stack(states, dim=1))


class Doubled(torch.autograd.Function):
    """A kernel that torch cannot look into: the tensor leaves it and comes back as another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(2.0 * x.detach().numpy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2.0 * grad


class Reversed(torch.autograd.Function):
    """Gradient reversal: hands back its very input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Adversarial(nn.Module):
    """Everything at once that has misled a tracer."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "shared", "frozen", "left", "right", "late", "mixed", "after", "once", "twice"):
            self.add_module(name, nn.Linear(6, 6))
        self.middle = nn.Linear(3, 3)
        self.embedding = nn.Embedding(6, 6)
        self.head = nn.Linear(6, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.shared(self.shared(self.first(x)))  # reuse: 1, 2, 3
        frozen = self.frozen(x.detach())  # 4
        canvas = torch.zeros(x.shape[0], 12)
        canvas[:, :6] = self.left(frozen)  # setitem: 5
        canvas[:, 6:].copy_(self.right(x))  # copy_ into a view: 4
        a, b = self.late(canvas[:, :6] + canvas[:, 6:]).chunk(2, dim=1)  # 6
        joined = torch.einsum("bi,bj->bij", self.middle(a), b).flatten(1)[:, :6]  # middle: 7
        words = self.embedding(joined.argmax(dim=1))  # integer path: 8
        turned = self.mixed(Reversed.apply(Doubled.apply(words)))  # custom functions: 9
        kept = checkpoint(self.once, turned, use_reentrant=False)  # 10
        again = checkpoint(lambda t: self.after(functional.relu(self.twice(t))), kept, use_reentrant=True)  # 11, 12
        return {"logits": self.head(again + x), "states": (again, None), "note": "text"}  # head: 13


ADVERSARIAL_DEPTH = {
    ("first", 0): 1,
    ("shared", 0): 2,
    ("shared", 1): 3,
    ("frozen", 0): 4,
    ("left", 0): 5,
    ("right", 0): 4,
    ("late", 0): 6,
    ("middle", 0): 7,
    ("embedding", 0): 8,
    ("mixed", 0): 9,
    ("once", 0): 10,
    ("twice", 0): 11,
    ("after", 0): 12,
    ("head", 0): 13,
    ("", 0): 13,
}


class Branches(nn.Module):
    """Takes a branch by the values of its input, and any number of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Linear(3, 3)
        self.long = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.last = nn.Linear(3, 1)

    def forward(self, *inputs: Tensor) -> Tensor:
        total = torch.zeros(())
        for x in inputs:
            total = total + (self.long(x) if x.sum() > 0 else self.short(x))
        return self.last(total)


class ModelOutput(OrderedDict[str, Any]):
    """As transformers has it: a dict whose subclasses are dataclasses, without the fields that are None."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value


@dataclass
class CausalOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None

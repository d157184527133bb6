"""Random small models, one a seed.

Every block maps numbers of a shape [batch, WIDTH] or [batch, TIME, WIDTH] to numbers of that shape.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, TIME = 6, 3


class Scaled(nn.Module):
    """A childless module with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Viewed(nn.Module):
    """Returns a view of its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1).view(x.shape) if x.is_contiguous() else x.transpose(0, 1).transpose(0, 1)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return _Doubled.apply(x)


class Trip(nn.Module):
    """Raises where it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.armed is not None:
            raise self.armed("tripped")
        return x


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "half": lambda x: x * 0.5,
    "half in place": lambda x: x.mul_(0.5),
    "part in place": lambda x: (x[..., :2].mul_(0.5), x)[1],
    "item in place": lambda x: (x.__setitem__((..., 1), 0.25), x)[1],
    "relu in place": functional.relu_,
    "reordered": lambda x: x.flip(-1),
    "cut and joined": lambda x: torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1),
    "mixed": lambda x: torch.einsum("b...i,b...j->b...i", x, x.detach().tanh()),
}


class Chain(nn.Module):
    """Modules one after another, with operations of no module between them."""

    def __init__(self, modules: list[nn.Module], between: list[str]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(modules)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for module, between in zip(self.steps, self.between, strict=True):
            x = BETWEEN[between](module(x))
        return x


class Residual(nn.Module):
    """What goes in is added to what comes out: the one into the other in place, or neither."""

    def __init__(self, inner: nn.Module, way: str) -> None:
        super().__init__()
        self.inner, self.way = inner, way

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if self.way == "into the output":
            y += x
            return y
        if self.way == "into a copy":
            x = x.clone()
            return x.add_(y)
        return y + x


class Named(NamedTuple):
    left: Any
    right: Any


@dataclass
class Result:
    left: Any
    right: Any


SHAPES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "tuple": (lambda a, b: (a, b), lambda y: (y[0], y[1])),
    "list": (lambda a, b: [a, [b, None]], lambda y: (y[0], y[1][0])),
    "dict": (lambda a, b: {"left": a, "deep": {"right": b}}, lambda y: (y["left"], y["deep"]["right"])),
    "named": (Named, lambda y: (y.left, y.right)),
    "dataclass": (Result, lambda y: (y.left, y.right)),
    "with indices": (lambda a, b: (a, b, a.argmax(-1)), lambda y: (y[0], y[1])),
    "the same twice": (lambda a, b: (a, b, a), lambda y: (y[0] + y[2], y[1])),
}


class Fork(nn.Module):
    """Two branches, returned in a container."""

    def __init__(self, left: nn.Module, right: nn.Module, shape: str) -> None:
        super().__init__()
        self.left, self.right, self.shape = left, right, shape

    def forward(self, x: Tensor) -> Any:
        return SHAPES[self.shape][0](self.left(x), self.right(x))


class Joined(nn.Module):
    def __init__(self, fork: Fork) -> None:
        super().__init__()
        self.fork = fork

    def forward(self, x: Tensor) -> Tensor:
        left, right = SHAPES[self.fork.shape][1](self.fork(x=x))
        return torch.tanh(left) + 0.5 * right  # type: ignore[no-any-return]


class Repeated(nn.Module):
    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.inner(x)
        return x


class Checkpointed(nn.Module):
    """Activation checkpointing; `enabled` is False in the oracle's model."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant, self.enabled = inner, reentrant, True

    def forward(self, x: Tensor) -> Any:
        x = x if x.requires_grad else x.clone().requires_grad_()
        return checkpoint(self.inner, x, use_reentrant=self.reentrant) if self.enabled else self.inner(x)


class Frozen(nn.Module):
    def __init__(self, inner: nn.Module, in_eval_mode: bool) -> None:
        super().__init__()
        self.inner, self.in_eval_mode = inner.requires_grad_(False), in_eval_mode
        self.train()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        if self.in_eval_mode:
            self.inner.eval()
        return self

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Cut(nn.Module):
    """Cuts the graph: before the inner module, after it, or around it."""

    def __init__(self, inner: nn.Module, where: str) -> None:
        super().__init__()
        self.inner, self.where = inner, where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "before":
            return x + self.inner(x.detach())  # type: ignore[no-any-return]
        if self.where == "after":
            return x + self.inner(x).detach()  # type: ignore[no-any-return]
        with torch.no_grad():
            y = self.inner(x)
        return x + y  # type: ignore[no-any-return]


class Branch(nn.Module):
    """Takes a branch by a value: by one of them, since after a norm their sum is 0 up to rounding."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Any:
        return self.left(x) if x.detach().flatten()[0] > 0 else self.right(x)


class First(nn.Module):
    """A module that returns a tuple, of which the first goes on."""

    def __init__(self, inner: nn.Module, attention: bool) -> None:
        super().__init__()
        self.inner, self.attention = inner, attention

    def forward(self, x: Tensor) -> Any:
        return (self.inner(x, x, x) if self.attention else self.inner(x))[0]


class Generator:
    """Makes one model; the same seed makes the same."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._made: list[nn.Module] = []
        self.time = self._random.random() < 0.4

    def model(self) -> nn.Module:
        stem, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, self._random.randint(1, 4))
        blocks = [self._block(2) for _ in range(self._random.randint(1, 4))]
        blocks.insert(self._random.randint(0, len(blocks)), Trip())
        return nn.Sequential(stem, *blocks, head)

    def _block(self, levels: int) -> nn.Module:
        chance = self._random
        if self._made and chance.random() < 0.08:
            return chance.choice(self._made)  # one module in two places
        if levels == 0 or chance.random() < 0.35:
            block = self._leaf()
        else:
            kinds = [self._residual, self._joined, self._repeated, self._frozen, self._cut, self._branch]
            kinds += 2 * [self._chain, self._checkpointed]
            block = chance.choice(kinds)(levels - 1)
        self._made.append(block)
        return block

    def _leaf(self) -> nn.Module:
        kinds: list[Callable[[], nn.Module]] = [
            lambda: nn.Linear(WIDTH, WIDTH),
            lambda: nn.Linear(WIDTH, WIDTH, bias=False),
            lambda: nn.LayerNorm(WIDTH),
            lambda: nn.BatchNorm1d(TIME if self.time else WIDTH),
            lambda: nn.ReLU(inplace=self._random.random() < 0.6),
            lambda: nn.Dropout(self._random.choice([0.0, 0.3]), inplace=self._random.random() < 0.3),
            nn.Tanh,
            nn.GELU,
            nn.Identity,
            nn.PReLU,
            lambda: nn.Hardtanh(inplace=True),
            Scaled,
            Viewed,
            Doubled,
        ]
        if self.time:
            kinds += [
                lambda: First(nn.LSTM(WIDTH, WIDTH, batch_first=True), False),
                lambda: First(nn.GRU(WIDTH, WIDTH, batch_first=True), False),
                lambda: First(nn.MultiheadAttention(WIDTH, 2, batch_first=True), True),
            ]
        return self._random.choice(kinds)()

    def _chain(self, levels: int, first: nn.Module | None = None) -> nn.Module:
        modules = [] if first is None else [first]
        modules += [self._block(levels) for _ in range(self._random.randint(1, 3))]
        quiet = self._random.random() < 0.5
        return Chain(modules, ["nothing" if quiet else self._random.choice(list(BETWEEN)) for _ in modules])

    def _residual(self, levels: int) -> nn.Module:
        return Residual(self._block(levels), self._random.choice(["neither", "into the output", "into a copy"]))

    def _joined(self, levels: int) -> nn.Module:
        return Joined(Fork(self._block(levels), self._block(levels), self._random.choice(list(SHAPES))))

    def _repeated(self, levels: int) -> nn.Module:
        return Repeated(self._block(levels), self._random.randint(2, 3))

    def _checkpointed(self, levels: int) -> nn.Module:
        # What changes the input of a checkpoint in place would change it once more in the recompute.
        return Checkpointed(self._chain(levels, nn.Linear(WIDTH, WIDTH)), self._random.random() < 0.5)

    def _frozen(self, levels: int) -> nn.Module:
        return Frozen(self._block(levels), self._random.random() < 0.5)

    def _cut(self, levels: int) -> nn.Module:
        return Cut(self._block(levels), self._random.choice(["before", "after", "around"]))

    def _branch(self, levels: int) -> nn.Module:
        return Branch(self._block(levels), self._block(levels))


def make_model(seed: int) -> tuple[nn.Module, bool]:
    """The model of a seed, and whether its input has a dimension of time."""
    torch.manual_seed(seed)
    generator = Generator(seed)
    model = generator.model()
    return model, generator.time

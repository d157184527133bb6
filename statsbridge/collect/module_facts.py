"""Facts about modules that behave differently in training: in eval mode by mistake, or statistics that stand still."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from .facts import Fact, Told
from .modules import ModuleEntry, ModuleIndex
from .reduce import on_host
from .rows import Rows
from .statistics import Piece, Wanted, measure

if TYPE_CHECKING:
    from .forward import ForwardPass

#: Sampled steps with a forward pass in training mode after which statistics that have not changed never do.
FEWEST_STEPS = 3

_BUFFERS = ("running_mean", "running_var")
_AS_THEY_ARE = Wanted(kl=False)


class ModuleFacts:
    """`module_eval` and `running_statistics_unchanged`.

    A normalisation whose running statistics have changed once is taken for sound from then on: in a healthy training
    they are copied in the first two sampled steps alone.
    """

    def __init__(self, index: ModuleIndex) -> None:
        self._index = index
        self._modal: list[int] = []
        self._in_eval = Told()
        self._at_rest = Told()
        # Of the background thread; the training thread only looks into `_sound`.
        self._sound: set[int] = set()
        self._last: dict[int, tuple[object, int]] = {}
        self.look()
        self.open()

    def look(self) -> None:
        """Which modules behave differently in training? Asked again where the models have changed."""
        modules = ((entry, self._index.module(entry)) for entry in self._index.entries)
        self._modal = [entry.index for entry, module in modules if module is not None and _is_modal(module)]

    def open(self) -> None:
        """A window begins."""
        self._evaluated: set[int] = set()
        self._trained: set[int] = set()

    def passed(self, forward: ForwardPass) -> None:
        """A forward pass that counts has ended well: in which mode were those that it has run?"""
        root = self._index.module(forward.root)
        if root is None or not root.training:
            return
        for number in self._modal:
            module = self._index.module(self._index.entries[number]) if number in forward.calls else None
            if module is not None:
                (self._trained if module.training else self._evaluated).add(number)

    def close(self, rows: Rows) -> Callable[[], list[Fact]]:
        """The window ends; what the background is to do, once its numbers are on the host, to find the facts."""
        self._in_eval.gone(self._trained - self._evaluated)
        entries = self._index.entries
        found = []
        for number in sorted(self._evaluated):
            module = self._index.module(entries[number])
            effect = None if module is None else _effect_of_eval(module)
            if effect is not None and self._in_eval.first(number):
                said = f"{entries[number].type} is in eval mode while the model trains: {effect}"
                found.append(Fact("module_eval", said, entries[number].name))
        kept = [(entries[number], self._keep(rows, number)) for number in sorted(self._trained - self._sound)]
        return lambda: found + [fact for entry, pieces in kept if (fact := self._judge(entry, pieces)) is not None]

    def _keep(self, rows: Rows, number: int) -> list[Piece]:
        module = self._index.module(self._index.entries[number])
        buffers = [] if module is None else [_buffer(module, name) for name in _BUFFERS]
        if len(buffers) != len(_BUFFERS) or any(type(buffer) is not torch.Tensor for buffer in buffers):
            return []
        with torch._C.DisableTorchFunction():
            return [rows.keep(measure(buffer, _AS_THEY_ARE)) for buffer in buffers if buffer is not None]

    def _judge(self, entry: ModuleEntry, pieces: list[Piece]) -> Fact | None:
        # Windows that were closed before the background came to judge an earlier one still have pieces of it.
        if not pieces or entry.index in self._sound:
            return None
        now = tuple(map(_bits, pieces))
        if None in now:
            return None
        before, steps = self._last.get(entry.index, (now, 0))
        if now != before:
            self._sound.add(entry.index)
            self._last.pop(entry.index, None)
            self._at_rest.gone([entry.index])
            return None
        self._last[entry.index] = now, steps + 1
        if steps + 1 < FEWEST_STEPS or not self._at_rest.first(entry.index):
            return None
        return Fact(
            "running_statistics_unchanged",
            f"{steps + 1} sampled steps ran {entry.type} in training mode, and its running mean and variance are "
            "the same to the bit: in eval mode it would normalise by them",
            entry.name,
        )


def _buffer(module: nn.Module, name: str) -> Any:
    """A buffer of its own, None where it has none of that name."""
    if isinstance(module, torch.jit.ScriptModule):  # what it has in place of the dict can only be asked so
        return getattr(module, name, None)
    return module._buffers.get(name)


def _is_modal(module: nn.Module) -> bool:
    return _buffer(module, "running_mean") is not None or _drop_rate(module) is not None


def _effect_of_eval(module: nn.Module) -> str | None:
    """What eval mode changes about it; None where it changes nothing."""
    if _buffer(module, "running_mean") is not None:
        trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        own = "its own parameters are trained" if trained else "its own parameters are not trained either"
        return f"it normalises by its running statistics, which stay as they are; {own}"
    rate = _drop_rate(module)
    return f"it drops nothing (its rate is {rate:g})" if rate else None


def _drop_rate(module: nn.Module) -> float | None:
    """How much it drops in training; None where it is no dropout of any kind."""
    kind = type(module).__name__
    names: tuple[str, ...] = ()
    if isinstance(module, nn.modules.dropout._DropoutNd | nn.RNNBase | nn.MultiheadAttention):
        names = ("p", "dropout")
    elif "Dropout" in kind or kind in ("DropPath", "DropBlock", "StochasticDepth"):
        names = ("p", "drop_prob", "drop_rate")
    for name in names:
        rate: Any = getattr(module, name, None)
        if isinstance(rate, float | int) and not isinstance(rate, bool):
            return float(rate)
    return None


def _bits(piece: Piece) -> object:
    """What is equal only where two measurements saw the same bits (of a large tensor: the same sums).

    None where there is a NaN or an infinity: those stay as they are by arithmetic, not by the module's settings.
    """
    values = on_host(piece)
    if values is not None and not np.isfinite(values).all():
        return None
    return piece.raw if values is None or piece.raw is not None else values.tobytes()

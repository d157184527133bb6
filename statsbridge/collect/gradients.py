"""Gradients of activations: tensor hooks that fill rows when the backward pass reaches an output."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .rows import Key

#: Called with the rows to fill and the gradient; `again` where this output's gradient arrived before.
Arrival = Callable[[list[Key], torch.Tensor, bool], None]


class GradientHook:
    """The hook on one output. It outlives its window where the user keeps the graph: then it does nothing."""

    __slots__ = ("_arrival", "_trouble", "fired", "keys", "once")

    def __init__(self, keys: list[Key], arrival: Arrival, trouble: Callable[[str, str, BaseException], None]) -> None:
        self.keys = keys
        self.fired = False
        self.once = True  # whether a second gradient means a second backward through one graph
        self._arrival: Arrival | None = arrival
        self._trouble = trouble

    def __call__(self, gradient: torch.Tensor) -> None:
        # A backward pass that is itself recorded (create_graph) is an inner one (a gradient penalty), not the step's.
        # Not by `gradient.requires_grad`: the first gradient of such a pass may be a constant.
        arrival = self._arrival
        if arrival is None or gradient is None or torch.is_grad_enabled():
            return
        try:
            again, self.fired = self.fired and self.once, True
            arrival(self.keys, gradient, again)
        except Exception as error:
            self._trouble("the hook on a gradient", "", error)

    def silence(self) -> None:
        """Let go of the window."""
        self._arrival = None

"""Parameters remembered by the place that holds them: no reference of ours, not even a weak one, stands on a tensor.

`torch.utils.swap_tensors`, by which `Module.to` and `load_state_dict` convert DTensors, and all others where
`torch.__future__.set_swap_module_params_on_conversion` asks for it, refuses a tensor that has a weak reference.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import nn

from .modules import ModuleEntry, ParameterEntry


class Named(NamedTuple):
    """What a parameter is called. It does not hold the parameter, which may be freed with its model."""

    module: ModuleEntry
    tensor: str


class Kept:
    """A parameter of the models, found again where its module holds it, and not kept alive.

    Args:
        entry: where it is.
        parameter: the parameter itself, where another one stands in its place right now (`shards.at_rest`).
        hidden: whether its module does not hold it at all times, as with fully sharded models.

    Attributes:
        name: what it is called.
        holder, key: the module in which it is registered, and under which name.
    """

    __slots__ = ("_hidden", "_id", "holder", "key", "name")

    def __init__(self, entry: ParameterEntry, parameter: torch.Tensor, *, hidden: bool) -> None:
        self.name = Named(entry.module, entry.tensor)
        self.holder, self.key = weakref.ref(entry.holder), entry.key
        self._id = id(parameter)
        self._hidden = weakref.ref(parameter) if hidden else None

    def parameter(self) -> torch.Tensor | None:
        """The parameter, or None where it is gone or another one is in its place."""
        if self._hidden is not None:
            return self._hidden()
        module = self.holder()
        # A ScriptModule has something in place of the dict that knows no `get`.
        found = None if module is None or self.key not in module._parameters else module._parameters[self.key]
        return found if id(found) == self._id else None


class Remembered:
    """Which tensor a parameter was, to be compared with what is there later; it is not kept alive.

    By its id and a weak reference; by the id alone where `swap_tensors` may come to it. An id may be used again, so
    there a parameter that is made anew an even number of times between two looks may pass for the one it was.
    """

    __slots__ = ("_reference", "id")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.id = id(tensor)
        swapped = type(tensor) is not nn.Parameter or torch.__future__.get_swap_module_params_on_conversion()
        self._reference = None if swapped else weakref.ref(tensor)

    @property
    def gone(self) -> bool:
        """Whether it is known to be freed."""
        return self._reference is not None and self._reference() is None

    def same(self, tensor: torch.Tensor) -> bool:
        """Whether it is this one."""
        return id(tensor) == self.id and not self.gone

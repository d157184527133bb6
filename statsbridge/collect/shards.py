"""Tensors spread over several processes: what this one holds, and what part of the whole that is.

Never a collective: a DTensor is looked at through its local tensor and its placements alone, for nearly every
operation on it would make this process wait for the others.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .norms import combine_norms, global_norm
from .ranks import position

Scalar = float | torch.Tensor


class Share(NamedTuple):
    """Piece `shard` of the `shards` that a whole is cut into. Processes with the same piece hold the same elements."""

    shard: int
    shards: int


WHOLE = Share(0, 1)


class Part(NamedTuple):
    """A norm, and of which part of the whole: the norm of the whole is the root of the sum of squares of its parts."""

    value: Scalar
    share: Share


class Held(NamedTuple):
    """What this process holds of a tensor.

    Attributes:
        tensor: its elements, an ordinary tensor.
        share: which part of the whole they are; None where there is one process.
        counted: whether they count here: of processes with the same elements the first one counts them.
        partial: whether they are terms of a sum over processes that has not been made: no number can be told.
    """

    tensor: torch.Tensor
    share: Share | None
    counted: bool = True
    partial: bool = False


class Layout:
    """Knows how the tensors of one process's models are spread over the processes."""

    def __init__(self) -> None:
        self._rank, self._world = position()
        self._placed: dict[Any, tuple[Share, bool, bool]] = {}
        self._flat: Any = WeakIdKeyDictionary()

    def refresh(self, wrappers: Iterable[nn.Module]) -> None:
        """Look at the FullyShardedDataParallel wrappers around and in the models: their parameters may be cut."""
        self._flat.update(_flat_parameters(wrappers))

    def is_cut(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of a FullyShardedDataParallel, which hides its parameters after some forward passes."""
        return parameter in self._flat

    def held(self, tensor: torch.Tensor, parameter: torch.Tensor) -> Held:
        """What is held of a tensor; `parameter`: the one that it is, or whose gradient or state it is."""
        if is_spread(tensor):
            share, counted, partial = self._placement(tensor)
            return Held(local_tensor(tensor), share if self._world > 1 else None, counted, partial)
        if parameter in self._flat:
            share, counted = self._flat[parameter]
            return Held(tensor, share, counted)
        return Held(tensor, WHOLE if self._world > 1 else None, self._rank == 0)

    def counted_here(self, tensor: torch.Tensor) -> torch.Tensor | str:
        """An activation, or a gradient of one: its elements here, or why they have no numbers here."""
        if not is_spread(tensor):
            return tensor
        held = self.held(tensor, tensor)
        if held.partial:
            return "partial"
        return held.tensor if held.counted else "replicated"

    def own_share(self) -> Share:
        """The share of this process in what every process has a share in."""
        return Share(self._rank, self._world)

    # ------------------------------------------------------------------ norms

    def norm(
        self, parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], squares: Mapping[int, float]
    ) -> Scalar | Part | None:
        """Global L2 norm of `tensors`, each of one of the `parameters`, or as much of it as lies here.

        `squares`: the sums of squares of some of them, by the id of the parameter. A number in a single process; a
        Part of the whole where every process holds it all, and of this process's own share where any tensor is cut:
        of what is counted here. None where it cannot be told.
        """
        if not self._flat and _dtensor() is None:
            return self.of_whole(_norm(parameters, tensors, squares))
        held = [self.held(tensor, parameter) for parameter, tensor in zip(parameters, tensors, strict=True)]
        if any(one.partial for one in held):
            return None
        if all(one.share in (None, WHOLE) for one in held):
            return self.of_whole(_norm(parameters, [one.tensor for one in held], squares))
        counted = [(parameter, one.tensor) for parameter, one in zip(parameters, held, strict=True) if one.counted]
        return Part(_norm([one for one, _ in counted], [one for _, one in counted], squares), self.own_share())

    def gradient_norm(self, parameters: Sequence[torch.Tensor], squares: Mapping[int, float]) -> Scalar | Part | None:
        """The norm of their gradients, some of whose squares may be known; None where there is no gradient."""
        stepped = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        if stepped:
            return self.norm([one for one, _ in stepped], [gradient for _, gradient in stepped], squares)
        # Where no element of them lies here, FullyShardedDataParallel gives none; elsewhere there may be some.
        nothing = any(parameter.numel() == 0 and parameter in self._flat for parameter in parameters)
        return Part(0.0, self.own_share()) if nothing else None

    def combine(self, norms: Sequence[Scalar | Part]) -> Scalar | Part:
        """The norm of the whole from those of disjoint sets of tensors."""
        values = [norm.value if isinstance(norm, Part) else norm for norm in norms]
        shares = {norm.share if isinstance(norm, Part) else WHOLE for norm in norms}
        if shares == {WHOLE}:
            return self.of_whole(combine_norms(values))
        whole = [isinstance(norm, Part) and norm.share == WHOLE for norm in norms]
        counted = [0.0 if all_here and self._rank else value for all_here, value in zip(whole, values, strict=True)]
        return Part(combine_norms(counted), self.own_share())

    def of_whole(self, norm: Scalar) -> Scalar | Part:
        """A norm that every process knows."""
        return Part(norm, WHOLE) if self._world > 1 else norm

    # ------------------------------------------------------------------ DTensors

    def _placement(self, tensor: Any) -> tuple[Share, bool, bool]:
        key = (tensor.device_mesh, tensor.placements)
        known = self._placed.get(key)
        if known is None:
            known = self._placed[key] = _placement(*key)
        return known


def _norm(parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], squares: Mapping[int, float]) -> Scalar:
    known = [math.sqrt(squares[id(one)]) for one in parameters if id(one) in squares]
    rest = [tensor for one, tensor in zip(parameters, tensors, strict=True) if id(one) not in squares]
    return combine_norms([global_norm(rest), *known])


def is_spread(tensor: object) -> bool:
    """Whether it is a DTensor."""
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def local_tensor(tensor: Any) -> torch.Tensor:
    """The elements of a DTensor that lie here."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local


def as_number(tensor: torch.Tensor) -> Part | None:
    """What is known here of a one-element DTensor: all of it, a part of an L2 norm, or (None) nothing of use.

    `clip_grad_norm_` returns a DTensor for parameters that are DTensors.
    """
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    pending = [n for n, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(n) > 1]
    if not pending:
        return Part(local_tensor(tensor), WHOLE)
    if any(getattr(placements[n], "norm_type", None) != 2 for n in pending) or mesh.get_coordinate() is None:
        return None
    return Part(local_tensor(tensor), _piece(mesh, pending))


def at_rest(modules: Iterable[nn.Module]) -> dict[int, torch.Tensor]:
    """The sharded parameters of `fully_shard` by the ids of those that stand in their place right now.

    After a forward pass a module may hold its gathered parameters, or shards of other sizes; the optimizer has the
    ones it was given. Torch tells of both only in what is private to it.
    """
    found: dict[int, torch.Tensor] = {}
    if _dtensor() is None:
        return found
    for module in modules:
        tell = getattr(module, "_get_fsdp_state", None)
        state = tell() if callable(tell) else None
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.11
            groups = [getattr(state, "_fsdp_param_group", None)]
        for parameter in (one for group in groups if group is not None for one in group.fsdp_params):
            place = parameter._module_info
            now = place.module._parameters.get(place.param_name)
            if now is not parameter.sharded_param:
                found[id(now)] = parameter.sharded_param
    return found


def _dtensor() -> type | None:
    # Importing it takes a second: where nobody has, there is none.
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def _placement(mesh: Any, placements: Sequence[Any]) -> tuple[Share, bool, bool]:
    """Share, whether it counts here, and whether it is but a term of a sum."""
    at = mesh.get_coordinate()
    if at is None:
        return Share(-1, 1), False, False
    wide = [n for n in range(len(placements)) if mesh.size(n) > 1]
    counted = all(at[n] == 0 for n in wide if placements[n].is_replicate())
    partial = any(placements[n].is_partial() for n in wide)
    return _piece(mesh, [n for n in wide if not placements[n].is_replicate()]), counted, partial


def _piece(mesh: Any, dimensions: Sequence[int]) -> Share:
    """The piece here of what is cut along these dimensions of the mesh."""
    at = mesh.get_coordinate()
    shard, shards = 0, 1
    for dimension in dimensions:
        size = mesh.size(dimension)
        shard, shards = shard * size + at[dimension], shards * size
    return Share(shard, shards)


def _flat_parameters(wrappers: Iterable[nn.Module]) -> dict[torch.Tensor, tuple[Share, bool]]:
    """The parameters that FullyShardedDataParallel has cut, with their shares; the innermost wrapper has the say."""
    found: dict[torch.Tensor, tuple[Share, bool]] = {}
    for wrapper in wrappers:
        strategy: Any = getattr(wrapper, "sharding_strategy", None)
        group: Any = getattr(wrapper, "process_group", None)
        if strategy is None or group is None:
            continue
        ignored: Any = getattr(wrapper, "_ignored_params", ())
        across: Any = getattr(wrapper, "_inter_node_pg", None)
        share = WHOLE if strategy.name == "NO_SHARD" else Share(group.rank(), group.size())
        counted = (across is None or across.rank() == 0) and (share != WHOLE or group.rank() == 0)
        for parameter in wrapper.parameters():
            if parameter not in ignored:
                found[parameter] = (share, counted)
    return found

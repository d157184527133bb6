"""Dead units brought back to life: what comes in is drawn anew, what goes out stays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from ..collect.modules import ModuleIndex
from ..errors import ConfigError
from ..wording import counted
from .dead_units import DeadLayer, DeadUnits

# A row of their weight is what comes into one unit.
_ROWS_ARE_UNITS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

Modules = Mapping[str, nn.Module | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Revival:
    """What `revive_dead_units` changed.

    `units`: the numbers of the units drawn anew, by the path of the layer whose weights they are. `tensors`: the names
    of all parameters and buffers with rows that changed. `skipped`: why others were left, by the path of their ReLU.
    """

    units: dict[str, tuple[int, ...]]
    tensors: tuple[str, ...]
    skipped: dict[str, str]

    @property
    def count(self) -> int:
        """How many units were drawn anew."""
        return sum(map(len, self.units.values()))

    def __str__(self) -> str:
        lines = [f"{counted(self.count, 'unit')} {'was' if self.count == 1 else 'were'} drawn anew"]
        lines += [f"  {name or '(model)'}: {len(units)}" for name, units in self.units.items()]
        lines += [f"  left as they are behind {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Units of a layer to draw anew, and the normalisations between it and the ReLU."""

    source: str
    units: list[int]
    between: list[str]


@torch.no_grad()
def revive_dead_units(
    model: nn.Module, found: DeadUnits, optimizer: Optimizer | Iterable[Optimizer] | None = None, *, seed: int = 0
) -> Revival:
    """Draw the incoming weights of the dead units anew and set their bias to 0; the outgoing weights stay.

    A weight is drawn from a normal distribution of mean 0 and std √(2 / fan_in) (He et al., "Delving Deep into
    Rectifiers", 2015). Where a normalisation lies between the weights and the ReLU, its scale, shift and running
    statistics of these units are those of a new one: 1, 0, 0 and 1. What an optimizer remembers of these rows
    (momentum, squares) becomes 0. All else stays to the bit, the random generators too.

    Args:
        model: the model that `found` is about.
        found: what `find_dead_units` gave.
        optimizer: the optimizer in use, or several.
        seed: of the weights.

    Raises ConfigError where `found` is about another model.
    """
    optimizers = _optimizers(optimizer)
    index = ModuleIndex(model)
    modules = {entry.name: index.module(entry) for entry in index.entries}
    skipped = {layer.title: _NO_SOURCE for layer in found.layers if layer.dead and layer.source is None}
    planned: list[_Plan] = []
    for source, layers in _by_source(found).items():
        _check(source, layers, modules)
        units = sorted(set.intersection(*(set(layer.dead) for layer in layers)))
        reason = _unsuited(modules[source]) if units else None
        if reason is not None:
            skipped |= dict.fromkeys((one.title for one in layers), reason)
        elif units:
            planned.append(_Plan(source, units, list(dict.fromkeys(name for one in layers for name in one.between))))
    generator = torch.Generator().manual_seed(seed)
    tensors: list[str] = []
    for plan in planned:
        changed = [*_renewed(plan, modules, generator), *_renewed_norms(plan, modules)]
        for _, tensor in changed:
            _forget(optimizers, tensor, plan.units)
        tensors += [name for name, _ in changed]
    units_of = {plan.source: tuple(plan.units) for plan in planned}
    return Revival(units=units_of, tensors=tuple(tensors), skipped=skipped)


_NO_SOURCE = "no Linear or convolution feeds it directly and alone"


def _optimizers(given: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    found = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    for one in found:
        if not isinstance(one, Optimizer):
            raise ConfigError(f"optimizer is a {type(one).__name__}: give a torch optimizer, or several")
    return found


def _by_source(found: DeadUnits) -> dict[str, list[DeadLayer]]:
    """The layers behind each source: a unit is dead where it is dead behind all calls of its source."""
    by_source: dict[str, list[DeadLayer]] = {}
    for layer in found.layers:
        if layer.source is not None:
            by_source.setdefault(layer.source, []).append(layer)
    return by_source


def _check(source: str, layers: list[DeadLayer], modules: Modules) -> None:
    """Raise ConfigError where these layers are not in the model."""
    other = "what was found is about another model"
    for name in (source, *(name for layer in layers for name in layer.between)):
        if modules.get(name) is None:
            raise ConfigError(f"the model has no module {name!r}: {other}")
    layer, looked_at = modules[source], layers[0].units
    if isinstance(layer, _ROWS_ARE_UNITS) and len(layer.weight) != looked_at:
        raise ConfigError(f"{source!r} has {counted(len(layer.weight), 'unit')}, looked at were {looked_at}: {other}")


def _unsuited(layer: nn.Module | None) -> str | None:
    """Why the weights of a layer cannot be drawn anew by row; None where they can."""
    if not isinstance(layer, _ROWS_ARE_UNITS):
        return f"a {type(layer).__name__} feeds it"
    if is_parametrized(layer) or "weight" not in layer._parameters:
        return "its weight is computed from others"
    return None if layer.weight.requires_grad else "its weight is frozen"


def _renewed(plan: _Plan, modules: Modules, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    layer = modules[plan.source]
    assert isinstance(layer, _ROWS_ARE_UNITS)
    drawn = torch.empty((len(plan.units), *layer.weight.shape[1:]), dtype=torch.float32)
    drawn.normal_(0, math.sqrt(2 / drawn[0].numel()), generator=generator)
    layer.weight[plan.units] = drawn.to(layer.weight)
    yield _path(plan.source, "weight"), layer.weight
    if layer.bias is not None:
        layer.bias[plan.units] = 0
        yield _path(plan.source, "bias"), layer.bias


def _renewed_norms(plan: _Plan, modules: Modules) -> Iterator[tuple[str, torch.Tensor]]:
    layer = modules[plan.source]
    assert isinstance(layer, _ROWS_ARE_UNITS)
    count = len(layer.weight)
    for name in plan.between:
        for attribute, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            tensor = getattr(modules[name], attribute, None)
            if isinstance(tensor, torch.Tensor) and tensor.shape == (count,):
                tensor[plan.units] = value
                yield _path(name, attribute), tensor


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _forget(optimizers: list[Optimizer], tensor: torch.Tensor, units: list[int]) -> None:
    for optimizer in optimizers:
        state = optimizer.state.get(tensor, {})
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                value[units] = 0

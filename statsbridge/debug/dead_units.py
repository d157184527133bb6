"""Units that give zero whatever comes in: found by looking at all data, and brought back to life."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.utils.data import DataLoader

from ..errors import ConfigError
from ..wording import counted
from .batches import (
    Loss,
    batch_size,
    call_model,
    checked_loader,
    device_of,
    fresh,
    is_criterion,
    with_gradients,
    without_dropout,
)
from .data_parts import Picker
from .dead_watch import DeadWatch, Fired
from .preserving import preserved
from .progress import progress
from .result import Number, Result, named

if TYPE_CHECKING:
    import plotly.graph_objects as go

_LAYERS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLayer:
    """The units behind one ReLU-like call.

    `module`: path of the ReLU, or of the module whose forward calls the function; `call`: which of its calls in a
    forward pass. `firing`: of each unit, the share of its values that were not zero, shape `[units]`. `source`: path of
    the Linear or convolution that feeds it, and `between` the normalisations on the way; None where something else
    does, or where the source has other outputs too.
    """

    module: str
    type: str
    call: int
    firing: npt.NDArray[np.float64]
    source: str | None
    between: tuple[str, ...]

    @property
    def units(self) -> int:
        """How many units it has; channels, after a convolution."""
        return len(self.firing)

    @property
    def dead(self) -> tuple[int, ...]:
        """The numbers of the units that never fired."""
        return tuple(np.flatnonzero(self.firing == 0).tolist())

    @property
    def fraction(self) -> float:
        """The share of its units that never fired."""
        return len(self.dead) / self.units

    @property
    def title(self) -> str:
        """Its path and, where it is called several times, which call; `(model)` is the root."""
        name = self.module or "(model)"
        name = name if self.type[:1].isupper() else f"{name}: {self.type}"
        return f"{name} call {self.call}" if self.call else name


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadUnits(Result):
    """What `find_dead_units` found. `layers`: in the order in which data flows through them."""

    layers: tuple[DeadLayer, ...]

    def figure(self) -> go.Figure:
        """The share of dead units of each layer. Raises ConfigError where plotly is not installed."""
        from .data_figures import dead_units_figure

        return dead_units_figure(self)


def find_dead_units(
    model: nn.Module,
    loss: Loss | None,
    loader: Any,
    *,
    allowed: float = 0.5,
    limit: int | None = None,
) -> DeadUnits:
    """Run data through the model and say which units behind a ReLU give zero for every sample.

    Looked at are modules of ReLU's kind and calls of `torch.relu`, `functional.relu` and `clamp(min=0)`. A unit is a
    feature of a vector or a channel of a convolution, which is dead if it is zero at every place of every sample. The
    model is in training mode without dropout: BatchNorm uses the statistics of the batch.

    Args:
        model: the model; afterwards it is as it was, to the bit.
        loss: a callable that runs the model, `loss(model, batch)`; what it returns is not looked at. Of a criterion
            (an `nn.Module` or a function of `torch.nn.functional`) only the convention is used: the batch is a pair
            of inputs and targets. None: the model is called with what of the batch is not the target.
        loader: a DataLoader or another re-iterable of batches.
        allowed: the share of its units that a layer may have dead.
        limit: stop after the batch with this sample; None: all.

    Raises ConfigError where an argument is wrong. What model and loss raise passes through; all is put back first.
    """
    if not 0 <= allowed <= 1:
        raise ConfigError(f"allowed={allowed}: give a share between 0 and 1")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit}: give at least 1 sample")
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss is a {type(loss).__name__}: give a callable loss(model, batch), a criterion or None")
    batches = checked_loader(loader)
    samples = 0
    also = [loss, loader] if isinstance(loader, DataLoader) else [loss]
    with preserved(model, also=also), without_dropout(model), with_gradients():
        device = device_of(model)
        watch = DeadWatch(model)
        with watch.watching():
            for batch in progress(batches, "find_dead_units, batch", _length(batches)):
                watch.next_batch()
                _run(model, loss, fresh(batch, device))
                samples += batch_size(batch) or 0
                if limit is not None and samples >= limit:
                    break
        layers, unclear = _layers(watch)
    return _judged(layers, unclear, watch.scripted, samples, allowed)


def _length(batches: Any) -> int | None:
    try:
        return len(batches)
    except TypeError:
        return None


def _run(model: nn.Module, loss: Loss | None, batch: Any) -> None:
    if loss is None or is_criterion(loss):
        call_model(model, Picker(None, None)(batch)[0])
    else:
        loss(model, batch)


def _layers(watch: DeadWatch) -> tuple[tuple[DeadLayer, ...], list[str]]:
    """The layers seen, and the modules left out since their number of units changed."""
    fed: dict[str, int] = {}
    for fired in watch.fired.values():
        if fired.origin is not None:
            fed[fired.origin.source] = fed.get(fired.origin.source, 0) + 1
    layers: list[DeadLayer] = []
    unclear: list[str] = []
    for (module, kind, call), fired in watch.fired.items():
        if not fired.consistent or not fired.values:
            unclear.append(module or "(model)")
            continue
        layers.append(_layer(module, kind, call, fired, fed, watch.source_calls))
    return tuple(layers), unclear


def _layer(
    module: str, kind: str, call: int, fired: Fired, fed: Mapping[str, int], source_calls: Mapping[str, int]
) -> DeadLayer:
    origin = fired.origin
    # A layer that is also called elsewhere, where no ReLU follows, may be alive there.
    known = origin is not None and fed[origin.source] == source_calls.get(origin.source)
    return DeadLayer(
        module=module,
        type=kind,
        call=call,
        firing=fired.nonzero.cpu().double().numpy() / fired.values,
        source=origin.source if origin is not None and known else None,
        between=origin.between if origin is not None and known else (),
    )


# ------------------------------------------------------------------ what it means


def _judged(
    layers: tuple[DeadLayer, ...], unclear: list[str], scripted: list[str], samples: int, allowed: float
) -> DeadUnits:
    units = sum(layer.units for layer in layers)
    dead = sum(len(layer.dead) for layer in layers)
    worst = max(layers, key=lambda layer: layer.fraction, default=None)
    numbers: dict[str, Number] = {
        "samples": samples,
        "layers": len(layers),
        "units": units,
        "dead_units": dead,
        "dead_fraction": dead / units if units else None,
        "worst_fraction": None if worst is None else worst.fraction,
        "worst_layer": None if worst is None or not worst.dead else worst.title,
        "allowed": allowed,
    }
    passed = None if worst is None or not samples else worst.fraction <= allowed
    left_out = f"\nLeft out, since their number of units changes: {', '.join(unclear)}." if unclear else ""
    if scripted:
        left_out += f"\nNot looked into, since a scripted module shows nothing of what it calls: {named(scripted)}."
    return DeadUnits(
        name="find_dead_units",
        passed=passed,
        numbers=numbers,
        explanation=_explanation(layers, samples, allowed, seen_all=not scripted) + left_out,
        table=_table(layers),
        layers=layers,
    )


def _explanation(layers: tuple[DeadLayer, ...], samples: int, allowed: float, *, seen_all: bool) -> str:
    if not samples:
        return "There was no sample in the loader, so this says nothing."
    if not layers and not seen_all:
        return "No call of ReLU's kind could be seen."
    if not layers:
        return "The model calls nothing of ReLU's kind, behind which a unit could be dead."
    dead = [layer for layer in layers if layer.dead]
    if not dead:
        return f"Every unit fired for some of the {counted(samples, 'sample')}."
    lines = [
        f"{layer.title}: {len(layer.dead)} of {counted(layer.units, 'unit')} never fired"
        for layer in dead[:_LAYERS_SHOWN]
    ]
    if len(dead) > _LAYERS_SHOWN:
        lines.append(f"and {counted(len(dead) - _LAYERS_SHOWN, 'more layer')} with dead units")
    if any(layer.fraction > allowed for layer in dead):
        lines.append(
            "They get no gradient and never recover by themselves. revive_dead_units draws their weights anew. So that "
            "it does not come back: a smaller learning rate or a warm-up, Kaiming initialisation, biases not far below "
            "0, normalised inputs, LeakyReLU or GELU."
        )
    return "\n".join(lines)


def _table(layers: tuple[DeadLayer, ...]) -> dict[str, list[Number]]:
    return {
        "module": [layer.module for layer in layers],
        "type": [layer.type for layer in layers],
        "call": [layer.call for layer in layers],
        "units": [layer.units for layer in layers],
        "dead": [len(layer.dead) for layer in layers],
        "fraction": [layer.fraction for layer in layers],
        "source": [layer.source for layer in layers],
        "dead_units": [" ".join(map(str, layer.dead)) for layer in layers],
    }

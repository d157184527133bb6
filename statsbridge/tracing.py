"""`trace()`: the table of modules in data-flow order, from one forward pass and without training.

Not `trace.py`: importing a submodule of that name would put it in the place of the function.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from .collect.arguments import check_torch
from .collect.calls import CallTable
from .collect.compiled import WINDOWS
from .collect.forward import Flow, ForwardHooks, ForwardPass
from .collect.modules import ModuleEntry, ModuleIndex, outermost_called
from .collect.order import DepthTracer
from .collect.untouched import untouched
from .errors import ConfigError, StatsBridgeWarning
from .log.schema import conform, to_table


def trace(model: nn.Module, *example_inputs: Any, **keywords: Any) -> pa.Table:
    """Order and depth of every module call of `model(*example_inputs, **keywords)`.

    The model runs once, eagerly and with gradients on, in the mode (training or not) that it is in, on the device
    that it is on. Nothing of it is changed afterwards, nor of the inputs, the gradients and the random generators:
    one copy of the parameters and buffers is held meanwhile. A run that is recording does not see this pass.

    Returns:
        The columns of the `modules` table of a run (`step` is null), one row a module call in order of execution,
        then the modules that were not called.

    Raises:
        ConfigError: `model` is no module, has a lazy module that was never called, or no call of it could be seen.
        Exception: whatever the model itself raises, with a note that says which inputs it was given.
    """
    check_torch()
    _check(model)
    called = outermost_called(model)
    index = ModuleIndex(model)
    if index.lazy:
        raise ConfigError(
            "the model has lazy modules, which get their shape in their first forward pass: run model(…) once before"
        )
    watch = _Watch()
    hooks = ForwardHooks(index, watch, lambda: None, watch.trouble)
    with untouched(model, (example_inputs, keywords)), WINDOWS.away(), torch.enable_grad():
        hooks.attach()
        try:
            called(*example_inputs, **keywords)
        except Exception as error:
            error.add_note(f"statsbridge.trace called the model with {_described(example_inputs, keywords)}")
            raise
        finally:
            hooks.detach()
    return _table(index, watch)


class _Watch:
    """Keeps the passes that have ended well, and what went wrong in our own code."""

    def __init__(self) -> None:
        self.passes: list[ForwardPass] = []
        self.failed: BaseException | None = None

    def wants(self, root: ModuleEntry, module: nn.Module) -> bool:
        return True

    def tracer(self, root: ModuleEntry) -> DepthTracer:
        return DepthTracer()

    def output(self, forward: ForwardPass, entry: ModuleEntry, call: int, flow: Flow) -> None:
        pass

    def completed(self, forward: ForwardPass) -> None:
        self.passes.append(forward)
        if forward.tracer is not None:
            self.failed = self.failed or forward.tracer.failed

    def abandoned(self, forward: ForwardPass) -> None:
        pass

    def trouble(self, where: str, module: str, error: BaseException) -> None:
        self.failed = self.failed or error


def _check(model: object) -> None:
    if isinstance(model, nn.Module):
        return
    kind = f"{type(model).__module__}.{type(model).__qualname__}".removeprefix("builtins.")
    raise ConfigError(f"model is a {kind}: give one torch.nn.Module, then the inputs to call it with")


def _described(inputs: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    def short(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{type(value).__name__}{list(value.shape)} of {value.dtype}"
        return type(value).__name__

    given = [short(value) for value in inputs] + [f"{name}={short(value)}" for name, value in keywords.items()]
    return ", ".join(given) or "no inputs"


def _table(index: ModuleIndex, watch: _Watch) -> pa.Table:
    if not watch.passes:
        raise ConfigError(
            "no call of the model was seen: its forward() calls none of its modules, or runs them in another thread"
        )
    calls = CallTable()
    for forward in watch.passes:
        if watch.failed is None:
            calls.traced(forward.root.index, forward.executed, "runtime")
        else:
            calls.met(forward.root.index, [(module, call) for module, call, _ in forward.executed])
    if watch.failed is not None:
        warnings.warn(
            f"statsbridge: depth could not be traced: {watch.failed!r}; the table has the order of execution alone",
            StatsBridgeWarning,
            stacklevel=3,
        )
    table = conform("modules", to_table("modules", calls.columns(index.entries)))
    rows = table.num_rows
    filled = {"seq": np.arange(rows), "attempt": np.zeros(rows, np.int64)}
    for name, values in filled.items():
        table = table.set_column(table.column_names.index(name), table.schema.field(name), pa.array(values))
    return table.append_column("rank", pa.array(np.zeros(rows, np.int64)))

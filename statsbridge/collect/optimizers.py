"""Optimizers: found by torch's global step hooks and by whose parameters they hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .norms import combine_norms, global_norm
from .scaler import fused_scale, fused_skip

Scalar = float | torch.Tensor


class StepListener(Protocol):
    """What is done around an optimizer step. Exceptions are caught here, never in the optimizer.

    `gradients` says whether `.grad` holds what this step uses: before the step, unless a closure computes it.
    """

    def tracked(self, parameter: torch.Tensor) -> bool: ...
    def before_step(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], gradients: bool) -> None: ...
    def after_step(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], gradients: bool) -> None: ...


@dataclass(slots=True, eq=False)
class OptimizerRecord:
    """What is known of one optimizer that holds parameters of the models."""

    name: str
    reference: weakref.ref[Optimizer]
    rates: dict[str, Scalar] = field(default_factory=dict)  # by name of the parameter group
    signature: int = 0  # of the parameters that `members` was made from
    members: list[weakref.ref[torch.Tensor]] = field(default_factory=list)  # its parameters that are tracked
    norm: Scalar | None = None  # of the gradients it last stepped with
    stepped: bool = False  # since the last `OptimizerWatch.close_step`
    skipped: bool = False  # a fused step found its gradients overflown


class OptimizerWatch:
    """Sees every optimizer step of the process, and shows those of the models to a listener.

    Its two hooks stay for the whole run: learning rates and gradient norms are kept for every step.
    """

    def __init__(self, listener: StepListener, trouble: Callable[[str, str, BaseException], None]) -> None:
        self._listener = listener
        self._trouble = trouble
        self._records: list[OptimizerRecord] = []
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._several = False
        self._running: Optimizer | None = None
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def known(self) -> bool:
        """Whether an optimizer of the models was given or has been seen stepping."""
        return any(record.reference() is not None for record in self._records)

    @property
    def stepped(self) -> bool:
        """Whether one has stepped since the last `close_step`."""
        return any(record.stepped for record in self._records)

    @property
    def skipped(self) -> bool:
        """Whether a fused step has skipped itself since then."""
        return any(record.skipped for record in self._records)

    def add(self, optimizer: Optimizer, name: str | None = None) -> OptimizerRecord:
        """Know an optimizer from now on; its name is its class's where none is given."""
        self._records = [record for record in self._records if record.reference() is not None]
        taken = {record.name for record in self._records}
        base = unique = name or type(optimizer).__name__
        number = 1
        while unique in taken:
            unique, number = f"{base}_{number}", number + 1
        record = OptimizerRecord(unique, weakref.ref(optimizer))
        record.rates = _learning_rates(optimizer)
        self._records.append(record)
        self._several = self._several or len(self._records) > 1
        return record

    def close_step(self) -> dict[str, Scalar]:
        """Learning rates by scalar name, and `grad_norm_applied` where an optimizer has stepped."""
        scalars: dict[str, Scalar] = {}
        for record in self._records:
            prefix = f"lr/{record.name}/" if self._several else "lr/"
            scalars.update({prefix + group: rate for group, rate in record.rates.items()})
        norms = [record.norm for record in self._records if record.stepped and record.norm is not None]
        if norms:
            scalars["grad_norm_applied"] = combine_norms(norms)
        for record in self._records:
            record.stepped, record.skipped, record.norm = False, False, None
        self._running = None
        return scalars

    def _record(self, optimizer: Optimizer) -> tuple[OptimizerRecord, list[torch.Tensor]] | None:
        """The record of an optimizer that holds tracked parameters, and these; None for a stranger."""
        parameters = list(_parameters(optimizer))
        signature = hash(tuple(map(id, parameters)))
        record = next((record for record in self._records if record.reference() is optimizer), None)
        if record is None and self._strangers.get(optimizer) == signature:
            return None
        if record is None or record.signature != signature:
            members = [parameter for parameter in parameters if self._listener.tracked(parameter)]
            if record is None and not members:
                self._strangers[optimizer] = signature
                return None
            record = record or self.add(optimizer)
            record.signature, record.members = signature, [weakref.ref(parameter) for parameter in members]
        alive = (reference() for reference in record.members)
        return record, [parameter for parameter in alive if parameter is not None]

    def held(self) -> set[int]:
        """The ids of all parameters that known optimizers hold."""
        alive = (record for record in self._records if record.reference() is not None)
        return {
            id(parameter) for record in alive for reference in record.members if (parameter := reference()) is not None
        }

    def forget_members(self) -> None:
        """The models' parameters may have changed: look again whose they are at the next step."""
        self._strangers.clear()
        for record in self._records:
            record.signature = 0

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
        try:
            if self._running is not None and self._running is not optimizer:
                return  # a wrapper's step calls that of what it wraps: one step, not two
            found = self._record(optimizer)
            if found is None:
                return
            record, parameters = found
            self._running = optimizer
            record.rates = _learning_rates(optimizer)
            ready = not _closure_computes_gradients(args, kwargs)
            record.skipped = fused_skip(optimizer)
            if record.skipped:
                return
            if ready:
                record.norm = self._norm(optimizer, parameters, fused_scale(optimizer))
            self._listener.before_step(optimizer, parameters, ready)
        except Exception as error:
            self._trouble("the hook before an optimizer step", type(optimizer).__name__, error)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
        try:
            if self._running is not optimizer:
                return
            self._running = None
            found = self._record(optimizer)
            if found is None:
                return
            record, parameters = found
            if record.skipped:
                return
            record.stepped = True
            late = _closure_computes_gradients(args, kwargs)
            if late:
                record.norm = self._norm(optimizer, parameters, None)
            self._listener.after_step(optimizer, parameters, late)
        except Exception as error:
            self._trouble("the hook after an optimizer step", type(optimizer).__name__, error)

    def _norm(
        self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], scale: torch.Tensor | None
    ) -> Scalar | None:
        try:
            return _gradient_norm(parameters, scale)
        except Exception as error:  # the rows of the step do not need it
            self._trouble("the norm of the gradients", type(optimizer).__name__, error)
            return None


def _parameters(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _learning_rates(optimizer: Optimizer) -> dict[str, Scalar]:
    rates: dict[str, Scalar] = {}
    for number, group in enumerate(optimizer.param_groups):
        rate = group.get("lr")
        if rate is None:
            continue
        name = group.get("name")
        key = name if isinstance(name, str) and name and name not in rates else str(number)
        rates[key] = rate.detach().clone() if isinstance(rate, torch.Tensor) else float(rate)
    return rates


def _gradient_norm(parameters: Iterable[torch.Tensor], scale: torch.Tensor | None) -> Scalar | None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return None
    norm = global_norm(gradients)
    return norm if scale is None else norm / (scale.item() if isinstance(norm, float) else scale.to(norm.device))


def _closure_computes_gradients(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """An optimizer such as LBFGS computes its gradients inside `step(closure)`: before it there are none."""
    return callable(kwargs.get("closure")) or any(callable(argument) for argument in args[1:])

"""Optimizers: found by torch's global step hooks and by whose parameters they hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .scaler import fused_scale, fused_skip
from .shards import Layout, Part, Scalar
from .suspended import is_suspended


class StepListener(Protocol):
    """What is done around an optimizer step. Exceptions are caught here, never in the optimizer.

    `stepping` comes first, also where a fused optimizer skips its step. `gradients` says whether `.grad` holds what
    this step uses: before the step, unless a closure computes it. `before_step` returns the sums of squares of those
    gradients that it knows already, by the id of their parameter.
    """

    def tracked(self, parameter: torch.Tensor) -> bool: ...
    def stepping(self) -> None: ...
    def before_step(
        self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], gradients: bool
    ) -> Mapping[int, float]: ...
    def after_step(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], gradients: bool) -> None: ...


@dataclass(slots=True, eq=False)
class OptimizerRecord:
    """What is known of one optimizer that holds parameters of the models."""

    name: str
    reference: weakref.ref[Optimizer]
    rates: dict[str, Scalar] = field(default_factory=dict)  # by name of the parameter group, when last looked at
    signature: int = 0  # of the parameters that `members` was made from
    members: list[int] = field(default_factory=list)  # which of its parameters are tracked
    norm: Scalar | Part | None = None  # of the gradients it last stepped with
    stepped: bool = False  # since the last `OptimizerWatch.close_step`
    skipped: bool = False  # a fused step found its gradients overflown
    rates_noted: bool = False  # whether `rates` are those of the step in progress


class OptimizerWatch:
    """Sees every optimizer step of the process, and shows those of the models to a listener.

    Its two hooks stay for the whole run: learning rates and gradient norms are kept for every step.
    """

    def __init__(
        self, listener: StepListener, layout: Layout, trouble: Callable[[str, str, BaseException], None]
    ) -> None:
        self._listener = listener
        self._layout = layout
        self._trouble = trouble
        self._records: list[OptimizerRecord] = []
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._replaced: weakref.WeakSet[Optimizer] = weakref.WeakSet()
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

    def _discover(self, optimizer: Optimizer, members: Sequence[torch.Tensor]) -> OptimizerRecord:
        """Know an optimizer that was seen stepping. One all of whose parameters it has taken over is replaced.

        The old one may live on in a learning rate scheduler. If it steps again, both are in use.
        """
        taken = {id(parameter) for parameter in members}
        names = []
        for record in list(self._records):
            old = record.reference()
            if old is None or optimizer in self._replaced or record.stepped:
                continue
            held = [parameter for parameter in _parameters(old) if self._listener.tracked(parameter)]
            if held and all(id(parameter) in taken for parameter in held):
                self._replaced.add(old)
                self._records.remove(record)
                if type(old) is type(optimizer) or not record.name.startswith(type(old).__name__):
                    names.append(record.name)  # the name of a class is no name for another class
        self._replaced.discard(optimizer)
        return self.add(optimizer, names[0] if names else None)

    def close_step(self) -> dict[str, Scalar | Part]:
        """Learning rates by scalar name, and `grad_norm_applied` where an optimizer has stepped."""
        scalars: dict[str, Scalar | Part] = {}
        for record in self._records:
            prefix = f"lr/{record.name}/" if self._several else "lr/"
            scalars.update({prefix + group: rate for group, rate in _rates_of_step(record).items()})
        norms = [record.norm for record in self._records if record.stepped and record.norm is not None]
        if norms:
            scalars["grad_norm_applied"] = self._layout.combine(norms)
        for record in self._records:
            record.stepped, record.skipped, record.rates_noted, record.norm = False, False, False, None
        self._running = None
        return scalars

    def note_rates(self) -> None:
        """Look at the learning rates now: a step is about to run that may be compiled, where no hook sees it."""
        for record in self._records:
            optimizer = record.reference()
            if optimizer is not None:
                record.rates, record.rates_noted = _learning_rates(optimizer), True

    def _record(self, optimizer: Optimizer) -> tuple[OptimizerRecord, list[torch.Tensor]] | None:
        """The record of an optimizer that holds tracked parameters, and these; None for a stranger."""
        parameters = list(_parameters(optimizer))
        signature = hash(tuple(map(id, parameters)))
        record = next((record for record in self._records if record.reference() is optimizer), None)
        if record is None and self._strangers.get(optimizer) == signature:
            return None
        if record is None or record.signature != signature:
            members = [number for number, parameter in enumerate(parameters) if self._listener.tracked(parameter)]
            if record is None and not members:
                self._strangers[optimizer] = signature
                return None
            record = record or self._discover(optimizer, [parameters[number] for number in members])
            record.signature, record.members = signature, members
        return record, [parameters[number] for number in record.members]

    def held(self) -> set[int]:
        """The ids of all parameters that known optimizers hold."""
        return {id(parameter) for optimizer in self.alive() for parameter in _parameters(optimizer)}

    def alive(self) -> list[Optimizer]:
        """The known optimizers."""
        return [optimizer for record in self._records if (optimizer := record.reference()) is not None]

    def forget_members(self) -> None:
        """The models' parameters may have changed: look again whose they are at the next step."""
        self._strangers.clear()
        for record in self._records:
            record.signature = 0

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or is_suspended():
            return
        try:
            if self._running is not None and self._running is not optimizer:
                return  # a wrapper's step calls that of what it wraps: one step, not two
            found = self._record(optimizer)
            if found is None:
                return
            record, parameters = found
            self._running = optimizer
            self._listener.stepping()
            record.rates, record.rates_noted = _learning_rates(optimizer), True
            ready = not _closure_computes_gradients(args, kwargs)
            record.skipped = fused_skip(optimizer)
            if record.skipped:
                return
            squares: Mapping[int, float] = {}
            try:
                squares = self._listener.before_step(optimizer, parameters, ready)
            finally:
                if ready:
                    record.norm = self._norm(optimizer, parameters, fused_scale(optimizer), squares)
        except Exception as error:
            self._trouble("the hook before an optimizer step", type(optimizer).__name__, error)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or is_suspended():
            return
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
                record.norm = self._norm(optimizer, parameters, None, {})
            self._listener.after_step(optimizer, parameters, late)
        except Exception as error:
            self._trouble("the hook after an optimizer step", type(optimizer).__name__, error)

    def _norm(
        self,
        optimizer: Optimizer,
        parameters: Sequence[torch.Tensor],
        scale: torch.Tensor | None,
        squares: Mapping[int, float],
    ) -> Scalar | Part | None:
        try:
            norm = self._layout.gradient_norm(parameters, squares)
            return norm if norm is None or scale is None else _unscaled(norm, scale)
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


def _rates_of_step(record: OptimizerRecord) -> dict[str, Scalar]:
    """The learning rates that the step used; those of a step that no hook saw, only where they are beyond doubt.

    They are where nothing has changed them since they were last looked at: a scheduler may have done so before
    the step or after it.
    """
    optimizer = record.reference()
    if record.rates_noted:
        return record.rates
    before, now = record.rates, {} if optimizer is None else _learning_rates(optimizer)
    record.rates = now
    return {name: rate for name, rate in now.items() if isinstance(rate, float) and before.get(name) == rate}


def _unscaled(norm: Scalar | Part, scale: torch.Tensor) -> Scalar | Part:
    if isinstance(norm, Part):
        return Part(_divided(norm.value, scale), norm.share)
    return _divided(norm, scale)


def _divided(norm: Scalar, scale: torch.Tensor) -> Scalar:
    return norm / (scale.item() if isinstance(norm, float) else scale.to(norm.device))


def _closure_computes_gradients(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """An optimizer such as LBFGS computes its gradients inside `step(closure)`: before it there are none."""
    return callable(kwargs.get("closure")) or any(callable(argument) for argument in args[1:])

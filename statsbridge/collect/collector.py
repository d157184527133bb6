"""The collector: opens a window for a sampled step, lets hooks fill its rows, and closes it.

Everything here runs in the training thread except what `close` returns. Nothing waits for an accelerator,
and no exception leaves a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .activations import ActivationWatch
from .calls import CallTable
from .filters import Filters
from .forward import ForwardHooks
from .modules import ModuleIndex
from .optimizers import OptimizerWatch, Scalar
from .parameters import ParameterWatch
from .rows import BY_HAND, Key, Rows
from .scaler import ScalerWatch, fused_scale
from .statistics import Piece, Wanted, measure
from .step_columns import StepNumbers, step_columns

#: Pieces waiting in a window are handed over early beyond this, so that micro-batches do not pile up in memory.
PENDING_BYTES = 64 * 2**20
#: Pieces that the background thread has not worked off: beyond this it is told to hurry, and beyond eight times
#: this (a disk that hangs) no further step is sampled until it has.
BACKLOG_BYTES = 128 * 2**20


class Submit(Protocol):
    """Queues work for the background thread; False where it is refused."""

    def __call__(self, work: Callable[[], Mapping[str, Any]], *, urgent: bool = False) -> bool: ...


class Reporter(Protocol):
    """Takes what could not be done; never raises."""

    def problem(self, kind: str, message: str, *, severity: str = "warning", cause: str | None = None) -> None: ...
    def event(self, kind: str, message: str, *, severity: str = "warning") -> None: ...
    def trouble(
        self,
        where: str,
        module: str,
        error: BaseException,
        site: str | None = None,
        tensor: str | None = None,
    ) -> None: ...


class Collector:
    """Collects the models of one run: `open` attaches the hooks of a sampled step, `close` removes them."""

    def __init__(
        self,
        index: ModuleIndex,
        filters: Filters,
        reporter: Reporter,
        submit: Submit,
        *,
        scaler: GradScaler | None,
        histograms: bool,
        count_eval: bool,
        tracing: bool,
    ) -> None:
        self.calls = CallTable()
        self._index = index
        self._filters = filters
        self._reporter = reporter
        self._submit = submit
        self._wanted = Wanted(kl="kl_unit_gaussian" in filters.statistics, histogram=histograms)
        self._scaler = ScalerWatch(scaler)
        self._rows: Rows | None = None
        self._steps = 0  # optimizer steps since the window was opened
        self._skipped = False  # whether a step was skipped in it
        self._early: list[Callable[[], None]] = []  # work of this window that was refused when it was handed over early
        # Bytes of pieces given to the background thread, and those it is done with: each has one thread that writes.
        self._handed_over = self._worked_off = self._last_size = 0
        self._activations = ActivationWatch(
            index,
            filters,
            self.calls,
            self.measure,
            self._scaler.scale,
            self._relieve,
            reporter,
            count_eval=count_eval,
            tracing=tracing,
        )
        self._hooks = ForwardHooks(index, self._activations, reporter.trouble)
        self._parameters = ParameterWatch(index, filters, self.measure, self._declined)
        self.optimizers = OptimizerWatch(self, reporter.trouble)

    # ------------------------------------------------------------------ the window of a sampled step

    @property
    def is_open(self) -> bool:
        """Whether a sampled step is being recorded."""
        return self._rows is not None

    def open(self) -> None:
        """Start a sampled step: from here on every forward pass is watched."""
        if self._index.refresh():
            self.calls.changed = True
        self._parameters.open()
        self.optimizers.forget_members()
        self._rows = Rows(self._wanted)
        self._steps, self._skipped, self._early = 0, False, []
        self._activations.open(self._rows)
        self._hooks.attach()

    @property
    def behind(self) -> bool:
        """Whether the background thread has so much to do that it should start at once."""
        return self._handed_over - self._worked_off > BACKLOG_BYTES

    @property
    def stuck(self) -> bool:
        """Whether so much waits for the background thread that no further step may be sampled."""
        return self._handed_over - self._worked_off > 8 * BACKLOG_BYTES

    def end_step(self) -> tuple[dict[str, Scalar], bool]:
        """The scalars of a step that ends now, and whether an open window may close with it.

        It stays open where optimizers are known and none has stepped or been skipped: its gradients are still
        accumulating.
        """
        stepped = self.optimizers.stepped
        skipped = (self._scaler.tried() or self.optimizers.skipped) and not stepped
        scalars = self.optimizers.close_step()
        if skipped:
            self._reporter.event(
                "optimizer_step_skipped",
                "the GradScaler skipped the optimizer's step: its gradients overflowed",
            )
        self._skipped = self._skipped or skipped
        if not self.is_open:
            return scalars, False
        if self.optimizers.known and not stepped and not skipped:
            self._reporter.problem(
                "optimizer_not_stepped",
                "run.step() was called in a sampled step in which no optimizer of the model had stepped; the step "
                "stays open until one has: call run.step() once for each optimizer step, after it",
                cause="optimizer_not_stepped",
            )
            return scalars, False
        try:
            scalars["param_norm"] = self._parameters.norm()
        except Exception as error:  # the window must close all the same
            self._reporter.trouble("the norm of the parameters", "", error)
        return scalars, True

    def close(self) -> tuple[Callable[[], StepNumbers], int]:
        """End the sampled step: the work that makes its columns in the background, and its number of rows."""
        rows = self._rows
        assert rows is not None
        self._hooks.detach()
        try:
            reason = "step_skipped" if self._skipped else "not_stepped"
            self._parameters.complete(rows, self.optimizers.held() if self.optimizers.known else set(), reason)
            self._activations.settle(rows)
            self._check_forwards()
        finally:
            self._activations.close()
            self._rows = None
        work, early = self._hand_over(rows), self._early
        keys = [row.key for row in rows]
        places = [self.calls.place(key.module, key.call) for key in keys]
        entries, filters, whole = self._index.entries, self._filters, self._parameters.cover_the_models

        def numbers() -> StepNumbers:
            for earlier in early:
                earlier()
            work()
            return step_columns(rows, keys, places, entries, filters, whole)

        return numbers, len(keys)

    def abandon(self) -> None:
        """Remove every hook and forget the window; the run is over."""
        self._hooks.detach()
        self._activations.close()
        self.optimizers.detach()
        self._parameters.forget()
        self._rows = None

    def refused(self) -> None:
        """The work of the last window found no room in the queue: its rows are lost, and hold no memory any more."""
        self._worked_off += self._last_size

    def changed_calls(self) -> Mapping[str, Any] | None:
        """The `modules` table without its step, where it has changed since it was last asked for."""
        return self.calls.columns(self._index.entries) if self.calls.changed else None

    def log_tensor(self, name: str, tensor: torch.Tensor, grad: bool) -> None:
        """A tensor given by hand. Does nothing where no window is open."""
        if self._rows is not None:
            self._activations.log_tensor(name, tensor, grad)

    # ------------------------------------------------------------------ numbers

    def measure(
        self,
        key: Key,
        tensor: torch.Tensor,
        *,
        minus: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> Piece | None:
        """Statistics of one tensor; a failure is reported and leaves the row without numbers."""
        try:
            # Neither our depth tracer nor a mode of the user's (a default device) has a say in our arithmetic.
            with torch._C.DisableTorchFunction():
                return measure(tensor, self._wanted, minus=minus, scale=scale)
        except Exception as error:
            module = "" if key.module == BY_HAND else self._index.entries[key.module].name
            self._reporter.trouble(f"measuring {key.site}", module, error, key.site, key.tensor)
            if self._rows is not None:
                self._rows.row(key).status = "internal_error"
            return None

    def _relieve(self) -> None:
        """Hand pieces over early where many micro-batches would pile up."""
        rows = self._rows
        if rows is not None and rows.pending > PENDING_BYTES:
            work = self._hand_over(rows, keep=self._parameters.replaced_sites)
            if not self._submit(lambda: work() or {}, urgent=True):
                self._early.append(work)

    def _hand_over(self, rows: Rows, keep: frozenset[str] = frozenset()) -> Callable[[], None]:
        """Take the pieces out of the rows, counted until the background thread has worked them off."""
        size = rows.pending
        work = rows.hand_over(keep)
        size -= rows.pending
        self._handed_over += size
        self._last_size = size

        def counted() -> None:
            try:
                work()
            finally:
                self._worked_off += size

        return counted

    # ------------------------------------------------------------------ what OptimizerWatch calls

    def tracked(self, parameter: torch.Tensor) -> bool:
        """Whether the tensor is a parameter of the models."""
        return self._parameters.tracked(parameter)

    def before_step(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], gradients: bool) -> None:
        """Measure parameters, and gradients where they are complete."""
        if self._rows is not None:
            self._parameters.begin(self._rows, parameters)
            if gradients:
                self._parameters.gradients(self._rows, parameters, fused_scale(optimizer))

    def after_step(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], gradients: bool) -> None:
        """Measure updates, and gradients that a closure has computed."""
        if self._rows is not None:
            self._steps += 1
            if gradients:
                self._parameters.gradients(self._rows, parameters, None)
            self._parameters.updates(self._rows, parameters)
            self._parameters.optimizer_state(self._rows, optimizer, parameters)

    # ------------------------------------------------------------------ what is said

    def _check_forwards(self) -> None:
        if self._activations.counted or not self._steps:
            return
        if self._activations.eval_only:
            self._reporter.problem(
                "eval_mode",
                "the optimizer stepped, but every forward pass with gradients was in eval mode, so no activation "
                "was recorded: call model.train(), or init(…, eval=True) if eval mode is what you want",
            )
        else:
            self._reporter.problem(
                "no_forward",
                "the optimizer stepped, but no forward pass of the model was seen in the sampled step, so no "
                "activation was recorded: call the model itself, model(x), not model.forward(x)",
            )

    def _declined(self, message: str) -> None:
        self._reporter.problem("update_declined", message)

"""The collector: opens a window for a sampled step, lets hooks fill its rows, and closes it.

Everything here runs in the training thread except what `close` returns. Nothing waits for an accelerator,
and no exception leaves a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from . import messages
from .activations import ActivationWatch
from .calls import CallTable
from .compiled import EAGER, compiled_code_exists
from .filters import Filters
from .forward import ForwardHooks
from .messages import Reporter, Submit
from .modules import ModuleIndex
from .optimizers import OptimizerWatch
from .parameters import BYPASSED, ParameterWatch
from .rows import BY_HAND, Key, Rows
from .scaler import ScalerWatch, fused_scale
from .shards import Layout, Part, Scalar
from .statistics import Piece, Wanted, measure
from .step_columns import StepNumbers, step_columns
from .suspended import is_suspended
from .window_facts import WindowFacts

#: Pieces waiting in a window are handed over early beyond this, so that micro-batches do not pile up in memory.
PENDING_BYTES = 64 * 2**20
#: Pieces that the background thread has not worked off: beyond this it is told to hurry, and beyond eight times
#: this (a disk that hangs) no further step is sampled until it has.
BACKLOG_BYTES = 128 * 2**20
#: Sampled steps in a row in which other modules ran and nothing of the models was trained, until that is said.
FEWEST_IDLE = 3


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
        self._fresh = True  # whether the models were looked at in this window
        self._steps = 0  # optimizer steps since the window was opened
        self._idle = 0  # windows in a row in which others ran, and nothing of the models was trained
        self._skipped = False  # whether a step was skipped in it
        self._early: list[Callable[[], None]] = []  # work of this window that was refused when it was handed over early
        # Bytes of pieces given to the background thread, and those it is done with: each has one thread that writes.
        self._handed_over = self._worked_off = self._last_size = 0
        self._activations = ActivationWatch(
            index,
            filters,
            self.calls,
            self.measure,
            self._scaler.scale_of_backward,
            self._relieve,
            reporter,
            count_eval=count_eval,
            tracing=tracing,
        )
        self._hooks = ForwardHooks(index, self._activations, self._look_again, reporter.trouble)
        self._layout = Layout()
        self._parameters = ParameterWatch(index, filters, self._layout, self.measure, self._declined)
        self.optimizers = OptimizerWatch(self, self._layout, reporter.trouble)
        watch = self._activations
        self._facts = WindowFacts(watch.modules, watch.outputs, self._parameters.facts, reporter.trouble)

    # ------------------------------------------------------------------ the window of a sampled step

    @property
    def is_open(self) -> bool:
        """Whether a sampled step is being recorded."""
        return self._rows is not None

    def open(self) -> None:
        """Start a sampled step: from here on every forward pass is watched."""
        self._fresh = False
        self._parameters.open()
        self.optimizers.forget_members()
        self._rows = Rows(self._wanted)
        self._steps, self._skipped, self._early = 0, False, []
        self._scaler.open()
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

    def end_step(self) -> tuple[dict[str, Scalar | Part], bool]:
        """The scalars of a step that ends now, and whether an open window may close with it.

        It stays open where optimizers are known and none has stepped or been skipped: its gradients are still
        accumulating.
        """
        stepped = self.optimizers.stepped
        skipped = (self._scaler.tried() or self.optimizers.skipped) and not stepped
        scalars = self.optimizers.close_step()
        self._parameters.facts.optimizer_steps += stepped
        if skipped:
            self._reporter.event("optimizer_step_skipped", messages.STEP_SKIPPED)
        self._skipped = self._skipped or skipped
        if not self.is_open:
            return scalars, False
        # A window that has seen nothing at all, since all of it is compiled, waits for nothing.
        if self.optimizers.known and not stepped and not skipped and not self._trained_unseen():
            self._reporter.problem("optimizer_not_stepped", messages.OPTIMIZER_NOT_STEPPED)
            return scalars, False
        try:
            self._look_again(outside=True)
            if (norm := self._parameters.norm()) is not None:
                scalars["param_norm"] = norm
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
            held = self.optimizers.held() if self.optimizers.known else set()
            # Before any optimizer is known: what a scaler has scaled, and no step has used, is no gradient of a step.
            scaled = not self._steps and (self._skipped or self._scaler.in_use)
            self._parameters.complete(rows, None if scaled else held, reason)
            self._activations.settle(rows, self._scaler.doubtful)
            self._check_forwards()
            judge = self._facts.close(rows, self.optimizers.alive, stepped=self._steps > 0)
        finally:
            self._activations.close()
            self._rows = None
        work, early = self._hand_over(rows), self._early
        places = [self.calls.place(row.key.module, row.key.call) for row in rows]
        entries, filters, whole = self._index.entries, self._filters, self._parameters.cover_the_models

        def numbers() -> StepNumbers:
            for earlier in early:
                earlier()
            work()
            made = step_columns(rows, places, entries, filters, self._layout, whole)
            made.facts.extend(judge())
            return made

        return numbers, len(places)

    def choose_sites(self, sites: frozenset[str]) -> None:
        """Collect these sites from the next window on. Not while one is open."""
        self._filters = replace(self._filters, sites=sites)
        self._activations.use(self._filters)
        self._parameters.use(self._filters)

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

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """A training step that may be compiled as a whole: it runs eagerly where a window is open."""
        eager = self._begin_step()
        try:
            yield
        finally:
            if eager:
                EAGER.release()

    def _begin_step(self) -> bool:
        try:
            self.optimizers.note_rates()
            if self._rows is not None:
                EAGER.take()
                return True
        except Exception as error:
            self._reporter.trouble("run.sampling", "", error)
        return False

    def changed_calls(self) -> Mapping[str, Any] | None:
        """The `modules` table without its step, where it has changed since it was last asked for."""
        return self.calls.columns(self._index.entries) if self.calls.changed else None

    def log_tensor(self, name: str, tensor: torch.Tensor, grad: bool) -> None:
        """A tensor given by hand. Does nothing where no window is open."""
        if self._rows is not None and not is_suspended():
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
                here = self._layout.counted_here(tensor)
                if isinstance(here, str):
                    return Piece(here, 0)
                return measure(here, self._wanted, minus=minus, scale=scale)
        except Exception as error:
            module = "" if key.module == BY_HAND else self._index.entries[key.module].name
            self._reporter.trouble(f"measuring {key.site}", module, error, key.site, key.tensor)
            if self._rows is not None:
                self._rows.row(key).status = "internal_error"
            return None

    def _look_again(self, *, outside: bool = False) -> None:
        """Once a window, when its first forward begins: modules and parameters may have come, gone or been replaced.

        The window was opened at the end of the step before, too early for what is changed between two steps. When an
        optimizer steps or the window ends, `outside` of forward passes, it is done once more where the parameters
        are others by then: lazy modules get theirs in the forward pass, and `torch.func.functional_call` puts other
        tensors in their place while it runs.
        """
        if self._rows is None or (self._fresh and not (outside and self._parameters.outdated())):
            return
        self._fresh = True
        if self._index.refresh():
            self.calls.changed = True
            self._activations.modules.look()
        self._parameters.refresh(settled=outside)
        self.optimizers.forget_members()
        self._activations.choose()

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
        self._look_again(outside=True)
        return self._parameters.tracked(parameter)

    def stepping(self) -> None:
        """An optimizer of the models steps: who has called it?"""
        self._scaler.stepping()

    def before_step(
        self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], gradients: bool
    ) -> Mapping[int, float]:
        """Measure parameters, and gradients where they are complete: of these, the sums of squares that are known."""
        if self._rows is None:
            return {}
        self._parameters.begin(self._rows, parameters)
        return self._parameters.gradients(self._rows, parameters, fused_scale(optimizer)) if gradients else {}

    def after_step(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], gradients: bool) -> None:
        """Measure updates, and gradients that a closure has computed."""
        if self._rows is not None:
            self._steps += 1
            if gradients:
                self._parameters.gradients(self._rows, parameters, None)
            self._parameters.updates(self._rows, parameters)
            self._parameters.note_missing()
            self._parameters.optimizer_state(self._rows, optimizer, parameters)

    # ------------------------------------------------------------------ what is said

    def _check_forwards(self) -> None:
        if self._parameters.bypassed():
            self._reporter.problem("parameters_bypassed", BYPASSED)
        touched = self.optimizers.known or self._parameters.changed or not self._activations.untouched
        self._idle = self._idle + 1 if self._hooks.met_strangers and not touched else 0
        if self._activations.counted:
            return
        if self._idle == FEWEST_IDLE:
            self._reporter.problem("no_forward", messages.STRANGERS_TRAINED, cause="strangers_trained")
        elif self._trained_unseen():
            self._reporter.problem("compiled_not_recorded", messages.COMPILED_NOT_RECORDED)
        elif self._steps and self._activations.eval_only:
            self._reporter.problem("eval_mode", messages.EVAL_MODE)
        elif self._steps:
            self._reporter.problem("no_forward", messages.NO_FORWARD)

    def _trained_unseen(self) -> bool:
        """Whether compiled code seems to have done the forward pass of this window, and perhaps all of the step."""
        if not self._activations.untouched or not compiled_code_exists():
            return False
        return self._steps > 0 or self._parameters.changed

    def _declined(self, message: str) -> None:
        self._reporter.problem("update_declined", message)

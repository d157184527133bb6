"""`Run`: one recording. Nothing in a step raises, and nothing in it waits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from ..collect.collector import Collector
from ..collect.sampling import StepLabels
from ..collect.scalars import PendingScalars, ScalarGroup, all_scalars
from ..log.control import Wish
from ..log.writer import Writer
from ..reporting import Reporter
from . import given
from .elsewhere import leave_in_children, say_elsewhere
from .figures import FigureLog
from .live import Live
from .schedule import Schedule
from .window import step_tables

if TYPE_CHECKING:
    from ..mirror.mirrors import Mirrors


class Run:
    """One recording. Made by `init()`; also a context manager that finishes at its end."""

    _elsewhere = False  # whether this is what another process began, and nobody has been told yet

    def __init__(
        self,
        path: Path,
        writer: Writer,
        reporter: Reporter,
        collector: Collector,
        schedule: Schedule,
        labels: StepLabels,
        iteration: int,
        mirrors: Sequence[Mirrors],
        live: Live,
        figures: FigureLog,
    ) -> None:
        self._path = path
        self._mirrors = mirrors
        self._writer = writer
        self._reporter = reporter
        self._collector = collector
        self._schedule = schedule
        self._labels = labels
        self._live = live
        self._figures = figures
        self._iteration = iteration
        self._scalars = PendingScalars(writer.submit)
        self._clock = time.perf_counter()
        self._finished = False
        reporter.step = labels.start
        self._full = False
        leave_in_children(self)
        if schedule.sampled(self._iteration):
            self._open()

    @property
    def path(self) -> Path | None:
        """The folder of the run; None where `$STATSBRIDGE_DISABLED` is 1."""
        return self._path

    @property
    def id(self) -> str | None:
        """The run's id, the name of its folder; None where `$STATSBRIDGE_DISABLED` is 1."""
        return self._path.name

    def step(self, loss: object = None, *, step: int | None = None, **scalars: object) -> None:
        """Close a training step: call it once for each optimizer step, after it.

        Args:
            loss: a float or a one-element tensor, which stays on its device; nothing waits for it.
            step: the label of the step; must grow. Labels count up by themselves where None.
            **scalars: further numbers of the step. `grad_norm`, what `clip_grad_norm_` returned, replaces the
                norm seen by the optimizer; `samples` gives `samples_per_second`.

        Never raises: what is wrong becomes a warning and an event.
        """
        if self._finished:
            if self._elsewhere:
                self._elsewhere = False
                say_elsewhere()
            return
        try:
            self._close_step(scalars if loss is None else {"loss": loss, **scalars}, step)
        except Exception as error:
            self._reporter.trouble("run.step", "", error)

    def log(
        self,
        metrics: Mapping[str, object],
        *,
        step: int | None = None,
        epoch: float | None = None,
        kind: str | None = None,
    ) -> None:
        """Record numbers that close no step, such as `{"val/loss": value}`, at the last closed step.

        Args:
            metrics: name to float or one-element tensor.
            step: the label to record them at, where it is not the last closed step's.
            epoch: the epoch they belong to.
            kind: how they were made: `"batch"`, `"epoch_mean"` or `"recomputed"`.

        Never raises: what is wrong becomes a warning and an event.
        """
        if self._finished:
            return
        try:
            label = given.label(step, self._labels, self._reporter)
            values = given.numbers(metrics, label, self._reporter)
            number, made = given.epoch(epoch, label, self._reporter), given.kind(kind, label, self._reporter)
            now = time.time_ns() // 1000
            self._scalars.add(ScalarGroup(label, None, now, values, number, made))
        except Exception as error:
            self._reporter.trouble("run.log", "", error)

    def log_tensor(self, name: str, tensor: torch.Tensor | object, grad: bool = False) -> None:
        """Record the statistics of any tensor as site `tensor`, and with `grad=True` its gradient's as `tensor_grad`.

        Free on steps that are not sampled. Never raises, never keeps the tensor.
        """
        # In this order: compiled code is to depend on nothing of ours.
        if torch.compiler.is_compiling() or self._finished:
            return
        try:
            if isinstance(tensor, torch.Tensor):
                self._collector.log_tensor(str(name), tensor, bool(grad))
            else:
                self._reporter.problem(
                    "bad_tensor",
                    f"log_tensor({name!r}): {type(tensor).__name__} is no torch.Tensor; not recorded",
                    cause=f"bad_tensor {name}",
                )
        except Exception as error:
            self._reporter.trouble("run.log_tensor", "", error)

    def sampling(self) -> AbstractContextManager[None]:
        """A block round one training step that is compiled as a whole, or whose loss function is compiled.

        On a sampled step everything in it runs eagerly, which is how its modules are seen; compiled code is neither
        thrown away nor compiled again. On other steps it costs nothing but a look at the learning rates. A model
        that is compiled itself, or in parts, needs no such block. `run.step()` comes after it. Never raises.
        """
        if torch.compiler.is_compiling() or self._finished:
            return nullcontext()
        return self._collector.sampling()

    def log_figure(self, name: str, figure: object) -> None:
        """Keep a Plotly figure, as it is now, with the run at the last closed step, and show it in the trackers.

        It is converted to JSON here and now. It goes to no tracker where the run is restricted, or the policy hashes
        names or limits fields: nobody can look into a picture. Never raises: what is wrong becomes a warning and an
        event.
        """
        if self._finished:
            return
        try:
            self._figures.log(str(name), figure, self._labels.current)
        except Exception as error:
            self._reporter.trouble("run.log_figure", "", error)

    def note(self, text: str) -> None:
        """Record a remark at the last closed step (the first one's label before), as an event of kind `note`."""
        if not self._finished:
            self._reporter.event("note", str(text), severity="info", step=self._labels.current)

    def finish(self, timeout: float = given.FINISH_SECONDS) -> None:
        """Remove every hook, write all that waits, let the mirrors catch up and close the run.

        Waits at most `timeout` seconds in all. What a tracker has not got by then is on disk, and a warning
        says how to deliver it later.
        """
        self._finish("finished", timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An exit, or Ctrl-C, is what somebody wanted: no failure, as without the block.
        ended = "finished" if kind is None else "failed" if issubclass(kind, Exception) else "stopped"
        self._finish(ended, given.FINISH_SECONDS)

    # A module that holds its run is copied, for averaged weights, and saved whole: neither may fail.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __getstate__(self) -> dict[str, object]:
        return {"_path": self._path, "_finished": True, "_elsewhere": True}

    # ------------------------------------------------------------------ inside

    def _leave(self) -> None:
        """Record nothing in a forked child: the run is its parent's. Raises nothing."""
        if not self._finished:
            self._finished = self._elsewhere = True
            with suppress(Exception):
                self._collector.abandon()

    def _close_step(self, values: dict[str, object], step: object) -> None:
        now, clock = time.time_ns() // 1000, time.perf_counter()
        seconds, self._clock = clock - self._clock, clock
        iteration, self._iteration = self._iteration, self._iteration + 1
        label, wrong = self._labels.next(step)
        self._reporter.step = label
        if wrong:
            self._reporter.problem("bad_step_label", f"{wrong}; recorded as step {label}")
        numbers = given.numbers(values, label, self._reporter)
        seen, may_close = self._collector.end_step()
        group = ScalarGroup(label, iteration, now, all_scalars(seen, seconds, numbers))
        if may_close:
            self._submit_window(group)
        else:
            self._scalars.add(group)
        self._reporter.step = self._labels.expected
        if self._collector.is_open:
            return
        self._heed()
        if self._schedule.sampled(self._iteration):
            self._open()

    def _heed(self) -> None:
        """Between two steps: change the sampling, where its time is over or the writer's thread asks for it."""
        schedule, live = self._schedule, self._live
        if schedule.go_back(self._iteration):
            self._collector.choose_sites(schedule.now.sites)
            self._reporter.event("sampling_changed", f"as before: {schedule.now}", severity="info")
        while live.orders:
            order = live.orders.popleft()
            if isinstance(order, Wish):
                before = schedule.now
                schedule.grant(order, self._iteration)
                self._collector.choose_sites(schedule.now.sites)
                said = f"{order} (before: {before}); asked by {order.asked_by or 'somebody'}"
                self._reporter.event("sampling_changed", said, severity="info")
            elif steps := schedule.burst(self._iteration):
                said = f"the next {steps} steps are sampled, because of {order.kind} at step {order.step}"
                self._reporter.event("burst", said, severity="info", value=float(steps))

    def _open(self) -> None:
        if self._writer.full:
            if not self._full:
                self._full = True
                self._reporter.problem(
                    "record_full",
                    "the record has reached max_bytes: no statistics are collected from here on; training and its "
                    "scalars go on. Sample less often (every=), or less (sites=, modules=), or allow more",
                )
            return
        if not self._collector.stuck:
            self._collector.open()
            return
        self._reporter.problem(
            "step_not_sampled",
            "the background thread does not keep up (is the disk hanging?): this step was not sampled, so that "
            "memory stays bounded",
        )

    def _submit_window(self, group: ScalarGroup) -> None:
        """End the sampled step; the writer's thread makes all its tables at once."""
        numbers, rows = self._collector.close()
        calls = self._collector.changed_calls()
        self._scalars.seal()
        work = partial(step_tables, group, calls, numbers, self._reporter)
        if not self._writer.submit(work, rows=rows, urgent=self._collector.behind):
            self._collector.refused()

    def _finish(self, state: str, timeout: float) -> None:
        if self._finished:
            return
        self._finished = True
        patience = given.FINISH_SECONDS
        # Each by itself: what one of them meets keeps no other from its turn, and the hooks go first.
        with self._told():
            self._collector.abandon()
        with self._told():
            patience = given.patience(timeout)
        deadline = time.monotonic() + patience
        with self._told():
            self._reporter.count_the_rest()
        with self._told():
            self._close_writer(patience, state)
        for mirrors in self._mirrors:
            with self._told():
                mirrors.finish(max(deadline - time.monotonic(), 0), state)

    def _close_writer(self, patience: float, state: str) -> None:
        if not self._writer.close(patience, state):
            lost = sum(self._writer.dropped.values())
            self._reporter.warn(
                f"not everything could be written to {self._path} within {patience:g} s"
                + (f": {lost} rows were dropped" if lost else "")
            )

    @contextmanager
    def _told(self) -> Iterator[None]:
        """At the end of a training nothing raises, for the model may not be saved yet: it is said, if it can be."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):
                self._reporter.trouble("run.finish", "", error)

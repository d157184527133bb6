"""`init()` and `Run`: the only place that knows every room. Errors belong to `init()`, never to a step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from .backends import check_backends
from .collect.arguments import check_models, check_optimizers, check_settings, check_torch
from .collect.calls import static_calls
from .collect.collector import Collector
from .collect.filters import Patterns, make_filters
from .collect.modules import ModuleIndex
from .collect.ranks import shared_run
from .collect.sampling import Sampling, StepLabels
from .collect.scalars import PendingScalars, Scalar, ScalarGroup, all_scalars, as_scalar, scalar_columns
from .log.folder import create_run
from .log.writer import Writer
from .reporting import Reporter

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

#: Set to 1, `init()` returns a run that does nothing.
DISABLED = "STATSBRIDGE_DISABLED"

#: How a logged number was made, where the user says so: a dashboard's "loss" can be any of the three.
KINDS = ("batch", "epoch_mean", "recomputed")


def init(
    model: nn.Module | Mapping[str, nn.Module],
    *,
    backend: str | Iterable[str] = "local",
    every: int | Sampling = 10,
    optimizer: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] | None = None,
    grad_scaler: GradScaler | None = None,
    dir: str | os.PathLike[str] = "statsbridge-runs",
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    restricted: bool = False,
    start_step: int = 0,
    sites: Patterns | None = None,
    modules: Patterns = "*",
    statistics: Patterns = "*",
    order: str = "auto",
    histograms: bool = False,
    eval: bool = False,
    flush_interval: float = 1.0,
) -> Run:
    """Start recording the statistics of `model`. Close each training step with `run.step(loss=loss)`.

    Args:
        model: a module, or a dict of them whose keys become the first part of every module's path.
        backend: where the record goes: `"local"`.
        every: sample each n-th step, or a `Sampling`. Between sampled steps no module hook is attached.
        optimizer: found by itself when it steps; give it (or a list, or a dict by name) to be explicit.
        grad_scaler: the `torch.amp.GradScaler` in use: gradients are divided by its scale.
        dir: the folder that run folders are made in.
        name: a name for the run, its id where None.
        config: anything worth keeping with the run; written to `run.json`.
        restricted: the run's data may not leave the site; kept in `run.json` for whatever would mirror it.
        start_step: the label of the first step, and what the iteration counter starts at.
        sites: which sites to collect (globs). All but `optimizer_state` where None.
        modules: paths of the modules to collect (globs).
        statistics: names of the statistics to keep (globs).
        order: how depth is found: `"auto"` traces the first sampled forward pass, `"fx"` uses torch.fx now,
            `"execution"` records the order of execution alone.
        histograms: also count elements by magnitude.
        eval: also record forward passes without gradients, or with no module in training mode.
        flush_interval: seconds between writes to disk, at most.

    Raises:
        ConfigError: an argument is wrong, the folder cannot be written or torch is too old.
        UnknownBackendError: the backend is not installed.
    """
    if os.environ.get(DISABLED) == "1":
        return DisabledRun()
    check_torch()
    check_backends(backend)
    models = check_models(model)
    sampling = every if isinstance(every, Sampling) else Sampling(every)
    check_settings(name, config, start_step, order, flush_interval)
    index = ModuleIndex(models)
    optimizers = check_optimizers(optimizer, [entry.parameter for entry in index.parameters()])
    filters = make_filters(sites, modules, statistics, [entry.name for entry in index.entries])
    known_calls = static_calls(models, index) if order == "fx" else []
    information = {
        "restricted": bool(restricted),
        "versions": {"torch": torch.__version__},
        "sampling": {"every": int(sampling.every), "first": int(sampling.first)},
        "start_step": int(start_step),
        "sites": sorted(filters.sites),
    }
    path, rank = shared_run(lambda: str(create_run(Path(dir), name=name, config=config, information=information)))
    writer = Writer(Path(path), rank=rank, flush_interval=float(flush_interval))
    reporter = Reporter(writer.submit)
    collector = Collector(
        index,
        filters,
        reporter,
        writer.submit,
        scaler=grad_scaler,
        histograms=bool(histograms),
        count_eval=bool(eval),
        tracing=order == "auto",
    )
    for root, calls in known_calls:
        collector.calls.traced(root, calls, "fx")
    for optimizer_name, optimizer_object in optimizers:
        collector.optimizers.add(optimizer_object, optimizer_name)
    return Run(Path(path), writer, reporter, collector, sampling, int(start_step))


class Run:
    """One recording. Made by `init()`; also a context manager that finishes at its end."""

    def __init__(
        self,
        path: Path,
        writer: Writer,
        reporter: Reporter,
        collector: Collector,
        sampling: Sampling,
        start_step: int,
    ) -> None:
        self._path = path
        self._writer = writer
        self._reporter = reporter
        self._collector = collector
        self._sampling = sampling
        self._labels = StepLabels(start_step)
        self._iteration = start_step
        self._scalars = PendingScalars(writer.submit)
        self._clock = time.perf_counter()
        self._finished = False
        reporter.step = start_step
        if sampling.sampled(self._iteration):
            collector.open()

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
            return
        try:
            self._close_step({} if loss is None else {"loss": loss}, step, scalars)
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
            label = self._labels.current if step is None else self._whole(step)
            values = self._values(metrics)
            if kind is not None and kind not in KINDS:
                self._reporter.problem("bad_kind", f"kind={kind!r} is none of {', '.join(KINDS)}; recorded without")
                kind = None
            number = as_scalar(epoch)
            if not isinstance(number, float):
                if epoch is not None:
                    self._reporter.problem("bad_epoch", f"epoch={epoch!r} is no number; recorded without")
                number = None
            now = time.time_ns() // 1000
            self._scalars.add(ScalarGroup(label, None, now, values, number, kind))
        except Exception as error:
            self._reporter.trouble("run.log", "", error)

    def log_tensor(self, name: str, tensor: torch.Tensor | object, grad: bool = False) -> None:
        """Record the statistics of any tensor as site `tensor`, and with `grad=True` its gradient's as `tensor_grad`.

        Free on steps that are not sampled. Never raises, never keeps the tensor.
        """
        if self._finished:
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

    def note(self, text: str) -> None:
        """Record a remark at the current step, as an event of kind `note`."""
        if not self._finished:
            self._reporter.event("note", str(text), severity="info")

    def finish(self, timeout: float = 60) -> None:
        """Remove every hook, write all that waits and close the run. Waits at most `timeout` seconds."""
        self._finish("finished", timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish("finished" if kind is None else "failed", 60)

    # ------------------------------------------------------------------ inside

    def _close_step(self, loss: dict[str, object], given: object, extra: dict[str, object]) -> None:
        now, clock = time.time_ns() // 1000, time.perf_counter()
        seconds, self._clock = clock - self._clock, clock
        iteration, self._iteration = self._iteration, self._iteration + 1
        label, wrong = self._labels.next(given)
        self._reporter.step = label
        if wrong:
            self._reporter.problem("bad_step_label", f"{wrong}; recorded as step {label}")
        values = self._values({**loss, **extra})
        seen, may_close = self._collector.end_step()
        group = ScalarGroup(label, iteration, now, all_scalars(seen, seconds, values))
        if may_close:
            self._submit_window(group)
        else:
            self._scalars.add(group)
        if self._sampling.sampled(self._iteration) and not self._collector.is_open:
            self._open()

    def _open(self) -> None:
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

        def tables() -> dict[str, Mapping[str, Any]]:
            made: dict[str, Mapping[str, Any]] = {} if calls is None else {"modules": {**calls, "step": group.step}}
            try:
                stats, update_ratio = numbers()
            except Exception as error:  # the step's scalars are fine: they must not be lost with it
                self._reporter.trouble("finishing the statistics of a step", "", error)
            else:
                if update_ratio is not None:
                    group.values["update_ratio"] = update_ratio
                when = [group.time] * len(stats["site"])
                made["stats"] = {**stats, "step": group.step, "iteration": group.iteration, "time": when}
            try:
                made["scalars"] = scalar_columns([group])
            except Exception as error:  # nor its statistics with the scalars
                self._reporter.trouble("fetching the scalars of a step", "", error)
            return made

        if not self._writer.submit(tables, rows=rows, urgent=self._collector.behind):
            self._collector.refused()

    def _values(self, given: Mapping[str, object]) -> dict[str, Scalar]:
        values: dict[str, Scalar] = {}
        for name, value in given.items():
            scalar = as_scalar(value)
            if scalar is None:
                self._reporter.problem(
                    "bad_scalar",
                    f"{name}={value!r:.80} is no single number ({type(value).__name__}): give a float or a "
                    "one-element tensor; not recorded",
                    cause=f"bad_scalar {name}",
                )
            else:
                values[str(name)] = scalar
        return values

    def _whole(self, step: object) -> int:
        label, wrong = StepLabels(self._labels.current).next(step)
        if wrong:
            self._reporter.problem("bad_step_label", f"run.log: {wrong}; recorded at step {label}")
        return label

    def _finish(self, state: str, timeout: float) -> None:
        if self._finished:
            return
        self._finished = True
        try:
            self._collector.abandon()
        except Exception as error:
            self._reporter.trouble("run.finish", "", error)
        self._reporter.count_the_rest()
        if not self._writer.close(timeout, state):
            lost = sum(self._writer.dropped.values())
            self._reporter.warn(
                f"not everything could be written to {self._path} within {timeout:g} s"
                + (f": {lost} rows were dropped" if lost else "")
            )


class DisabledRun(Run):
    """A run that does nothing, for `$STATSBRIDGE_DISABLED=1`."""

    def __init__(self) -> None:
        self._finished = True

    @property
    def path(self) -> None:
        """There is no folder."""

    @property
    def id(self) -> None:
        """There is no run."""

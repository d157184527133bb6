"""`init()` and `Run`: the only place that knows every room. Errors belong to `init()`, never to a step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from .backends import make_adapters
from .collect.arguments import (
    AUTO,
    check_max_bytes,
    check_models,
    check_optimizers,
    check_resume,
    check_settings,
    check_torch,
)
from .collect.calls import static_calls
from .collect.collector import Collector
from .collect.filters import Patterns, make_filters
from .collect.modules import ModuleIndex
from .collect.ranks import shared_run
from .collect.sampling import Sampling, StepLabels
from .collect.scalars import PendingScalars, ScalarGroup, all_scalars, as_scalar, scalar_columns
from .collect.shards import Part, Scalar
from .errors import ConfigError
from .log.folder import create_run
from .log.resume import find_unfinished, first_iteration, last_step, next_attempt
from .log.runs import read_info, resolve_run
from .log.writer import Writer
from .reporting import Reporter

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

    from .mirror import Adapter, Selection
    from .mirror.mirrors import Allowed, Mirrors

#: Set to 1, `init()` returns a run that does nothing.
DISABLED = "STATSBRIDGE_DISABLED"

#: How a logged number was made, where the user says so: a dashboard's "loss" can be any of the three.
KINDS = ("batch", "epoch_mean", "recomputed")


def init(
    model: nn.Module | Mapping[str, nn.Module],
    *,
    backend: str | Adapter | Iterable[str | Adapter] = "local",
    every: int | Sampling = 10,
    optimizer: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] | None = None,
    grad_scaler: GradScaler | None = None,
    dir: str | os.PathLike[str] = "statsbridge-runs",
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    restricted: bool = False,
    resume: str | os.PathLike[str] | None = None,
    start_step: int | None = None,
    sites: Patterns | None = None,
    modules: Patterns = "*",
    statistics: Patterns = "*",
    order: str = "auto",
    mirror: Selection | None = None,
    histograms: bool = False,
    eval: bool = False,
    flush_interval: float = 1.0,
    max_bytes: float | None = None,
) -> Run:
    """Start recording the statistics of `model`. Close each training step with `run.step(loss=loss)`.

    Args:
        model: a module, or a dict of them whose keys become the first part of every module's path.
        backend: which trackers follow the record, which is always written to `dir` first: `"local"` (none),
            `"mlflow"`, `"wandb"`, `"aim"`, `"tensorboard"` or another installed adapter's name; `"name:target"`;
            an adapter; or a list of these.
        every: sample each n-th step, or a `Sampling`. Between sampled steps no module hook is attached.
        optimizer: found by itself when it steps; give it (or a list, or a dict by name) to be explicit.
        grad_scaler: the `torch.amp.GradScaler` in use: gradients are divided by its scale.
        dir: the folder that run folders are made in.
        name: a name for the run, its id where None.
        config: anything worth keeping with the run; written to `run.json`.
        restricted: the run's data may leave only to destinations that a policy file lists, and that `backend`
            names explicitly. A run that was restricted stays so when it is resumed.
        resume: go on with a run that was interrupted: its folder, id, name or, inside `dir`, a unique beginning of
            the id; or `"auto"` for the newest run called `name` that did not finish, a new run where there is none.
            What was recorded before counts up to `start_step`.
        start_step: the label of the first step, and what the iteration counter starts at: 0 for a new run where
            None. For a resumed one the step after that of the checkpoint it goes on from.
        sites: which sites to collect (globs). All but `optimizer_state` where None.
        modules: paths of the modules to collect (globs).
        statistics: names of the statistics to keep (globs).
        order: how depth is found: `"auto"` traces the first sampled forward pass, `"fx"` uses torch.fx now,
            `"execution"` records the order of execution alone.
        mirror: what of the record the trackers get; the usual selection where None.
        histograms: also count elements by magnitude.
        eval: also record forward passes without gradients, or with no module in training mode.
        flush_interval: seconds between writes to disk, at most.
        max_bytes: size of the record (of each rank's part of it) from which on no statistics are collected any more.
            Training and its scalars go on.

    Raises:
        ConfigError: an argument is wrong, the folder cannot be written or torch is too old; or a run is resumed
            without `start_step`.
        LogError: there is no such run to resume, or a process still writes it.
        UnknownBackendError: the backend is not installed.
        PolicyError: the policy in force does not let the run go there; nothing has been written or sent.
    """
    if os.environ.get(DISABLED) == "1":
        return DisabledRun()
    check_torch()
    adapters = make_adapters(backend)
    models = check_models(model)
    sampling = every if isinstance(every, Sampling) else Sampling(every)
    check_settings(name, config, 0 if start_step is None else start_step, order, flush_interval)
    check_resume(resume, name)
    limit = check_max_bytes(max_bytes)
    index = ModuleIndex(models)
    optimizers = check_optimizers(optimizer, [entry.parameter for entry in index.parameters()])
    filters = make_filters(sites, modules, statistics, [entry.name for entry in index.entries])
    known_calls = static_calls(models, index) if order == "fx" else []
    information: dict[str, Any] = {
        "restricted": bool(restricted),
        "versions": {"torch": torch.__version__},
        "sampling": {"every": int(sampling.every), "first": int(sampling.first)},
        "start_step": int(start_step or 0),
        "sites": sorted(filters.sites),
    }
    if mirror is not None:
        information["mirror"] = _selection(mirror).to_json()
    allowed: list[Allowed] = []

    def create() -> str:
        old = None if resume is None else _run_to_resume(resume, Path(dir), name, start_step)
        information["restricted"] |= old is not None and bool(read_info(old).get("restricted"))
        if adapters:
            from .mirror.mirrors import ask_policy

            allowed.append(ask_policy(adapters, restricted=information["restricted"]))
        if old is None:
            path = create_run(Path(dir), name=name, config=config, information=information)
            return json.dumps((str(path), 0, int(start_step or 0)))
        iteration = first_iteration(old, int(start_step or 0))
        held = next_attempt(old, int(start_step or 0), config=config, information=information)
        return json.dumps((str(old), holding.enter_context(held).number, iteration))

    with ExitStack() as holding:  # a run that is resumed, until this process is known to write it
        told, rank = shared_run(create)
        path, attempt, iteration = json.loads(told)
        writer = Writer(Path(path), rank=rank, attempt=attempt, flush_interval=float(flush_interval), max_bytes=limit)
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
    mirrors = [_mirrors(Path(path), one, mirror, writer, reporter, float(flush_interval)) for one in allowed]
    run = Run(Path(path), writer, reporter, collector, sampling, int(start_step or 0), iteration, mirrors)
    if attempt:
        reporter.event("resumed", f"attempt {attempt} goes on with this run from step {start_step}", severity="info")
    return run


def _run_to_resume(
    resume: str | os.PathLike[str], folder: Path, name: str | None, start_step: int | None
) -> Path | None:
    """The run that `resume` means; None where a new one is to be made."""
    if resume == AUTO:
        found = find_unfinished(folder, str(name))
    else:
        found = resolve_run(resume if isinstance(resume, str) else Path(resume), folder)
    if found is not None and start_step is None:
        last = last_step(found)
        recorded = "no step was recorded" if last is None else f"its last recorded step is {last[0]}"
        raise ConfigError(
            f"resume: run {found.name} goes on from a checkpoint ({recorded}): give start_step=, the step after that "
            "of the checkpoint"
        )
    return found


def _selection(mirror: object) -> Selection:
    from .mirror import Selection

    if not isinstance(mirror, Selection):
        raise ConfigError(f"mirror is a {type(mirror).__name__}: give a statsbridge.Selection")
    return mirror


def _mirrors(
    path: Path, allowed: Allowed, selection: Selection | None, writer: Writer, reporter: Reporter, interval: float
) -> Mirrors:
    from .mirror import Selection
    from .mirror.mirrors import Mirrors

    mirrors = Mirrors(
        path,
        allowed,
        selection or Selection(),
        reporter.mirror,
        interval=interval,
        close_writer=lambda: writer.close(state="stopped"),
    )
    mirrors.start()
    return mirrors


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
        iteration: int,
        mirrors: Sequence[Mirrors],
    ) -> None:
        self._path = path
        self._mirrors = mirrors
        self._writer = writer
        self._reporter = reporter
        self._collector = collector
        self._sampling = sampling
        self._labels = StepLabels(start_step)
        self._iteration = iteration
        self._scalars = PendingScalars(writer.submit)
        self._clock = time.perf_counter()
        self._finished = False
        reporter.step = start_step
        self._full = False
        if sampling.sampled(self._iteration):
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
            values = self._values(metrics, label)
            if kind is not None and kind not in KINDS:
                said = f"kind={kind!r} is none of {', '.join(KINDS)}; recorded without"
                self._reporter.problem("bad_kind", said, step=label)
                kind = None
            number = as_scalar(epoch)
            if not isinstance(number, float):
                if epoch is not None:
                    said = f"epoch={epoch!r} is no number; recorded without"
                    self._reporter.problem("bad_epoch", said, step=label)
                number = None
            now = time.time_ns() // 1000
            self._scalars.add(ScalarGroup(label, None, now, values, number, kind))
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

    def note(self, text: str) -> None:
        """Record a remark at the last closed step (the first one's label before), as an event of kind `note`."""
        if not self._finished:
            self._reporter.event("note", str(text), severity="info", step=self._labels.current)

    def finish(self, timeout: float = 60) -> None:
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
        values = self._values({**loss, **extra}, label)
        seen, may_close = self._collector.end_step()
        group = ScalarGroup(label, iteration, now, all_scalars(seen, seconds, values))
        if may_close:
            self._submit_window(group)
        else:
            self._scalars.add(group)
        self._reporter.step = self._labels.expected
        if self._sampling.sampled(self._iteration) and not self._collector.is_open:
            self._open()

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

        def tables() -> dict[str, Mapping[str, Any]]:
            made: dict[str, Mapping[str, Any]] = {} if calls is None else {"modules": {**calls, "step": group.step}}
            try:
                stats, scalars = numbers()
            except Exception as error:  # the step's scalars are fine: they must not be lost with it
                self._reporter.trouble("finishing the statistics of a step", "", error, step=group.step)
            else:
                group.values.update(scalars)
                when = [group.time] * len(stats["site"])
                made["stats"] = {**stats, "step": group.step, "iteration": group.iteration, "time": when}
            try:
                made["scalars"] = scalar_columns([group])
            except Exception as error:  # nor its statistics with the scalars
                self._reporter.trouble("fetching the scalars of a step", "", error, step=group.step)
            return made

        self._scalars.seal()
        if not self._writer.submit(tables, rows=rows, urgent=self._collector.behind):
            self._collector.refused()

    def _values(self, given: Mapping[str, object], step: int) -> dict[str, Scalar | Part]:
        values: dict[str, Scalar | Part] = {}
        for name, value in given.items():
            scalar = as_scalar(value)
            if scalar is None:
                self._reporter.problem(
                    "bad_scalar",
                    f"{name}={value!r:.80} is no single number ({type(value).__name__}): give a float or a "
                    "one-element tensor (of a DTensor its full_tensor()); not recorded",
                    cause=f"bad_scalar {name}",
                    step=step,
                )
            else:
                values[str(name)] = scalar
        return values

    def _whole(self, step: object) -> int:
        label, wrong = StepLabels(self._labels.current).next(step)
        if wrong:
            self._reporter.problem("bad_step_label", f"run.log: {wrong}; recorded at step {label}", step=label)
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
        deadline = time.monotonic() + timeout
        if not self._writer.close(timeout, state):
            lost = sum(self._writer.dropped.values())
            self._reporter.warn(
                f"not everything could be written to {self._path} within {timeout:g} s"
                + (f": {lost} rows were dropped" if lost else "")
            )
        for mirrors in self._mirrors:
            mirrors.finish(max(deadline - time.monotonic(), 0), state)


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

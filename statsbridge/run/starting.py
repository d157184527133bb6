"""`init()`: from what the user gave to a run that is being recorded. All errors belong here, none to a step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..backends import make_adapters
from ..collect.arguments import (
    AUTO,
    check_flag,
    check_folder,
    check_grad_scaler,
    check_max_bytes,
    check_models,
    check_optimizers,
    check_resume,
    check_settings,
    check_torch,
)
from ..collect.calls import static_calls
from ..collect.collector import Collector
from ..collect.filters import Patterns, make_filters
from ..collect.modules import ModuleIndex
from ..collect.ranks import position, shared_run
from ..collect.sampling import Sampling, StepLabels
from ..errors import ConfigError
from ..log.control import Control
from ..log.folder import create_run
from ..log.resume import find_unfinished, first_iteration, last_step, next_attempt
from ..log.runs import read_info, resolve_run
from ..log.writer import Writer
from ..reporting import Reporter
from .disabled import DisabledRun
from .figures import FigureLog
from .live import Live
from .recording import Run
from .schedule import Schedule

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

    from ..analyze.thresholds import Thresholds
    from ..analyze.watch import Watch
    from ..mirror import Adapter, Selection
    from ..mirror.mirrors import Allowed, Mirrors

#: Set to 1, `init()` returns a run that does nothing.
DISABLED = "STATSBRIDGE_DISABLED"


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
    alerts: bool | Thresholds | Mapping[str, float] = True,
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
        alerts: judge the rows while they are written: what is wrong is said in one line, becomes an event, goes to the
            trackers as an alert, and the next `Sampling.burst` steps are sampled. A `Thresholds`, or a mapping such as
            `{"loss_spike": 5.0}`, sets other limits; False for none of this.

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
    folder, scaler = check_folder(dir), check_grad_scaler(grad_scaler)
    restricted, histograms = check_flag("restricted", restricted), check_flag("histograms", histograms)
    count_eval = check_flag("eval", eval)
    limit = check_max_bytes(max_bytes)
    watch = _watch(alerts)
    index = ModuleIndex(models)
    optimizers = check_optimizers(optimizer, [entry.parameter for entry in index.parameters()])
    filters = make_filters(sites, modules, statistics, [entry.name for entry in index.entries])
    known_calls = static_calls(models, index) if order == "fx" else []
    information: dict[str, Any] = {
        "restricted": restricted,
        "versions": {"torch": torch.__version__},
        "sampling": {name: int(getattr(sampling, name)) for name in ("every", "first", "burst")},
        "start_step": int(start_step or 0),
        "sites": sorted(filters.sites),
    }
    if mirror is not None:
        information["mirror"] = _selection(mirror).to_json()
    allowed: list[Allowed] = []

    def create() -> str:
        old = None if resume is None else _run_to_resume(resume, folder, name, start_step)
        information["restricted"] |= old is not None and bool(read_info(old).get("restricted"))
        if adapters:
            from ..mirror.mirrors import ask_policy

            allowed.append(ask_policy(adapters, restricted=information["restricted"]))
        if old is None:
            path = create_run(folder, name=name, config=config, information=information)
            return json.dumps((str(path), 0, int(start_step or 0)))
        iteration = first_iteration(old, int(start_step or 0))
        held = next_attempt(old, int(start_step or 0), config=config, information=information)
        return json.dumps((str(old), holding.enter_context(held).number, iteration))

    with ExitStack() as holding:  # a run that is resumed, until this process is known to write it
        told, rank = shared_run(create)
        path, attempt, iteration = json.loads(told)
        writer = Writer(Path(path), rank=rank, attempt=attempt, flush_interval=float(flush_interval), max_bytes=limit)
    reporter = Reporter(writer.submit)
    # Of several processes the first one mirrors its rows, and judges them.
    first, several = rank == 0, position()[1] > 1
    control = Control(Path(path)) if first else None
    live = Live(Path(path), reporter, watch if first else None, control, several=several)
    writer.follow(live.follow)
    collector = Collector(
        index,
        filters,
        reporter,
        writer.submit,
        scaler=scaler,
        histograms=histograms,
        count_eval=count_eval,
        tracing=order == "auto",
    )
    for root, calls in known_calls:
        collector.calls.traced(root, calls, "fx")
    for optimizer_name, optimizer_object in optimizers:
        collector.optimizers.add(optimizer_object, optimizer_name)
    mirrors = [_mirrors(Path(path), one, mirror, writer, reporter, float(flush_interval)) for one in allowed]
    run = Run(
        Path(path),
        writer,
        reporter,
        collector,
        Schedule(sampling, filters.sites),
        StepLabels(int(start_step or 0)),
        iteration,
        mirrors,
        live,
        FigureLog(Path(path), rank, writer, reporter),
    )
    if attempt:
        reporter.event("resumed", f"attempt {attempt} goes on with this run from step {start_step}", severity="info")
    return run


def _watch(alerts: object) -> Watch | None:
    """What judges the rows; None where nobody wants alerts. Raises ConfigError for limits that are none."""
    from ..analyze.thresholds import Thresholds, make_thresholds
    from ..analyze.watch import Watch

    if isinstance(alerts, bool | np.bool_):
        return Watch() if alerts else None
    if not isinstance(alerts, Thresholds | Mapping):
        raise ConfigError(f"alerts={alerts!r}: give True, False, a Thresholds or a mapping of names to limits")
    return Watch(make_thresholds(alerts))


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
    from ..mirror import Selection

    if not isinstance(mirror, Selection):
        raise ConfigError(f"mirror is a {type(mirror).__name__}: give a statsbridge.Selection")
    return mirror


def _mirrors(
    path: Path, allowed: Allowed, selection: Selection | None, writer: Writer, reporter: Reporter, interval: float
) -> Mirrors:
    from ..mirror import Selection
    from ..mirror.mirrors import Mirrors

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

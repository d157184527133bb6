"""Each function of ours that a training reaches raises in turn: the training is the same, and it is said."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import statsbridge
from statsbridge import StatsBridgeWarning, collect, run
from statsbridge.collect import compiled, statistics

MODULES = sorted(
    f"{package.__name__}.{found.name}" for package in (collect, run) for found in pkgutil.iter_modules(package.__path__)
)
#: What the training or torch itself calls (nothing of ours is above it to catch anything), and the looks that come
#: before its `try`.
ENTRANCES = {
    *(f"run.recording.Run.{name}" for name in ("step", "log", "log_tensor", "finish", "_finish", "_told")),
    *("collect.forward.ForwardHooks._before", "collect.forward.ForwardHooks._after"),
    *("collect.optimizers.OptimizerWatch._before", "collect.optimizers.OptimizerWatch._after"),
    "collect.gradients.GradientHook.__call__",
    *("collect.order._TaggingMode.__torch_function__", "collect.order.DepthTracer._observe"),
    *("collect.suspended.is_suspended", "collect.suspended._is_traced"),
}
#: After it no event can be written: a warning has to do.
LAST = "run.recording.Run._close_writer"

Result = list[torch.Tensor]
optimizer_module = sys.modules["torch.optim.optimizer"]


def raising(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("injected")


class Network(nn.Module):
    """An in-place ReLU, a dropout, an output that is a view, a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu = nn.Linear(6, 8), nn.ReLU(inplace=True)
        self.dropout, self.last = nn.Dropout(0.3), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.relu(self.first(x))
        return self.last(self.dropout(hidden) + hidden).flatten()


def train(folder: Path | None, begun: Callable[[statsbridge.Run], object] = lambda run: None) -> Result:
    """Losses, weights and a random number; recorded where there is a folder. `begun` is called after `init`.

    What `init` raises is its user's; from there on nothing is.
    """
    torch.manual_seed(3)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    options: dict[str, Any] = {"dir": folder, "every": 2, "sites": "*", "histograms": True}
    recorded = None if folder is None else statsbridge.init(model, flush_interval=30, **options)
    if recorded is not None:
        begun(recorded)
    losses = []
    for _ in range(4):
        for _ in range(2):
            output = model(torch.randn(5, 6))
            if recorded is not None:
                recorded.log_tensor("output", output, grad=True)
            loss = output.pow(2).mean()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        if recorded is not None:
            recorded.step(loss=loss)
            recorded.log({"val": loss}, epoch=1)
    if recorded is not None:
        recorded.finish(timeout=20)
    return [*losses, *model.state_dict().values(), torch.rand(1)]


def train_broken(folder: Path, function: FunctionType) -> Result:
    """The same, with a function that raises wherever it is called: whoever has imported it holds the same object."""
    code = function.__code__
    runs = []

    def break_it(run: statsbridge.Run) -> None:
        runs.append(run)
        function.__code__ = raising.__code__

    try:
        return train(folder, break_it)
    finally:
        function.__code__ = code
        runs[0].finish()
        clean_up()


def clean_up() -> None:
    """Take away what our own clean-up has left, where it was what had to fail."""
    for module in (torch_module, optimizer_module):
        for name, held in vars(module).items():
            if name.startswith("_global_") and "hooks" in name and isinstance(held, dict):
                held.clear()
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    compiled.WINDOWS._watchers.clear()


def functions(module: ModuleType) -> Iterator[FunctionType]:
    """Those defined in it, and the methods and properties of its classes."""
    for thing in list(vars(module).values()):
        if getattr(thing, "__module__", None) != module.__name__:
            continue
        for member in [thing] if not inspect.isclass(thing) else list(vars(thing).values()):
            member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            function = inspect.unwrap(member) if callable(member) else member
            if inspect.isfunction(function) and function.__code__.co_filename == module.__file__:
                getattr(member, "cache_clear", lambda: None)()
                yield function


@functools.cache
def reached(device: bool) -> set[CodeType]:
    """The code that a training runs, in any thread, once the run has begun."""
    seen: set[CodeType] = set()

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "runs_on_host", lambda tensor: not device)
        threading.setprofile(look)  # for the threads that `init` begins
        try:
            train(Path(folder), lambda run: sys.setprofile(look))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return seen


def to_break(name: str, device: bool) -> Iterator[FunctionType]:
    """Those of one module that are reached; on the accelerators' path, those that are reached nowhere else."""
    for function in functions(importlib.import_module(name)):
        code = function.__code__
        if code in reached(device) and not (device and code in reached(False)) and label(function) not in ENTRANCES:
            yield function


def label(function: FunctionType) -> str:
    return f"{function.__module__.removeprefix('statsbridge.')}.{function.__qualname__}"


def said(folder: Path, caught: list[warnings.WarningMessage]) -> list[str]:
    """Warnings of ours, and events."""
    (path,) = folder.iterdir()
    ours = [str(warning.message) for warning in caught if issubclass(warning.category, StatsBridgeWarning)]
    return [*ours, *statsbridge.load(path).events["message"].to_pylist()]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("name", MODULES)
def test_a_function_that_raises_ends_and_changes_nothing(
    name: str, device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "runs_on_host", lambda tensor: not device)
    plain, wrong = train(None), []
    for number, function in enumerate(to_break(name, device)):
        folder = tmp_path / str(number)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = train_broken(folder, function)
            except ZeroDivisionError:
                wrong.append(f"{label(function)} ends the training")
                continue
        if not all(map(torch.equal, plain, result)):
            wrong.append(f"{label(function)} changes the training")
        heard = said(folder, caught if label(function) == LAST else [])
        if not any("injected" in text for text in heard):
            wrong.append(f"{label(function)} leaves no event")
    assert wrong == []
    # Whatever was left behind would make the next test another one.
    assert all(map(torch.equal, plain, train(tmp_path / "whole")))
    assert said(tmp_path / "whole", []) == []


@pytest.mark.slow
def test_most_functions_are_broken_and_every_entrance_is_one() -> None:
    broken = [label(function) for name in MODULES for function in to_break(name, device=False)]
    assert len(broken) > 200
    other = [label(function) for name in MODULES for function in to_break(name, device=True)]
    assert {"collect.packing.pack", "collect.device_kernel.measure_on_device"} <= {*broken, *other}
    everything = {label(function) for name in MODULES for function in functions(importlib.import_module(name))}
    assert everything >= ENTRANCES

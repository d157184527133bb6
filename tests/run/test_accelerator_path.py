"""What accelerator tensors go through, forced onto CPU tensors: the same numbers, and nothing that would wait."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import rows, scalars
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import statsbridge
from statsbridge.collect import packing, statistics
from statsbridge.collect.device_kernel import measure_on_device

Record = Callable[..., statsbridge.Run]

PACKAGE = str(Path(statsbridge.__file__).parent)

#: Operations that wait for their values: their result, or its shape, is one that the host has to know.
WAITING = (
    "_to_copy",
    "_local_scalar_dense",
    "nonzero",
    "item",
    "is_nonzero",
    "equal",
    "masked_select",
    "bincount",
    "unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
)
#: What Python calls to have values here. Of a CPU tensor most of these dispatch no operation at all.
FETCHING = (
    *("item", "tolist", "numpy", "cpu", "to", "__array__", "__dlpack__"),
    *("__float__", "__bool__", "__int__", "__index__", "__complex__"),
    *("__format__", "__repr__", "__contains__", "__iter__"),
)


class Operations(TorchDispatchMode):
    """Counts what is dispatched in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_to_copy" and (kwargs or {}).get("device") is None:
            name = "convert"  # to another dtype, where it is
        self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def train(run: statsbridge.Run | None, model: nn.Module, steps: int) -> None:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        loss = model(torch.randn(8, 3, 16, 16)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if run is not None:
            run.step(loss=loss, samples=8)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 40, 3, padding=1), nn.GroupNorm(4, 40), nn.ReLU(), nn.Flatten(), nn.Linear(40 * 256, 4)
    )


def test_the_same_rows_as_on_the_host(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    host = record(model, histograms=True)
    train(host, model, 2)
    host.finish()
    monkeypatch.setattr(statistics, "runs_on_host", lambda tensor: False)
    model = make()
    device = record(model, histograms=True)
    train(device, model, 2)
    device.finish()
    expected, found = (statsbridge.load(run.path) for run in (host, device))
    assert found.stats.num_rows == expected.stats.num_rows > 20
    for a, b in zip(rows(expected), rows(found), strict=True):
        for name in a:
            if name in ("time", "seq"):
                continue
            if isinstance(a[name], float):
                loose = 0.02 if name == "kl_unit_gaussian" else 1e-3 if name in ("skewness", "kurtosis") else 1e-5
                size = max(abs(a[name]), a["std"] if name == "mean" else 1.0 if loose > 1e-5 else 0.0)
                assert b[name] == pytest.approx(a[name], abs=loose * size + 1e-12), (a["module"], a["site"], name)
            else:
                assert b[name] == a[name], (a["module"], a["site"], name)
    for name in ("loss", "grad_norm", "grad_norm_applied", "param_norm", "update_ratio"):
        a, b = scalars(expected.scalars, name), scalars(found.scalars, name)
        assert a.keys() == b.keys()
        assert list(b.values()) == pytest.approx(list(a.values()), rel=1e-5)


class Fetches:
    """Counts the values that code of ours, in this thread, has Python fetch from tensors."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[str] = Counter()
        self.allowed = False
        self._thread = threading.current_thread()
        for name in FETCHING:
            patch.setattr(torch.Tensor, name, self._watched(name, getattr(torch.Tensor, name)))

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if (
                threading.current_thread() is self._thread
                and not self.allowed
                and caller.f_code.co_filename.startswith(PACKAGE)
                and (name != "to" or "cpu" in (*args, *kwargs.values()))  # else it stays where it is
            ):
                where = Path(caller.f_code.co_filename).relative_to(PACKAGE)
                self.seen[f"{name} at {where}:{caller.f_lineno}"] += 1
            return original(tensor, *args, **kwargs)

        return method


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 3))


def numbers() -> torch.Tensor:
    return torch.randn(16, 40)


def log_numbers(run: statsbridge.Run, loss: torch.Tensor) -> None:
    run.log({"val/loss": loss, "val/accuracy": (loss > 0).double()}, epoch=1, kind="epoch_mean")


@dataclass(frozen=True)
class Loop:
    """A way to train: its models and what is done in a step."""

    make: Callable[[], nn.Module] = perceptron
    inputs: Callable[[], torch.Tensor] = numbers
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    closure: bool = False
    scaled: bool = False
    clipped: bool = False
    by_hand: bool = False  # the output is logged, with its gradient
    after: Callable[[statsbridge.Run, torch.Tensor], None] = lambda run, loss: None
    several: bool = False  # the children are models of their own
    options: dict[str, Any] = field(default_factory=dict)

    def watched(self, model: nn.Module) -> Any:
        return dict(model.named_children()) if self.several else model

    def train(self, run: statsbridge.Run | None, model: nn.Module, steps: int) -> None:
        torch.manual_seed(1)
        optimizer = self.optimizer(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=self.scaled)

        def backward() -> torch.Tensor:
            optimizer.zero_grad()
            output = model(self.inputs())
            if run is not None and self.by_hand:
                run.log_tensor("output", output, grad=True)
            loss = output.float().pow(2).mean()
            scaler.scale(loss).backward()
            return loss

        for _ in range(steps):
            seen = {}
            if self.closure:
                loss = optimizer.step(backward)
            else:
                loss = backward()
                if self.clipped:
                    scaler.unscale_(optimizer)
                    seen["grad_norm"] = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
            if run is not None:
                run.step(loss=loss, samples=16, **seen)
                self.after(run, loss)


def bfloat16() -> nn.Module:
    return perceptron().bfloat16()


def tensor_rate(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-3), foreach=False)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=2)


LOOPS = {
    "images, plain SGD": Loop(make, lambda: torch.randn(8, 3, 16, 16), torch.optim.SGD),
    "clipping": Loop(clipped=True),
    "run.log of tensors": Loop(after=log_numbers),
    "log_tensor": Loop(by_hand=True),
    "a learning rate that is a tensor": Loop(optimizer=tensor_rate),
    "LBFGS": Loop(optimizer=lbfgs, closure=True),
    "all sites": Loop(options={"sites": "*"}),
    "bfloat16": Loop(bfloat16, lambda: numbers().bfloat16()),
    "GradScaler": Loop(scaled=True),
    "GradScaler and clipping": Loop(scaled=True, clipped=True),
    "GradScaler and a fused optimizer": Loop(scaled=True, optimizer=fused),
    "several models": Loop(several=True),
}


@pytest.mark.parametrize("name", LOOPS)
def test_nothing_waits_in_the_training_thread(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one copy to the host is that of the packed buffer, once for each sampled step."""
    loop = LOOPS[name]
    plain, watched = Operations(), Operations()
    with plain:
        loop.train(None, loop.make(), 4)
    monkeypatch.setattr(statistics, "runs_on_host", lambda tensor: False)
    fetches = Fetches(monkeypatch)
    copies: list[str] = []
    original = packing._to_host

    def copied(packed: torch.Tensor, device: torch.device) -> Any:
        copies.append(threading.current_thread().name)
        fetches.allowed = True  # the copy itself is what is allowed: everything else is counted
        with torch.utils._python_dispatch._disable_current_modes():
            result = original(packed, device)
        fetches.allowed = False
        return result

    monkeypatch.setattr(packing, "_to_host", copied)
    model = loop.make()
    # No burst: when it came, the background thread would decide.
    sampling = statsbridge.Sampling(every=2, burst=0)
    run = statsbridge.init(loop.watched(model), dir=tmp_path, every=sampling, histograms=True, **loop.options)
    with watched:
        loop.train(run, model, 4)
    assert fetches.seen == {}
    extra = watched.seen - plain.seen
    assert {name: extra[name] for name in WAITING if extra[name]} == {}
    assert copies == [threading.current_thread().name] * 2, "one a sampled step"
    run.finish()
    data = statsbridge.load(run.path)
    assert {row["step"] for row in rows(data)} == {0, 2}
    assert data.events.num_rows == 0
    assert len(scalars(data.scalars, "grad_norm_applied")) == 4


def test_a_fetch_of_ours_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would be in the package: code whose file lies there."""
    fetches = Fetches(monkeypatch)
    code = """
import numpy
float(one), bool(one), int(one), complex(one), f"{one}", repr(one), [1][index], 1.0 in one
one.item(), one.tolist(), one.numpy(), one.cpu(), one.to("cpu"), numpy.asarray(one), numpy.from_dlpack(one), [*many]
one.to(torch.float64), one + one, one.detach()  # these wait for nothing
"""
    names = {"one": torch.ones(()), "many": torch.ones(2), "index": torch.zeros((), dtype=torch.int64), "torch": torch}
    exec(compile(code, f"{PACKAGE}/made_up.py", "exec"), names)
    assert {name.partition(" ")[0] for name in fetches.seen} == set(FETCHING)
    assert {name.rpartition(":")[2] for name in fetches.seen} == {"3", "4"}
    before = fetches.seen.copy()
    exec(compile(code, "made_up_elsewhere.py", "exec"), names)
    assert fetches.seen == before


class Calls(TorchFunctionMode):
    """What of torch is called or looked at, whether or not an operation comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", [False, True])
def test_log_tensor_is_free_on_steps_that_are_not_sampled(
    device: bool, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device:
        monkeypatch.setattr(statistics, "runs_on_host", lambda tensor: False)
    model = perceptron()
    run = record(model, every=2)
    done = []
    for _ in range(4):
        output = model(numbers())
        with Calls() as calls, Operations() as operations:
            run.log_tensor("output", output, grad=True)
        done.append((len(calls.seen), sum(operations.seen.values()), output._backward_hooks is not None))
        output.sum().backward()
        run.step()
    assert done[1] == done[3] == (0, 0, False)
    assert all(sampled[0] and sampled[2] for sampled in done[::2]), "counted nothing where there is work"
    assert not device or (done[0][1] and done[2][1])
    run.finish()
    after = Calls()
    with after:
        run.log_tensor("output", output, grad=True)
    assert after.seen == []
    recorded = {(row["step"], row["site"]) for row in rows(statsbridge.load(run.path)) if row["tensor"] == "output"}
    assert recorded == {(step, site) for step in (0, 2) for site in ("tensor", "tensor_grad")}


def test_shapes_alone_are_enough() -> None:
    """On `meta` tensors there is no value to look at: the path must not need one."""
    wanted = statistics.Wanted(kl=True, histogram=True)
    for shape in ((3,), (7, 9), (100_000,), (64, 3, 32, 32), (3_000_000,)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            measure_on_device(tensor, None, wanted, None)
            measure_on_device(tensor, torch.empty_like(tensor), wanted, torch.ones(1, device="meta"))

"""What accelerator tensors go through, forced onto CPU tensors: the same numbers, and nothing that would wait."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import rows, scalars
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import statsbridge
from statsbridge.collect import packing, statistics
from statsbridge.collect.device_kernel import measure_on_device

Record = Callable[..., statsbridge.Run]

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


def test_nothing_waits_in_the_training_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one copy to the host is that of the packed buffer, once for each sampled step."""
    monkeypatch.setattr(statistics, "runs_on_host", lambda tensor: False)
    copies: list[tuple[int, str]] = []
    original = packing._to_host

    def counted(packed: torch.Tensor, device: torch.device) -> Any:
        copies.append((packed.numel(), threading.current_thread().name))
        # The copy itself is what is allowed: everything else is counted.
        with torch.utils._python_dispatch._disable_current_modes():
            return original(packed, device)

    monkeypatch.setattr(packing, "_to_host", counted)
    plain = Operations()
    with plain:
        train(None, make(), 4)
    model = make()
    run = statsbridge.init(model, dir=tmp_path, every=2, histograms=True)
    watched = Operations()
    with watched:
        train(run, model, 4)
    run.finish()
    extra = watched.seen - plain.seen
    assert {name: extra[name] for name in WAITING if extra[name]} == {}
    assert len(copies) == 2, "one a sampled step"
    assert {thread for _, thread in copies} == {threading.current_thread().name}
    assert statsbridge.load(run.path).stats.num_rows > 0


def test_shapes_alone_are_enough() -> None:
    """On `meta` tensors there is no value to look at: the path must not need one."""
    wanted = statistics.Wanted(kl=True, histogram=True)
    for shape in ((3,), (7, 9), (100_000,), (64, 3, 32, 32), (3_000_000,)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            measure_on_device(tensor, None, wanted, None)
            measure_on_device(tensor, torch.empty_like(tensor), wanted, torch.ones(1, device="meta"))

"""The `modules` table of a run: order and depth of what was called, and how it follows a model that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recording import events, row, rows
from torch import nn

import statsbridge

Record = Callable[..., statsbridge.Run]


class Branches(nn.Module):
    """A residual branch, a reused module, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.shared = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.use_other = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shared(x)
        z = self.inside(y) + x
        if self.use_other:
            z = self.other(z)
        return self.shared(z)


def train(run: statsbridge.Run, model: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.randn(3, 4)).sum().backward()
        run.step()


def table(data: statsbridge.RunData, step: int) -> dict[tuple[str, int], tuple[Any, ...]]:
    """(module, call) -> (order, depth, source) as known at a step: the last trace not after it."""
    latest = max(m["step"] for m in data.modules.to_pylist() if m["step"] <= step)
    return {
        (m["module"], m["call"]): (m["order"], m["depth"], m["order_source"])
        for m in data.modules.to_pylist()
        if m["step"] == latest
    }


BY_HAND = {
    ("shared", 0): (0, 1),
    ("inside.0", 0): (1, 2),
    ("inside.1", 0): (2, 3),
    ("inside", 0): (3, 3),
    ("shared", 1): (4, 4),
    ("", 0): (5, 4),
}


@pytest.mark.parametrize("order", ["auto", "fx"])
def test_order_and_depth_by_hand(order: str, record: Record) -> None:
    model = Branches()
    run = record(model, order=order)
    train(run, model)
    run.finish()
    data = statsbridge.load(run.path)
    source = {"auto": "runtime", "fx": "fx"}[order]
    expected = {key: (*place, source) for key, place in BY_HAND.items()}
    assert table(data, 0) == {**expected, ("never", 0): (None, None, None), ("other", 0): (None, None, None)}
    for r in rows(data, site="activation"):
        if r["status"] != "not_called":
            assert (r["order"], r["depth"]) == BY_HAND[r["module"], r["call"]]
    assert [r["call"] for r in rows(data, module="shared", site="activation")] == [0, 1]
    entry = {m["module"]: m for m in data.modules.to_pylist()}
    assert (entry["inside"]["leaf"], entry["inside"]["parameters"], entry["inside"]["parent"]) == (False, 0, "")
    assert (entry["shared"]["leaf"], entry["shared"]["parameters"], entry["shared"]["type"]) == (True, 20, "Linear")


def test_execution_order_alone(record: Record) -> None:
    model = Branches()
    run = record(model, order="execution")
    train(run, model)
    run.finish()
    found = table(statsbridge.load(run.path), 0)
    assert {key: value for key, value in found.items() if value[0] is not None} == {
        key: (order, None, "execution") for key, (order, _) in BY_HAND.items()
    }


def test_rows_of_a_step_are_in_data_flow_order(record: Record) -> None:
    model = Branches()
    run = record(model)
    train(run, model)
    run.finish()
    modules = [r["module"] for r in rows(statsbridge.load(run.path)) if r["site"] == "activation"]
    assert modules == ["shared", "inside.0", "inside.1", "inside", "shared", "", "never", "other"]


def test_new_calls_are_traced_at_the_next_forward_and_old_ones_kept(record: Record) -> None:
    model = Branches()
    run = record(model)
    train(run, model)
    model.use_other = True
    train(run, model, 2)
    model.use_other = False
    train(run, model, 2)
    model.use_other = True
    train(run, model)
    run.finish()
    data = statsbridge.load(run.path)
    assert [row(data, step=s, site="activation", module="other")["depth"] for s in (1, 2, 5)] == [None, 4, 4]
    assert table(data, 0)["other", 0] == (None, None, None)
    assert table(data, 1)["other", 0][1:] == (None, "execution")
    assert table(data, 2)["other", 0] == (4, 4, "runtime")
    assert table(data, 5)["shared", 1] == (5, 5, "runtime")
    assert sorted({m["step"] for m in data.modules.to_pylist()}) == [0, 1, 2], "one trace for each change"


def test_every_row_of_stats_is_in_modules(record: Record) -> None:
    model = Branches()
    run = record(model)
    train(run, model, 2)
    model.use_other = True
    model.added = nn.Linear(4, 4)  # type: ignore[assignment]
    train(run, model, 2)
    run.finish()
    data = statsbridge.load(run.path)
    for r in rows(data):
        assert (r["module"], r["call"]) in table(data, r["step"])
    assert row(data, step=3, module="added", site="activation")["status"] == "not_called"
    assert row(data, step=3, module="added", site="parameter", tensor="weight")["count"] == 16


def test_a_tracer_that_fails_falls_back_and_says_so(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    from statsbridge.collect.order import DepthTracer

    def broken(self: DepthTracer, *_: Any) -> int:
        raise RuntimeError("injected")

    monkeypatch.setattr(DepthTracer, "_exit", broken)
    model = Branches()
    run = record(model)
    train(run, model, 2)
    run.finish()
    data = statsbridge.load(run.path)
    assert table(data, 0)["inside", 0] == (3, None, "execution")
    assert len(events(data, "order_not_traced")) == 1
    assert row(data, step=0, module="inside", site="activation")["count"] == 12


def test_submodules_called_by_themselves(record: Record) -> None:
    """A loop that never calls the model itself: each outermost module counts from its own inputs."""
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "decoder": nn.Linear(4, 4)})
    run = record(model)
    for _ in range(2):
        model["decoder"](model["encoder"](torch.randn(3, 4))).sum().backward()
        run.step()
    run.finish()
    found = table(statsbridge.load(run.path), 1)
    assert {key: value[:2] for key, value in found.items() if value[0] is not None} == {
        ("encoder.0", 0): (0, 1),
        ("encoder.1", 0): (1, 2),
        ("encoder", 0): (2, 2),
        ("decoder", 0): (3, 1),
    }

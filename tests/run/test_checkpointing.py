"""Activation checkpointing: each module once a forward, and the numbers of the run without checkpointing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from depth_oracle import table_depths
from joins import check_joins
from recording import rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import statsbridge

Record = Callable[..., statsbridge.Run]
pytestmark = pytest.mark.usefixtures("one_thread")

REENTRANT, MODERN = {"use_reentrant": True}, {"use_reentrant": False}


class Block(nn.Module):
    """Dropout, a norm, an in-place activation: what a recompute must get right."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.first = nn.Linear(6, 6)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.4)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.drop(self.relu(self.first(self.norm(x)))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A stem, two blocks and a head; `way` runs the blocks."""

    def __init__(self, way: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.Sequential(Block(), Block())
        self.shared = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.way(self, self.stem(x)))  # type: ignore[no-any-return]


def plain(m: Model, x: Tensor) -> Tensor:
    return m.blocks(x)  # type: ignore[no-any-return]


def each(**how: Any) -> Callable[[Model, Tensor], Tensor]:
    def run(m: Model, x: Tensor) -> Tensor:
        for block in m.blocks:
            x = checkpoint(block, x, **how)
        return x

    return run


def each_without_checkpoint(m: Model, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = block(x)
    return x


def nested(outer: dict[str, bool], inner: dict[str, bool]) -> Callable[[Model, Tensor], Tensor]:
    def run(m: Model, x: Tensor) -> Tensor:
        return checkpoint(lambda t: m.blocks[1](checkpoint(m.blocks[0], t, **inner)), x, **outer)  # type: ignore[no-any-return]

    return run


def twice(first: dict[str, bool] | None, second: dict[str, bool] | None) -> Callable[[Model, Tensor], Tensor]:
    """A module in two places, each of them checkpointed or not."""

    def run(m: Model, x: Tensor) -> Tensor:
        for how in (first, second):
            x = m.shared(x) if how is None else checkpoint(m.shared, x, **how)
        return x

    return run


WAYS: dict[str, tuple[Callable[[Model, Tensor], Tensor], Callable[[Model, Tensor], Tensor]]] = {
    "reentrant": (each(**REENTRANT), each_without_checkpoint),
    "non-reentrant": (each(**MODERN), each_without_checkpoint),
    "no random state kept, and no dropout": (each(**MODERN, preserve_rng_state=False), each_without_checkpoint),
    "sequential, reentrant": (lambda m, x: checkpoint_sequential(m.blocks, 2, x, **REENTRANT), each_without_checkpoint),
    "sequential": (lambda m, x: checkpoint_sequential(m.blocks, 2, x, **MODERN), each_without_checkpoint),
    "nested, reentrant": (nested(REENTRANT, REENTRANT), each_without_checkpoint),
    "nested": (nested(MODERN, MODERN), each_without_checkpoint),
    "reentrant inside the other": (nested(MODERN, REENTRANT), each_without_checkpoint),
    "the other inside reentrant": (nested(REENTRANT, MODERN), each_without_checkpoint),
    "a shared module, twice": (twice(MODERN, MODERN), twice(None, None)),
    "a shared module, plain and reentrant": (twice(None, REENTRANT), twice(None, None)),
    "a shared module, reentrant and plain": (twice(REENTRANT, None), twice(None, None)),
    "a shared module, of both kinds": (twice(MODERN, REENTRANT), twice(None, None)),
}
if "early_stop" in inspect.signature(checkpoint).parameters:  # of newer versions of torch
    WAYS["without early stop"] = (each(**MODERN, early_stop=False), each_without_checkpoint)


def train(name: str, way: Callable[[Model, Tensor], Tensor], record: Record | None) -> tuple[Any, ...]:
    """Two steps of two micro-batches: losses, weights, and the record."""
    torch.manual_seed(2)
    model = Model(way)
    if "no dropout" in name:
        for block in model.blocks:
            block.drop.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = None if record is None else record(model)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        for size in (5, 4):
            loss = model(torch.randn(size, 6)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        if run is not None:
            run.step()
    data = None
    if run is not None:
        run.finish()
        data = statsbridge.load(run.path)
    # The running statistics of a BatchNorm are updated once more in a recompute, with us and without.
    return losses, [p.detach().clone() for p in model.parameters()], list(model.state_dict().values()), data


NUMBERS = ("count", "mean", "std", "min", "max", "l2", "abs_mean", "zero_fraction", "skewness", "kurtosis", "status")


@pytest.mark.parametrize("name", WAYS)
def test_the_numbers_are_those_of_the_run_without_checkpointing(name: str, record: Record) -> None:
    way, without = WAYS[name]
    losses, parameters, state, _ = train(name, way, None)
    watched_losses, _, watched_state, data = train(name, way, record)
    _, plain_parameters, _, expected = train(name, without, record)
    for one, other in ((losses, watched_losses), (state, watched_state)):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), "training differs with us"
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(parameters, plain_parameters, strict=True))
    check_joins(data)
    found = {key(r): r for r in rows(data)}
    assert found.keys() == {key(r) for r in rows(expected)}, "each module once a forward"
    for r in rows(expected):
        for column in NUMBERS:
            value = found[key(r)][column]
            approximate = isinstance(r[column], float)
            assert value == (pytest.approx(r[column], rel=1e-3, abs=1e-6) if approximate else r[column]), (
                key(r),
                column,
            )
    assert table_depths(data.modules) == table_depths(expected.modules)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("step", "module", "call", "site", "tensor"))


@pytest.mark.parametrize("nested_too", [False, True])
def test_a_shared_module_in_reentrant_checkpoints_has_no_number(nested_too: bool, record: Record) -> None:
    """Which recompute repeats which call nobody can know; the call outside, and what is not shared, keep theirs."""

    def run_blocks(m: Model, x: Tensor) -> Tensor:
        x = m.shared(x)
        inner: Any = m.shared
        if nested_too:
            inner = lambda t: checkpoint(m.shared, t, **REENTRANT)  # noqa: E731
        for _ in range(2):
            x = checkpoint(inner, x, **REENTRANT)
        return x

    _, _, _, data = train("shared", run_blocks, record)
    _, _, _, expected = train("shared", lambda m, x: m.shared(m.shared(m.shared(x))), record)
    for step in range(2):
        status = {r["call"]: r["status"] for r in rows(data, step=step, module="shared", site="activation_grad")}
        assert status == {0: None, 1: "recompute_order_unknown", 2: "recompute_order_unknown"}
    for r in rows(expected):
        if r["module"] != "shared" or r["site"] != "activation_grad" or r["call"] == 0:
            (mine,) = (one for one in rows(data) if key(one) == key(r))
            assert mine["mean"] == (r["mean"] and pytest.approx(r["mean"], rel=1e-3, abs=1e-6))
            assert mine["count"] == r["count"]


def test_a_shared_module_without_gradients_that_is_recomputed_elsewhere_has_none(record: Record) -> None:
    """Found by the fuzz: the recompute of the third call says nothing about the two under no_grad."""

    def run_blocks(m: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = m.shared(m.shared(x))
        return checkpoint(lambda t: m.shared(t).tanh(), x + y, **MODERN)  # type: ignore[no-any-return]

    _, _, _, data = train("shared", run_blocks, record)
    for step in range(2):
        status = {r["call"]: r["status"] for r in rows(data, step=step, module="shared", site="activation_grad")}
        assert status == {0: "no_grad", 1: "no_grad", 2: None}


@pytest.mark.parametrize("how", [REENTRANT, MODERN])
def test_a_checkpoint_without_gradients_has_none(how: dict[str, bool], record: Record) -> None:
    """Nothing to recompute: a module under no_grad has no gradient, whatever wraps it."""

    def run_blocks(m: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = checkpoint(m.shared, x, **how)
        return x + frozen  # type: ignore[no-any-return]

    _, _, _, data = train("no gradients", run_blocks, record)
    assert {r["status"] for r in rows(data, module="shared", site="activation_grad")} == {"no_grad"}

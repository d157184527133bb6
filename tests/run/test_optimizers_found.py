"""GradScalers and optimizers that nobody gave to `init`: found, told apart, and never a wrong number."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recording import events, row, rows, scalars
from torch import nn

import statsbridge

Record = Callable[..., statsbridge.Run]
Scaler = torch.amp.GradScaler


@pytest.fixture(autouse=True)
def no_scalers_of_other_tests() -> None:
    gc.collect()


class Nothing(nn.Linear):
    """Hands its result over in another way than by returning it."""

    def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
        self.result = super().forward(x)


def test_a_model_that_returns_nothing_inside_an_except_block(record: Record) -> None:
    model = nn.ModuleDict({"quiet": Nothing(3, 2), "loud": nn.Linear(2, 2)})
    run = record(model)
    for _ in range(2):
        try:
            raise ValueError
        except ValueError:
            model["quiet"](torch.ones(1, 3))
            model["loud"](model["quiet"].result).sum().backward()
        run.step()
    with pytest.raises(RuntimeError):
        model["quiet"](torch.ones(1, 4))
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    assert [r["status"] for r in rows(data, module="loud", site="activation")] == [None, None, "not_called"]
    placed = {m["module"]: m["order"] for m in data.modules.to_pylist()}
    assert placed["quiet"] == 0, "its call was not counted"


def gradients(data: statsbridge.RunData, step: int, site: str = "activation_grad") -> dict[str, Any]:
    tensor = {"activation_grad": "", "parameter_grad": "bias"}[site]
    return row(data, step=step, module="", site=site, tensor=tensor)


def train(
    run: statsbridge.Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Scaler | None,
    factors: list[float],
) -> None:
    """Steps of which the gradient of each output element is the factor, before scaling."""
    for factor in factors:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum() * factor
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        run.step(loss=loss)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_scaler_is_found(kind: Any, fused: bool, record: Record) -> None:
    model = nn.Linear(3, 2)
    scaler = Scaler("cpu", init_scale=512.0, growth_interval=2)
    run = record(model)
    train(run, model, kind(model.parameters(), lr=1e-3, fused=fused), scaler, [2.0, 3.0, 5.0, float("inf"), 7.0])
    run.finish()
    data = statsbridge.load(run.path)
    for step, expected in ((0, 2.0), (1, 3.0), (2, 5.0), (4, 7.0)):
        assert gradients(data, step)["mean"] == expected
        assert gradients(data, step, "parameter_grad")["mean"] == expected
    assert gradients(data, 3, "parameter_grad")["status"] == "step_skipped"
    assert rows(data, step=3, site="update") == []
    assert [event["step"] for event in events(data, "optimizer_step_skipped")] == [3]
    assert scalars(data.scalars, "grad_norm_applied")[1] == pytest.approx(torch.full((8,), 3.0).norm().item(), rel=1e-5)


def test_a_first_step_that_is_skipped_has_no_parameter_gradients(record: Record) -> None:
    """At its first scale float16 overflows: no optimizer has been seen yet, and what lies about is no gradient."""
    model = nn.Linear(3, 2)
    run = record(model)
    train(run, model, torch.optim.SGD(model.parameters(), lr=0.1), Scaler("cpu", init_scale=8.0), [float("inf"), 2.0])
    run.finish()
    data = statsbridge.load(run.path)
    assert [event["step"] for event in events(data, "optimizer_step_skipped")] == [0]
    assert gradients(data, 0, "parameter_grad")["status"] == "step_skipped"
    assert gradients(data, 0, "parameter_grad")["l2"] is None
    assert gradients(data, 1, "parameter_grad")["mean"] == 2.0
    assert gradients(data, 1)["mean"] == 2.0


def test_the_scaler_of_another_model_costs_one_step_its_gradients(record: Record) -> None:
    other, model = nn.Linear(3, 2), nn.Linear(3, 2)
    scaler = Scaler("cpu", init_scale=512.0)
    scaler.scale(other(torch.ones(1, 3)).sum()).backward()
    run = record(model)
    train(run, model, torch.optim.SGD(model.parameters(), lr=0.1), None, [2.0, 3.0])
    run.finish()
    data = statsbridge.load(run.path)
    assert (gradients(data, 0)["status"], gradients(data, 0)["mean"]) == ("scale_unknown", None)
    assert gradients(data, 1)["mean"] == 3.0
    assert gradients(data, 0, "parameter_grad")["mean"] == 2.0


def test_two_scalers_in_use(record: Record) -> None:
    """A notebook's cell that has run before: which one is it? The first optimizer step tells."""
    stale = Scaler("cpu", init_scale=4.0)
    stale.scale(torch.ones(1))
    model = nn.Linear(3, 2)
    run = record(model)
    train(run, model, torch.optim.SGD(model.parameters(), lr=0.1), Scaler("cpu", init_scale=512.0), [2.0, 3.0])
    run.finish()
    data = statsbridge.load(run.path)
    assert gradients(data, 0)["status"] == "scale_unknown"
    assert gradients(data, 1)["mean"] == 3.0


def test_a_scaler_that_no_search_can_find(record: Record) -> None:
    """`gc.freeze()` hides objects from the search: then nothing is said until an optimizer has stepped."""
    model = nn.Linear(3, 2)
    scaler = Scaler("cpu", init_scale=512.0)
    gc.freeze()
    try:
        run = record(model)
        train(run, model, torch.optim.SGD(model.parameters(), lr=0.1), scaler, [2.0, 3.0])
    finally:
        gc.unfreeze()
    run.finish()
    data = statsbridge.load(run.path)
    assert gradients(data, 0)["status"] == "scale_unknown"
    assert gradients(data, 1)["mean"] == 3.0


def test_a_disabled_scaler_scales_nothing(record: Record) -> None:
    model = nn.Linear(3, 2)
    run = record(model)
    train(run, model, torch.optim.SGD(model.parameters(), lr=0.1), Scaler("cpu", enabled=False), [2.0, 3.0])
    run.finish()
    data = statsbridge.load(run.path)
    assert [gradients(data, step)["mean"] for step in (0, 1)] == [2.0, 3.0]


@pytest.mark.parametrize("given", [True, False])
def test_a_scaler_is_not_kept_alive(given: bool, record: Record) -> None:
    model = nn.Linear(3, 2)
    scaler = Scaler("cpu", init_scale=8.0)
    reference = weakref.ref(scaler)
    run = record(model, **({"grad_scaler": scaler} if given else {}))
    train(run, model, torch.optim.SGD(model.parameters(), lr=0.1), scaler, [2.0])
    del scaler
    gc.collect()
    assert reference() is None
    run.step()


def test_an_optimizer_that_a_scheduler_keeps_alive_is_replaced(record: Record) -> None:
    model = nn.Linear(3, 2)
    run = record(model)
    old = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(old)
    train(run, model, old, None, [1.0])
    del old
    train(run, model, torch.optim.SGD(model.parameters(), lr=0.25), None, [1.0, 1.0])
    run.finish()
    assert scheduler.optimizer is not None
    table = statsbridge.load(run.path).scalars
    assert {r["name"] for r in table.to_pylist() if r["name"].startswith("lr")} == {"lr/0"}
    assert scalars(table, "lr/0") == {0: pytest.approx(0.5 / 3), 1: 0.25, 2: 0.25}


@pytest.mark.parametrize(
    ("named", "kind", "name"),
    [(False, torch.optim.SGD, "SGD_1"), (False, torch.optim.Adam, "Adam"), (True, torch.optim.Adam, "second")],
)
def test_one_of_two_optimizers_is_replaced_and_hands_its_name_on(
    named: bool, kind: Any, name: str, record: Record
) -> None:
    models = {"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}
    first = torch.optim.SGD(models["a"].parameters(), lr=1.0)
    second = torch.optim.SGD(models["b"].parameters(), lr=2.0)
    run = record(models, **({"optimizer": {"SGD": first, "second": second}} if named else {}))

    def steps(*optimizers: torch.optim.Optimizer) -> None:
        for model in models.values():
            model(torch.ones(1, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        run.step()

    steps(first, second)
    steps(first, kind(models["b"].parameters(), lr=3.0))
    run.finish()
    table = statsbridge.load(run.path).scalars
    found = {r["name"]: r["value"] for r in table.to_pylist() if r["name"].startswith("lr") and r["step"] == 1}
    assert found == {"lr/SGD/0": 1.0, f"lr/{name}/0": 3.0}


def test_optimizers_that_take_turns_on_the_same_parameters_are_two(record: Record) -> None:
    model = nn.Linear(3, 2)
    run = record(model)
    one, other = torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.Adam(model.parameters(), lr=2.0)
    for _ in range(3):
        train(run, model, one, None, [1.0])
        train(run, model, other, None, [1.0])
    run.finish()
    table = statsbridge.load(run.path).scalars
    last = {r["name"]: r["value"] for r in table.to_pylist() if r["name"].startswith("lr") and r["step"] == 5}
    assert last == {"lr/SGD/0": 1.0, "lr/Adam/0": 2.0}

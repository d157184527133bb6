"""What once broke a run, or made a wrong number, found by a review: each stays mended."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from recording import Small, events, row, rows, scalars
from torch import nn
from torch.utils.checkpoint import checkpoint

import statsbridge
from statsbridge import StatsBridgeWarning
from statsbridge.collect.reduce import Reducer

Record = Callable[..., statsbridge.Run]


def step(run: statsbridge.Run, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss = model(x).abs().sum()
    loss.backward()
    optimizer.step()
    run.step(loss=loss)


def test_a_run_that_never_sampled_can_be_finished(record: Record) -> None:
    run = record(nn.Linear(2, 2), every=10, start_step=1)
    run.finish()
    assert statsbridge.load(run.path).stats.num_rows == 0


def test_nonsense_in_log_tensor(record: Record) -> None:
    model = nn.Linear(2, 2)
    run = record(model)
    with pytest.warns(StatsBridgeWarning, match="no torch.Tensor"):
        run.log_tensor("x", np.ones(3), grad=True)
    run.log_tensor(3, torch.ones(4))  # type: ignore[arg-type]
    run.log_tensor("meta", torch.ones(4, device="meta"))
    model(torch.ones(1, 2)).sum().backward()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    assert row(data, site="tensor", tensor="3")["mean"] == 1.0
    assert row(data, site="tensor", tensor="meta")["status"] == "meta"
    assert len(events(data, "bad_tensor")) == 1


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_parameters_of_odd_kinds_do_not_keep_the_window_open(dtype: torch.dtype, record: Record) -> None:
    model = nn.Linear(3, 2)
    model.odd = nn.Parameter(torch.ones(2).to(dtype), requires_grad=dtype.is_complex)
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(run, model, optimizer, torch.randn(4, 3))
    run.finish()
    data = statsbridge.load(run.path)
    assert {r["step"] for r in rows(data)} == {0, 1}
    assert sorted(scalars(data.scalars, "param_norm")) == [0, 1]
    assert row(data, step=0, site="parameter", tensor="odd")["count"] == 2


def test_a_number_too_large_for_a_float_costs_only_itself(record: Record) -> None:
    model = nn.Linear(2, 2)
    run = record(model)
    with pytest.warns(StatsBridgeWarning, match="loss="):
        run.step(loss=10**400, other=1.0)
    run.step(loss=1.0)
    run.finish()
    data = statsbridge.load(run.path)
    assert scalars(data.scalars, "other") == {0: 1.0}
    assert {r["step"] for r in rows(data)} == {0, 1}


def test_an_optimizer_that_is_gone_is_not_waited_for(record: Record) -> None:
    model = nn.Linear(3, 2)
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(run, model, optimizer, torch.randn(4, 3))
    del optimizer
    gc.collect()
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        run.step()
    run.finish()
    assert {r["step"] for r in rows(statsbridge.load(run.path))} == {0, 1, 2}


def test_what_goes_wrong_in_the_last_write_is_on_record(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is closed already when the background thread comes upon it."""
    monkeypatch.setattr(Reducer, "finish", lambda *_: 1 / 0)
    model = nn.Linear(3, 2)
    run = record(model, flush_interval=1000)
    step(run, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 3))
    with pytest.warns(StatsBridgeWarning, match="ZeroDivisionError"):
        run.finish()
    data = statsbridge.load(run.path)
    [event] = events(data, "internal_error")
    assert "ZeroDivisionError" in event["message"]
    assert sorted(scalars(data.scalars, "loss")) == [0]


def test_refused_work_is_counted_off(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small()
    run = record(model)
    monkeypatch.setattr(run._writer, "submit", lambda work, **_: False)
    for _ in range(3):
        model(torch.randn(64, 8)).sum().backward()
        run.step()
    assert run._collector._handed_over == run._collector._worked_off > 0


def test_an_optimizer_that_has_not_stepped_has_no_gradients(record: Record) -> None:
    """Two optimizers under a GradScaler: the one left out still has scaled gradients lying about."""
    models = {"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models.values()]
    run = record(models, optimizer=optimizers)
    for turn in (optimizers, optimizers[:1]):
        for model in models.values():
            (1024 * model(torch.randn(4, 3)).sum()).backward()
        for optimizer in turn:
            optimizer.step()
        run.step()
    run.finish()
    data = statsbridge.load(run.path)
    assert row(data, step=0, module="b", site="parameter_grad", tensor="weight")["status"] is None
    left_out = row(data, step=1, module="b", site="parameter_grad", tensor="weight")
    assert (left_out["status"], left_out["l2"]) == ("not_stepped", None)


def test_a_wrapped_optimizer_steps_once(record: Record) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base = base
            super().__init__(base.param_groups, base.defaults)

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            self.base.step()

    model = nn.Linear(3, 2)
    run = record(model)
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    step(run, model, optimizer, torch.ones(1, 3))
    run.finish()
    data = statsbridge.load(run.path)
    gradient = torch.cat([p.grad.ravel() for p in model.parameters() if p.grad is not None])
    assert scalars(data.scalars, "grad_norm_applied")[0] == pytest.approx(gradient.norm().item(), rel=1e-6)
    assert {r["name"] for r in data.scalars.to_pylist() if r["name"].startswith("lr")} == {"lr/0"}


def test_a_module_that_returns_its_parameter(record: Record) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5))

        def forward(self) -> torch.Tensor:
            return self.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = Table()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table()

    model = Model()
    run = record(model)
    batches = [torch.randn(5), torch.randn(5)]
    for x in batches:
        model(x).sum().backward()
    run.step()
    run.finish()
    found = row(statsbridge.load(run.path), module="table", site="activation_grad")
    assert (found["status"], found["count"]) == (None, 10)
    assert found["mean"] == pytest.approx(torch.cat(batches).mean().item(), rel=1e-5)
    assert not model.table.weight._backward_hooks


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_are_recorded_once(reentrant: bool, record: Record) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def part(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            run.log_tensor("inside", y)
            return y.relu_()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.part, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model = Model()
    run = record(model)
    x = torch.randn(2, 3, 4, requires_grad=True)
    plain = nn.functional.linear(x, model.inner.weight, model.inner.bias)
    (expected,) = torch.autograd.grad(plain.relu().pow(2).sum(), plain)
    model(x).pow(2).sum().backward()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    assert row(data, module="inner", site="activation", call=0)["count"] == 24
    assert row(data, site="tensor", tensor="inside")["count"] == 24
    gradient = row(data, module="inner", site="activation_grad", call=0)
    assert gradient["status"] is None
    assert gradient["l2"] == pytest.approx(expected.norm().item(), rel=1e-5)


def test_a_scaler_that_is_first_used_has_not_skipped(record: Record) -> None:
    model = nn.Linear(3, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run = record(model, grad_scaler=scaler)
    scaler.scale(model(torch.randn(4, 3)).sum()).backward()
    run.step()
    run.finish()
    assert events(statsbridge.load(run.path), "optimizer_step_skipped") == []


def test_a_scaler_that_skips(record: Record) -> None:
    model = nn.Linear(3, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(model, grad_scaler=scaler, optimizer=optimizer)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        output = model(torch.ones(1, 3))
        scaler.scale(output.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        run.step()
    run.finish()
    data = statsbridge.load(run.path)
    assert [event["step"] for event in events(data, "optimizer_step_skipped")] in ([1], [0])
    statuses = {s: row(data, step=s, site="parameter_grad", tensor="weight")["status"] for s in (0, 1, 2)}
    assert statuses == {0: None, 1: "step_skipped", 2: None}
    for s in (0, 2):
        assert row(data, step=s, site="parameter_grad", tensor="weight")["mean"] == 1.0
        assert row(data, step=s, module="", site="activation_grad")["mean"] == 1.0
    assert rows(data, step=1, site="update") == []


def test_nothing_of_the_model_lives_on(record: Record) -> None:
    model = nn.Linear(300, 300)
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(run, model, optimizer, torch.randn(4, 300))
    run.finish()
    weight, module = weakref.ref(model.weight), weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert weight() is None
    assert module() is None


def test_a_model_that_holds_its_run_is_copied_and_saved(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Averaged weights copy all of it, and a checkpoint may hold it: what arrives there is no second recording."""
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = model.run = record(model)
    step(run, model, optimizer, torch.randn(4, 8))
    twin = copy.deepcopy(model)
    assert twin.run is copy.copy(run) is run
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert saved.run.path == run.path
    with pytest.warns(StatsBridgeWarning, match=r"begun in another process.*statsbridge\.init"):
        step(saved.run, saved, torch.optim.SGD(saved.parameters(), lr=0.1), torch.randn(4, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved.run.step()  # it is said once
        saved.run.log({"a": 1.0})
        saved.run.note("nothing")
        with saved.run.sampling():
            saved.run.log_tensor("b", torch.ones(3))
        saved.run.finish()
        monkeypatch.setenv("STATSBRIDGE_DISABLED", "1")
        disabled = pickle.loads(pickle.dumps(copy.deepcopy(record(model))))
        disabled.step()
        assert (disabled.path, disabled.id) == (None, None)
    step(run, model, optimizer, torch.randn(4, 8))
    run.finish()
    data = statsbridge.load(run.path)
    assert sorted(scalars(data.scalars, "loss")) == [0, 1]
    assert not scalars(data.scalars, "a")
    assert not rows(data, site="tensor")

"""Recorded numbers against values computed by hand: activations, their gradients, parameters, updates."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from recording import Small, row, rows, scalars
from torch import nn

import statsbridge
from statsbridge.collect import collector

Record = Callable[..., statsbridge.Run]


def check(found: dict[str, object], tensor: torch.Tensor) -> None:
    """Every column of a row against float64 numpy and scipy."""
    x = tensor.detach().double().numpy().ravel()
    expected = {
        "count": x.size,
        "nan_count": 0,
        "inf_count": 0,
        "mean": x.mean(),
        "std": x.std(),
        "skewness": scipy.stats.skew(x),
        "kurtosis": scipy.stats.kurtosis(x),
        "min": x.min(),
        "max": x.max(),
        "abs_mean": np.abs(x).mean(),
        "l2": np.linalg.norm(x),
        "zero_fraction": (x == 0).mean(),
    }
    for name, value in expected.items():
        if x.min() == x.max() and name in ("skewness", "kurtosis"):
            assert found[name] is None
            continue
        scale = max(1.0, abs(value)) if name in ("skewness", "kurtosis") else max(abs(value), x.std(), 1e-300)
        assert found[name] == pytest.approx(value, abs=2e-5 * scale), name
    assert found["status"] is None


def test_one_step_by_hand(record: Record) -> None:
    torch.manual_seed(3)
    model = Small()
    x, target = torch.randn(32, 8), torch.randint(0, 3, (32,))
    with torch.no_grad():
        first = model.first(x)
        relu = first.clamp(min=0)
        second = model.second(relu)
    run = record(model, name="by hand")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    loss = nn.functional.cross_entropy(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    run.step(loss=loss)
    run.finish()

    a = (x @ before["first.weight"].T + before["first.bias"]).requires_grad_()
    b = a.relu()
    c = b @ before["second.weight"].T + before["second.bias"]
    by_hand = nn.functional.cross_entropy(c, target)
    grad_a, grad_b, grad_c = torch.autograd.grad(by_hand, (a, b, c))

    data = statsbridge.load(run.path)
    for module, value in {"first": first, "relu": relu, "dropout": relu, "second": second, "": second}.items():
        check(row(data, module=module, site="activation"), value)
    for module, value in {"first": grad_a, "relu": grad_b, "second": grad_c, "": grad_c}.items():
        check(row(data, module=module, site="activation_grad"), value)
    for name, parameter in model.named_parameters():
        module, tensor = name.rsplit(".", 1)
        about = {"module": module, "tensor": tensor}
        check(row(data, site="parameter", **about), before[name])
        check(row(data, site="parameter_grad", **about), gradients[name])
        update = row(data, site="update", **about)
        check(update, parameter.detach() - before[name])
        ratio = torch.linalg.norm(parameter.detach() - before[name]) / torch.linalg.norm(before[name])
        assert update["update_ratio"] == pytest.approx(ratio.item(), rel=1e-5)

    flat = torch.cat([p.detach().ravel() for p in model.parameters()]).double()
    flat_before = torch.cat([p.ravel() for p in before.values()]).double()
    flat_gradient = torch.cat([g.ravel() for g in gradients.values()]).double()
    for name, value in {
        "loss": by_hand.double(),
        "param_norm": flat.norm(),
        "update_ratio": (flat - flat_before).norm() / flat_before.norm(),
        "grad_norm": flat_gradient.norm(),
        "grad_norm_applied": flat_gradient.norm(),
        "lr/0": torch.tensor(0.1),
    }.items():
        assert scalars(data.scalars, name)[0] == pytest.approx(value.item(), rel=1e-5), name
    assert scalars(data.scalars, "step_time")[0] > 0


def test_micro_batches_merge_into_the_statistics_of_the_whole(record: Record) -> None:
    torch.manual_seed(1)
    model = Small()
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(size, 8) * 3 + shift for size, shift in ((5, 0.0), (17, 4.0), (2, -8.0))]
    outputs, gradients = [], []
    for batch in batches:
        output = model(batch)
        outputs.append(output.detach().clone())
        output.register_hook(lambda gradient: gradients.append(gradient.clone()))
        output.pow(2).mean().backward()
    optimizer.step()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    check(row(data, module="second", site="activation"), torch.cat(outputs))
    check(row(data, module="second", site="activation_grad"), torch.cat(gradients))
    assert {r["step"] for r in rows(data)} == {0}


def test_gradients_are_those_the_optimizer_sees(record: Record) -> None:
    """Clipped for the rows and `grad_norm_applied`; unclipped where the user passes what clipping returned."""
    model = Small()
    run = record(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 8)).pow(2).sum().mul(100).backward()
    before = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    clipped = model.first.weight.grad
    assert clipped is not None
    clipped = clipped.clone()
    optimizer.step()
    run.step(grad_norm=before)
    run.finish()
    data = statsbridge.load(run.path)
    assert scalars(data.scalars, "grad_norm")[0] == pytest.approx(before.item(), rel=1e-6)
    assert scalars(data.scalars, "grad_norm_applied")[0] == pytest.approx(0.5, rel=1e-4)
    check(row(data, module="first", site="parameter_grad", tensor="weight"), clipped)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("sites", [None, ["activation"], ["parameter_grad"]])
def test_the_norm_of_large_gradients_on_every_step(record: Record, every: int, sites: list[str] | None) -> None:
    """On a sampled step from what was measured, on the others by itself; NaN and Inf are told."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(90, 80), nn.Linear(80, 2000), nn.Linear(2000, 3, bias=False))
    run = record(model, every=every, **({} if sites is None else {"sites": sites}))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    expected = []
    for number in range(6):
        optimizer.zero_grad()
        model(torch.randn(16, 90)).pow(2).mean().backward()
        if number > 3:
            gradient = model[1].weight.grad
            assert gradient is not None
            gradient[3, 5] = [math.nan, math.inf][number - 4]
        expected.append(np.linalg.norm(torch.cat([p.grad.ravel() for p in model.parameters()]).double().numpy()))
        optimizer.step()
        run.step()
        with torch.no_grad():  # what is not finite is not to spread
            model[1].weight.nan_to_num_(nan=0.1, posinf=0.1, neginf=0.1)
    run.finish()
    found = scalars(statsbridge.load(run.path).scalars, "grad_norm_applied")
    assert list(found.values()) == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_gradients_and_outputs_of_enormous_numbers_cost_no_row(record: Record) -> None:
    """Squares that overflow are no NaN in the norm, and one tensor beyond float32 does not take its step along."""
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).double()
    run = record(model, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for scale in (1.0, 1e100, 1e200):
        optimizer.zero_grad()
        model(torch.randn(64, 100).double() * scale).mean().backward()
        gradient = model[0].weight.grad
        assert gradient is not None
        gradient.fill_(1e25)
        optimizer.step()
        run.step()
    run.finish()
    data = statsbridge.load(run.path)
    found = rows(data)
    assert len(found) == 3 * 18
    assert {one["status"] for one in found} == {None}
    assert all(one["std"] is not None for one in found)
    assert scalars(data.scalars, "grad_norm_applied")[0] == pytest.approx(1e27, rel=1e-6)


def test_an_enormous_gradient_that_is_all_alike_has_a_norm(record: Record) -> None:
    model = nn.Linear(100, 100, bias=False)
    run = record(model, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.randn(4, 100)).mean().backward()
    model.weight.grad = torch.full((100, 100), 1e37)
    optimizer.step()
    run.step()
    run.finish()
    assert scalars(statsbridge.load(run.path).scalars, "grad_norm_applied")[0] == pytest.approx(1e39, rel=1e-6)


def test_two_backwards_through_one_graph_have_no_numbers(record: Record) -> None:
    model = Small()
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = model(torch.randn(4, 8))
    output.sum().backward(retain_graph=True)
    output.pow(2).sum().backward()
    optimizer.step()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    found = row(data, module="first", site="activation_grad")
    assert (found["status"], found["count"], found["mean"]) == ("several_backwards", 0, None)
    assert row(data, module="first", site="activation")["status"] is None
    assert row(data, module="first", site="parameter_grad", tensor="weight")["status"] is None


def test_lbfgs_gradients_are_the_last_evaluations(record: Record) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    run = record(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    evaluated: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        assert model.weight.grad is not None
        evaluated.append(model.weight.grad.clone())
        return loss

    before = model.weight.detach().clone()
    run.step(loss=optimizer.step(closure))
    run.finish()
    data = statsbridge.load(run.path)
    assert len(evaluated) > 1
    check(row(data, site="parameter_grad", tensor="weight"), evaluated[-1])
    check(row(data, site="update", tensor="weight"), model.weight.detach() - before)
    check(row(data, site="parameter", tensor="weight"), before)


def test_several_optimizer_steps_in_one_step(record: Record) -> None:
    """The update spans them all, the gradient is the last one's, the parameter is from before the first."""
    model = nn.Linear(4, 2)
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    before = model.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    gradient = model.weight.grad
    assert gradient is not None
    check(row(data, site="parameter", tensor="weight"), before)
    check(row(data, site="update", tensor="weight"), model.weight.detach() - before)
    check(row(data, site="parameter_grad", tensor="weight"), gradient)
    assert row(data, site="activation", module="")["count"] == 3 * 8 * 2


def test_a_loop_without_an_optimizer(record: Record) -> None:
    model = nn.Linear(4, 2)
    run = record(model)
    model(torch.randn(8, 4)).pow(2).mean().backward()
    gradient = model.weight.grad
    assert gradient is not None
    gradient = gradient.clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    check(row(data, site="parameter", tensor="weight"), model.weight)
    check(row(data, site="parameter_grad", tensor="weight"), gradient)
    assert rows(data, site="update") == []
    assert math.isclose(
        scalars(data.scalars, "param_norm")[0],
        torch.cat([p.detach().ravel() for p in model.parameters()]).norm().item(),
        rel_tol=1e-6,
    )


def test_frozen_and_unused_parameters(record: Record) -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4), "frozen": nn.Linear(4, 4)})
    model["frozen"].requires_grad_(False)
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model["used"](model["frozen"](torch.randn(3, 4))).sum().backward()
    optimizer.step()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    assert row(data, module="unused", site="parameter_grad", tensor="weight")["status"] == "no_grad"
    assert row(data, module="unused", site="activation")["status"] == "not_called"
    assert rows(data, module="frozen", site="parameter_grad") == []
    assert row(data, module="frozen", site="activation_grad")["status"] == "no_grad"
    assert row(data, module="frozen", site="parameter", tensor="weight")["l2"] > 0


def test_hand_logged_tensors_and_their_gradients(record: Record) -> None:
    model = nn.Linear(4, 2)
    run = record(model, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        hidden = model(torch.randn(8, 4))
        kept = hidden.detach().clone()
        run.log_tensor("hidden", hidden, grad=True)
        run.log_tensor("labels", torch.tensor([1, 2, 3]))
        hidden.pow(2).sum().backward()
        optimizer.step()
        run.step()
        if _ == 0:
            first = kept
    run.finish()
    data = statsbridge.load(run.path)
    check(row(data, site="tensor", tensor="hidden"), first)
    check(row(data, site="tensor_grad", tensor="hidden"), 2 * first)
    labels = row(data, site="tensor", tensor="labels")
    assert (labels["count"], labels["status"], labels["mean"], labels["module"]) == (3, "integer", None, "")


def test_histograms_where_asked_for(record: Record) -> None:
    model = nn.Linear(4, 2)
    run = record(model, histograms=True)
    model(torch.randn(100, 4)).sum().backward()
    run.step()
    run.finish()
    for found in rows(statsbridge.load(run.path)):
        if found["status"] is None:
            assert len(found["histogram"]) == 197
            assert sum(found["histogram"]) == found["count"]
        else:
            assert found["histogram"] is None


def test_optimizer_state_where_asked_for(record: Record) -> None:
    model = nn.Linear(4, 2)
    run = record(model, sites=["optimizer_state", "update"])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(10, 4)).pow(2).sum().backward()
    optimizer.step()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    check(row(data, site="optimizer_state", tensor="weight.exp_avg"), optimizer.state[model.weight]["exp_avg"])
    assert {r["site"] for r in rows(data)} == {"optimizer_state", "update"}
    assert all(r["update_ratio"] > 0 for r in rows(data, site="update"))


def test_many_micro_batches_are_handed_over_early_and_merge_all_the_same(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "PENDING_BYTES", 5_000)
    model = Small()
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    early = 0
    for number in range(20):
        output = model(torch.randn(32, 8) + number)
        outputs.append(output.detach().clone())
        output.sum().backward()
        early = max(early, run._collector._handed_over)
    gradient = model.first.weight.grad
    assert gradient is not None
    gradient = gradient.clone()
    optimizer.step()
    run.step()
    run.finish()
    assert early > 10_000, "nothing was handed over before the step ended"
    data = statsbridge.load(run.path)
    check(row(data, module="second", site="activation"), torch.cat(outputs))
    check(row(data, module="first", site="parameter_grad", tensor="weight"), gradient)
    assert run._collector._handed_over == run._collector._worked_off

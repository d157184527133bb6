"""Trainings through `torch.func`, beside the same trainings without it; and parameters that are exchanged in place."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from recording import Small, events, row, rows, scalars
from torch import nn
from torch.func import functional_call, grad_and_value, hessian, jvp, vmap
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations, stateless

import statsbridge

Record = Callable[..., statsbridge.Run]
Tensors = dict[str, torch.Tensor]

STATISTICS = ("count", "mean", "std", "min", "max", "l2", "update_ratio")


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 3, generator=generator)


def own(model: nn.Module) -> Tensors:
    return dict(model.named_parameters())


def detached(model: nn.Module) -> Tensors:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def give(model: nn.Module, gradients: Tensors) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]


def backward(model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], step: int) -> None:
    x, y = batch(step)
    mse_loss(forward(x), y).backward()


def plainly(model: nn.Module, step: int) -> None:
    backward(model, model, step)


def with_its_own(model: nn.Module, step: int) -> None:
    backward(model, lambda x: functional_call(model, own(model), (x,)), step)


def with_results_of_its_own(model: nn.Module, step: int) -> None:
    used = {name: parameter * 1 for name, parameter in own(model).items()}
    backward(model, lambda x: functional_call(model, used, (x,)), step)


def stateless_call(model: nn.Module, step: int) -> None:
    used = {name: parameter * 1 for name, parameter in own(model).items()}
    call = stateless._functional_call  # without the warning that it is deprecated
    backward(model, lambda x: call(model, used, (x,)), step)


def with_other_parameters(model: nn.Module, step: int) -> None:
    used: Tensors = {name: nn.Parameter(tensor.clone()) for name, tensor in detached(model).items()}
    backward(model, lambda x: functional_call(model, used, (x,)), step)
    give(model, {name: parameter.grad for name, parameter in used.items() if parameter.grad is not None})


def by_grad(model: nn.Module, step: int) -> None:
    x, y = batch(step)
    give(model, grad_and_value(lambda used: mse_loss(functional_call(model, used, (x,)), y))(detached(model))[0])


def by_grad_of_its_own(model: nn.Module, step: int) -> None:
    x, y = batch(step)
    found = grad_and_value(lambda used: mse_loss(functional_call(model, used, (x,)), y))(own(model))[0]
    give(model, {name: gradient.detach() for name, gradient in found.items()})


def by_sample(model: nn.Module, step: int) -> None:
    def loss(used: Tensors, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(functional_call(model, used, (x[None],)), y[None])

    each = vmap(grad_and_value(loss), (None, 0, 0))(detached(model), *batch(step))[0]
    give(model, {name: gradients.mean(0) for name, gradients in each.items()})


OUTSIDE = (with_its_own, with_results_of_its_own, stateless_call, with_other_parameters)
TRANSFORMED = (by_grad, by_grad_of_its_own, by_sample)


def tied(model: nn.Module) -> None:
    model.register_parameter("again", model.get_parameter("second.weight"))


CHANGES: dict[str, Callable[[Small], Any]] = {
    "plain": lambda model: None,
    "tied": tied,
    "weight_norm": lambda model: parametrizations.weight_norm(model.first),
    "spectral_norm": lambda model: parametrizations.spectral_norm(model.first),
}


def train(
    record: Record,
    learn: Callable[[nn.Module, int], Any],
    change: Callable[[Small], Any] = lambda model: None,
    *,
    between: Callable[[nn.Module, int], Any] = lambda model, step: None,
    steps: int = 8,
) -> statsbridge.RunData:
    """A training by Adam in which `learn` puts the gradients into the model."""
    torch.manual_seed(0)
    model = Small()
    change(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = record(model, every=2, alerts=False)
    for step in range(steps):
        optimizer.zero_grad()
        learn(model, step)
        optimizer.step()
        between(model, step)
        run.step()
    run.finish()
    return statsbridge.load(run.path)


def check_equal(found: statsbridge.RunData, wanted: statsbridge.RunData, sites: tuple[str, ...]) -> None:
    """The rows of these sites say the same, and so do the scalars but for times."""
    place = ("step", "module", "call", "order", "depth", "site", "tensor", "status")
    ours, theirs = (
        {tuple(r[name] for name in place): r for r in data.stats.to_pylist() if r["site"] in sites}
        for data in (found, wanted)
    )
    assert ours.keys() == theirs.keys()
    for key, r in theirs.items():
        known = {name: r[name] for name in STATISTICS if r[name] is not None}
        assert {name: ours[key][name] for name in STATISTICS if ours[key][name] is not None} == pytest.approx(
            known, 2e-3, 1e-5
        )
    for name in ("grad_norm", "grad_norm_applied", "param_norm", "update_ratio", "lr/0"):
        assert scalars(found.scalars, name) == pytest.approx(scalars(wanted.scalars, name), 1e-3), name
    assert scalars(found.scalars, "grad_norm").keys() == set(range(8))
    assert not found.events.num_rows


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("learn", OUTSIDE)
def test_functional_calls(learn: Any, change: str, record: Record) -> None:
    found, wanted = train(record, learn, CHANGES[change]), train(record, plainly, CHANGES[change])
    check_equal(found, wanted, ("activation", "activation_grad", "parameter", "parameter_grad", "update"))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("learn", TRANSFORMED)
def test_transforms(learn: Any, change: str, record: Record) -> None:
    if change == "spectral_norm" and learn is by_sample:
        pytest.skip("torch: its power iteration changes buffers in place, which vmap refuses")
    found, wanted = train(record, learn, CHANGES[change]), train(record, plainly, CHANGES[change])
    check_equal(found, wanted, ("parameter", "parameter_grad", "update"))
    inside = [r for r in found.stats.to_pylist() if r["site"].startswith("activation")]
    assert {(r["site"], r["status"]) for r in inside} == {("activation", "unsupported"), ("activation_grad", "no_grad")}
    assert all(r["mean"] is None and r["depth"] is not None for r in inside)


def test_an_inner_loop_whose_result_the_outer_optimizer_learns_from(record: Record) -> None:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(model, every=1, alerts=False)
    gradients = {}
    for step in range(4):
        used = own(model)
        for inner in range(2):
            x, y = batch(10 * step + inner)
            loss = mse_loss(functional_call(model, used, (x,)), y)
            found = torch.autograd.grad(loss, list(used.values()), create_graph=True)
            used = {name: tensor - 0.1 * g for (name, tensor), g in zip(used.items(), found, strict=True)}
        x, y = batch(10 * step + 9)
        optimizer.zero_grad()
        mse_loss(functional_call(model, used, (x,)), y).backward()
        gradients[step] = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        run.step()
    run.finish()
    data = statsbridge.load(run.path)
    for step, norms in gradients.items():
        for name, norm in norms.items():
            module, _, tensor = name.rpartition(".")
            place = {"step": step, "module": module, "tensor": tensor}
            assert row(data, site="parameter_grad", **place)["l2"] == pytest.approx(norm, 1e-5)
            assert row(data, site="update", **place)["l2"] == pytest.approx(0.1 * norm, 1e-4)
    assert not data.events.num_rows


def test_an_ensemble_of_models(record: Record) -> None:
    torch.manual_seed(0)
    models = nn.ModuleList([Small(), Small()])
    optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
    run = record(models, every=1, alerts=False)
    for step in range(3):
        x, y = batch(step)
        stacked = {name: torch.stack([own(model)[name] for model in models]) for name in own(models[0])}
        output = vmap(lambda used, x: functional_call(models[0], used, (x,)), (0, None))(stacked, x)
        optimizer.zero_grad()
        mse_loss(output, y.expand_as(output)).backward()
        optimizer.step()
        run.step()
    run.finish()
    data = statsbridge.load(run.path)
    for site in ("parameter", "parameter_grad", "update"):
        found = rows(data, site=site)
        assert len(found) == 3 * 8
        assert all(r["l2"] > 0 and r["status"] is None for r in found)


def test_derivatives_taken_before_the_step(record: Record) -> None:
    def learn(model: nn.Module, step: int) -> None:
        x, y = batch(step)
        used = detached(model)

        def loss(used: Tensors) -> torch.Tensor:
            return mse_loss(functional_call(model, used, (x,)), y)

        jvp(loss, (used,), (used,))
        hessian(lambda bias: loss({**used, "second.bias": bias}))(used["second.bias"])
        plainly(model, step)

    check_equal(train(record, learn), train(record, plainly), ("parameter", "parameter_grad", "update"))


def train_elsewhere(run: statsbridge.Run, model: nn.Module, into: str) -> None:
    used: Tensors = {name: nn.Parameter(tensor.clone()) for name, tensor in detached(model).items()}
    optimizer = torch.optim.SGD(used.values(), lr=0.1)
    for step in range(12):
        x, y = batch(step)
        optimizer.zero_grad()
        if into == "an optimizer of their own":
            mse_loss(functional_call(model, used, (x,)), y).backward()
            optimizer.step()
        else:
            used = detached(model) if "model" in into else {name: tensor.detach() for name, tensor in used.items()}
            found, _ = grad_and_value(lambda used: mse_loss(functional_call(model, used, (x,)), y))(used)  # noqa: B023
            used = {name: tensor - 0.1 * found[name] for name, tensor in used.items()}
            if "model" in into:
                model.load_state_dict(used)
        run.step()
    run.finish()


@pytest.mark.parametrize("into", ["an optimizer of their own", "by hand", "by hand into the model"])
def test_parameters_that_are_trained_elsewhere_are_told(into: str, record: Record) -> None:
    model = Small()
    run = record(model, every=2, alerts=False)
    with pytest.warns(statsbridge.StatsBridgeWarning, match="use other tensors in the place of the model's parameters"):
        train_elsewhere(run, model, into)
    data = statsbridge.load(run.path)
    assert [event["step"] for event in events(data, "parameters_bypassed")] == [4], "in the third sampled step, once"
    norms = [r["l2"] for r in rows(data, site="parameter", module="first", tensor="weight")]
    assert len(norms) == 6
    assert len(set(norms)) == (6 if "model" in into else 1)


def test_parameters_that_are_really_replaced_are_still_noticed(record: Record) -> None:
    def replace(model: nn.Module, step: int) -> None:
        if step == 3:
            model.load_state_dict({name: tensor.clone() for name, tensor in detached(model).items()}, assign=True)

    data = train(record, with_results_of_its_own, between=replace)
    told = [(event["step"], event["module"], event["tensor"]) for event in events(data, "parameter_replaced")]
    assert told == [(4, "first", "weight"), (4, "first", "bias"), (4, "second", "weight"), (4, "second", "bias")]
    # Rows are of the ones that the model holds, with the gradients that they have.
    late = rows(data, step=6, site="parameter_grad")
    assert len(late) == 4
    assert all(r["l2"] > 0 for r in late)
    assert not rows(data, step=6, site="update")


def test_parameters_without_optimizer_that_functional_calls_use_are_not_replaced(record: Record) -> None:
    torch.manual_seed(0)
    models = {"learned": Small(), "by_hand": Small()}
    optimizer = torch.optim.SGD(models["learned"].parameters(), lr=0.1)
    run = record(models, every=1, alerts=False)
    for step in range(8):
        x, y = batch(step)
        optimizer.zero_grad()
        models["by_hand"].zero_grad()
        used = {name: parameter * 1 for name, parameter in own(models["by_hand"]).items()}
        loss = mse_loss(functional_call(models["by_hand"], used, (x,)), y)
        loss.backward()
        with torch.no_grad():
            for parameter in models["by_hand"].parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
        mse_loss(models["learned"](x), y).backward()
        optimizer.step()
        run.step()
    run.finish()
    told = {event["kind"] for event in statsbridge.load(run.path).events.to_pylist()}
    assert told <= {"no_optimizer"}


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_parameters_swapped_in_place(swapping: None, record: Record) -> None:
    """torch.utils.swap_tensors refuses tensors that have a weak reference: the training would end."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(model, every=1, alerts=False)
    norms = []
    for step in range(6):
        x, y = (tensor.to(model.first.weight.dtype) for tensor in batch(step))
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        before = model.first.weight.detach().clone()
        optimizer.step()
        norms.append((model.first.weight.detach() - before).norm().item())
        if step == 1:  # before the step is closed
            optimizer.zero_grad()
            model.to(torch.float64)
        run.step()
        if step == 3:  # inside the next one
            optimizer.zero_grad()
            model.load_state_dict({name: tensor.clone() for name, tensor in detached(model).items()})
    run.finish()
    data = statsbridge.load(run.path)
    assert not data.events.num_rows
    assert scalars(data.scalars, "grad_norm").keys() == set(range(6))
    assert len(rows(data, site="update")) == len(rows(data, site="parameter_grad")) == 6 * 4
    updates = [r["l2"] for r in rows(data, site="update", module="first", tensor="weight")]
    assert updates == pytest.approx(norms, 1e-4)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_dtensors_that_are_cast_after_init(process_group: None, record: Record) -> None:
    """Module.to swaps DTensors in place, whatever was asked for."""
    torch.manual_seed(0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model = Small()
    dist.tensor.distribute_module(model, mesh)
    run = record(model, every=1, alerts=False)
    model.to(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = batch(step)[0].to(model.first.weight.dtype)
        optimizer.zero_grad()
        model(dist.tensor.distribute_tensor(x, mesh)).pow(2).mean().backward()
        optimizer.step()
        run.step()
        if step == 2:
            optimizer.zero_grad()
            model.to(torch.float32)
    run.finish()
    data = statsbridge.load(run.path)
    assert not data.events.num_rows
    assert scalars(data.scalars, "grad_norm").keys() == set(range(4))
    for site in ("parameter", "parameter_grad", "update"):
        found = rows(data, site=site)
        assert len(found) == 4 * 4
        assert all(r["l2"] > 0 for r in found)


def test_nothing_of_a_parameter_is_kept_alive(record: Record) -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(model, every=1, alerts=False)
    mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    copies = run._collector._parameters._copies
    assert len(copies._copies) == 2
    alive = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, optimizer
    gc.collect()
    assert not any(reference() is not None for reference in alive)
    assert not len(copies._copies)
    run.finish()

"""Every kind of model: the recorded numbers against taps on a second model, and training the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_cases import CASES, Case, Leaf, leaves
from recording import events, rows, scalars
from tap_oracle import Taps, check_numbers, expected_rows, tap
from torch import nn

import statsbridge

Record = Callable[..., statsbridge.Run]
STEPS = 3


def step(model: nn.Module, case: Case, seed: int) -> torch.Tensor:
    """Forward and backward of one training step."""
    torch.manual_seed(seed)
    output = model(*case.inputs(), **case.keywords())
    loss = torch.stack([(leaf.double() * (1 + n)).pow(2).mean() for n, leaf in enumerate(leaves(output))]).sum()
    model.zero_grad()
    loss.backward()
    return loss.detach()


Numbers = dict[str, tuple[torch.Tensor, torch.Tensor | None]]


def train(
    model: nn.Module, case: Case, run: statsbridge.Run | None, taps: list[Taps] | None = None
) -> tuple[list[torch.Tensor], list[Numbers]]:
    """Losses, and by name each step's parameters and their gradients; with `taps`, what every module put out."""
    losses: list[torch.Tensor] = []
    parameters: list[Numbers] = []
    now = None if taps is None else tap(model)
    optimizer: torch.optim.Optimizer | None = None
    for number in range(STEPS):
        losses.append(step(model, case, number))
        if optimizer is None:  # the parameters of a lazy model are there by now
            optimizer = case.optimizer(model.parameters(), lr=0.01)
        parameters.append(
            {
                name: (p.detach().clone(), None if p.grad is None else p.grad.clone())
                for name, p in model.named_parameters()
            }
        )
        optimizer.step()
        if taps is not None and now is not None:
            taps.append(dict(now))
            now.clear()
        if run is not None:
            run.step(loss=losses[-1])
    return losses, parameters


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(11)
    return make()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*[Ll]azy.*:UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "GPT-2" else []) for name in CASES]
)
def test_every_number_is_that_of_the_oracle(name: str, record: Record) -> None:
    case = CASES[name]
    plain = made(case.make)
    plain_losses, _ = train(plain, case, None)
    model = made(case.make)
    run = record(model)
    losses, _ = train(model, case, run)
    run.finish()
    taps: list[Taps] = []
    _, parameters = train(made(case.oracle or case.make), case, None, taps)

    assert all(same(a, b) for a, b in zip(losses, plain_losses, strict=True))
    for key, value in plain.state_dict().items():
        assert not isinstance(value, torch.Tensor) or same(value, model.state_dict()[key]), key

    data = statsbridge.load(run.path)
    assert events(data, "internal_error") == []
    for number in range(STEPS):
        found = {(r["module"], r["call"], r["tensor"], r["site"]): r for r in rows(data, step=number)}
        check_activations(found, taps[number], case)
        check_parameters(found, parameters[number])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def check_activations(found: dict[tuple[Any, ...], dict[str, Any]], taps: Taps, case: Case) -> None:
    seen = set()
    for module, call, path, site, tensors in expected_rows(taps):
        status = case.without.get((module, site, path))
        if case.without.get((module, "activation", path)) == "not_called":
            continue
        if site == "activation_grad" and not tensors and status is None:
            status = "no_grad"
        seen.add((module, call, path, site))
        row = found[module, call, path, site]
        if status is None:
            check_numbers(row, tensors)
        else:
            assert (row["status"], row["mean"]) == (status, None), row
    for key, row in found.items():
        if key[3] in ("activation", "activation_grad") and key not in seen:
            assert (row["status"], row["mean"]) == ("not_called", None), row


def check_parameters(found: dict[tuple[Any, ...], dict[str, Any]], expected: Numbers) -> None:
    checked = 0
    for (module, call, tensor, site), row in found.items():
        if site in ("parameter", "parameter_grad"):
            before, gradient = expected[f"{module}.{tensor}" if module else tensor]
            value = before if site == "parameter" else gradient
            if value is None:
                assert row["status"] == "no_grad"
            else:
                check_numbers(row, [value])
            assert call == 0
            checked += site == "parameter"
    assert checked == len(expected)


def test_the_table_has_each_status_that_a_module_output_can_have() -> None:
    statuses = {status for case in CASES.values() for status in case.without.values()}
    assert statuses == {"view_modified", "no_grad", "integer", "complex", "empty", "meta", "not_called", "unsupported"}


def simple_step(run: statsbridge.Run, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
    run.step()


def test_a_tensor_that_is_changed_where_another_module_looks_at_it(record: Record) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.rest, self.b = nn.Linear(6, 6), Leaf(lambda x: x[1:]), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            rest = self.rest(y)
            y[:, 0] = 0.0
            return self.b(rest)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Model()
    x = torch.randn(5, 6)
    run = record(model)
    model(x).pow(2).sum().backward()
    run.step()
    run.finish()
    y = model.a(x).detach().requires_grad_()
    mask = torch.ones(5, 6)
    mask[0], mask[:, 0] = 0.0, 0.0
    (expected,) = torch.autograd.grad(model.b((y * mask)[1:]).pow(2).sum(), y)
    data = statsbridge.load(run.path)
    (found,) = rows(data, module="a", site="activation_grad")
    check_numbers(found, [expected])
    (found,) = rows(data, module="rest", site="activation")
    check_numbers(found, [y[1:]])
    (found,) = rows(data, module="rest", site="activation_grad")
    assert (found["status"], found["mean"]) == ("view_modified", None)


def test_outputs_that_the_model_goes_on_using(record: Record) -> None:
    """The gradient of a tensor that was put out is that of the tensor, with what the module itself made of it."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(6, 6)
            self.head = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            hidden = [self.cell(x, (x, x))]
            hidden.append(self.cell(x, hidden[-1]))
            return {"last": self.head(hidden[-1][0]), "hidden": tuple(hidden)}

    def loss(output: dict[str, Any]) -> torch.Tensor:
        return output["last"].pow(2).sum() + sum(h.pow(3).sum() + c.exp().sum() for h, c in output["hidden"])

    torch.manual_seed(0)
    model = Stack()
    x = torch.randn(4, 6)
    run = record(model)
    loss(model(x)).backward()
    run.step()
    run.finish()
    output = model(x)
    states = [tensor for pair in output["hidden"] for tensor in pair]
    gradients = torch.autograd.grad(loss(output), states)
    data = statsbridge.load(run.path)
    for n, gradient in enumerate(gradients):
        for about in (
            {"module": "cell", "call": n // 2, "tensor": str(n % 2)},
            {"module": "", "call": 0, "tensor": f"hidden.{n // 2}.{n % 2}"},
        ):
            (found,) = rows(data, site="activation_grad", **about)
            check_numbers(found, [gradient])


def test_parameters_frozen_and_unfrozen_and_frozen_again(record: Record) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected: list[dict[str, torch.Tensor]] = []
    for frozen in (True, False, True):
        model[0].requires_grad_(not frozen)
        before = model[0].weight.detach().clone()
        simple_step(run, model, optimizer, torch.randn(4, 6))
        gradient = model[0].weight.grad
        expected.append({"parameter": before})
        if not frozen:
            assert gradient is not None
            expected[-1] |= {"parameter_grad": gradient.clone(), "update": model[0].weight.detach() - before}
    run.finish()
    data = statsbridge.load(run.path)
    for number, sites in enumerate(expected):
        found = {r["site"]: r for r in rows(data, step=number, module="0", tensor="weight")}
        assert found.keys() == sites.keys()
        for site, value in sites.items():
            check_numbers(found[site], [value])
    assert [r["status"] for r in rows(data, module="0", site="activation_grad")] == ["no_grad", None, "no_grad"]


def test_modules_and_parameters_that_come_later(record: Record) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    simple_step(run, model, optimizer, torch.randn(4, 6))
    model.append(nn.Linear(6, 2))
    model[0].register_parameter("extra", nn.Parameter(torch.randn(3)))
    model[1] = nn.Linear(6, 6)  # another module in an old place
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    simple_step(run, model, optimizer, torch.randn(4, 6))
    optimizer_state = {name: p.detach().clone() for name, p in model.named_parameters()}
    simple_step(run, model, optimizer, torch.randn(4, 6))
    run.finish()
    data = statsbridge.load(run.path)
    found = {f"{r['module']}.{r['tensor']}": r for r in rows(data, step=2, site="parameter")}
    assert found.keys() == optimizer_state.keys()
    for name, value in optimizer_state.items():
        check_numbers(found[name], [value])
    assert [r["count"] for r in rows(data, module="2", site="activation")] == [8, 8]
    (extra,) = rows(data, step=2, module="0", tensor="extra", site="parameter_grad")
    assert extra["status"] == "no_grad"
    assert scalars(data.scalars, "lr/0") == {0: 0.1, 1: 0.1, 2: 0.1}


@pytest.mark.parametrize("overwrite", [False, True], ids=["in place", "new parameters"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_is_cast_after_init(dtype: torch.dtype, overwrite: bool, record: Record) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    simple_step(run, model, optimizer, torch.randn(4, 6))
    before_swap = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
    try:
        model.to(dtype)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before_swap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        before = model[0].weight.detach().clone()
        with torch.no_grad():
            output = model[0](torch.ones(2, 6, dtype=dtype))
        simple_step(run, model, optimizer, torch.ones(2, 6, dtype=dtype))
    run.finish()
    data = statsbridge.load(run.path)
    (found,) = rows(data, step=2, module="0", site="activation")
    check_numbers(found, [output])
    (found,) = rows(data, step=2, module="0", site="parameter", tensor="weight")
    check_numbers(found, [before])
    (found,) = rows(data, step=2, module="0", site="update", tensor="weight")
    check_numbers(found, [model[0].weight.detach().double() - before.double()])

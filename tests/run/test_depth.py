"""Depth on real models: `statsbridge.trace` and a recorded run against the oracle, and torch.fx wherever it works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from collect.models import ADVERSARIAL_DEPTH
from depth_models import BY_HAND, POISONED, Experts, Model
from depth_oracle import poisoned_depths, table_depths, tensors
from joins import check_joins
from model_cases import CASES, Chain, Leaf
from torch import nn

import statsbridge
from statsbridge import ConfigError
from statsbridge.collect.fx_order import fx_order
from statsbridge.collect.modules import ModuleIndex

Record = Callable[..., statsbridge.Run]
pytestmark = pytest.mark.usefixtures("one_thread")


def made(case: Model) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(5)
    return case.make(), case.inputs()


@pytest.mark.parametrize("name", POISONED)
def test_depth_is_that_of_the_oracle(name: str, record: Record) -> None:
    case = POISONED[name]
    model, inputs = made(case)
    expected = poisoned_depths(model, *inputs, **case.keywords)
    assert max(expected.values()) > 5
    found = table_depths(statsbridge.trace(model, *inputs, **case.keywords))
    assert found == expected
    assert list(found) == list(expected), "the order is that in which outputs were ready"
    run = record(model)
    output = model(*inputs, **case.keywords)
    torch.stack([t.square().mean() for t in tensors(output) if t.is_floating_point()]).sum().backward()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    check_joins(data)
    assert table_depths(data.modules) == expected


def test_a_mixture_of_experts_with_routing() -> None:
    model, inputs = made(BY_HAND["experts"])
    found = table_depths(statsbridge.trace(model, *inputs))
    used = {name for name, _ in found if name.startswith("experts.") and name.count(".") == 1}
    assert used, "no expert was chosen"
    inner = {(f"{name}.{n}", 0): 3 + n for name in used for n in range(3)}  # the router has chosen their tokens
    assert found == {
        ("norm", 0): 1,
        ("router", 0): 2,
        **inner,
        **{(name, 0): 5 for name in used},
        ("head", 0): 6,
        ("", 0): 6,
    }


def test_an_expert_that_gets_no_token_is_not_called() -> None:
    model = Experts()
    with torch.no_grad():
        model.router.weight.zero_()
        model.router.bias.copy_(torch.tensor([0.0, 9.0, 8.0, -9.0]))
    table = statsbridge.trace(model, torch.randn(2, 5, 6))
    called = {m["module"]: m["order"] is not None for m in table.to_pylist()}
    assert [called[f"experts.{n}"] for n in range(4)] == [False, True, True, False]
    assert called["experts.3.0"] is False


def test_everything_that_has_misled_a_tracer_by_hand() -> None:
    model, inputs = made(BY_HAND["everything at once"])
    assert table_depths(statsbridge.trace(model, *inputs)) == ADVERSARIAL_DEPTH


def test_what_we_do_to_a_view_is_no_operation_of_the_model(record: Record) -> None:
    """Found by the fuzz: watching a view of the base that its sibling reads made the sibling one deeper."""
    model = Chain(
        lambda m, x: m.end(m.cut(y := m.start(x))) + m.end(m.beside(y)),
        start=nn.Linear(4, 4),
        cut=Leaf(lambda y: y.view(-1).view(y.shape)),
        beside=nn.Tanh(),
        end=nn.Linear(4, 4),
    )
    run = record(model)
    model(torch.randn(3, 4)).sum().backward()
    run.step()
    run.finish()
    found = table_depths(statsbridge.load(run.path).modules)
    assert found == {("start", 0): 1, ("cut", 0): 2, ("end", 0): 3, ("beside", 0): 2, ("end", 1): 3, ("", 0): 3}


class OneArgument(Chain):
    """A chain whose forward fx can trace: it cannot pass `*args` on."""

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return self.run(self, x)


def every_model() -> Iterator[tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]]:
    for name, model in (POISONED | BY_HAND).items():
        yield name, *made(model), model.keywords
    for name, case in CASES.items():
        if name != "lazy modules":  # they have no shape to be traced with
            torch.manual_seed(5)
            chain = case.make()
            inputs, keywords = case.inputs(), case.keywords()
            if isinstance(chain, Chain) and len(inputs) == 1:
                chain.__class__ = OneArgument
            yield name, chain, inputs, keywords


#: What torch.fx cannot trace: values decide, tensors are iterated or unpacked, arguments vary in number.
TOO_MUCH_FOR_FX = {name for name, case in (POISONED | BY_HAND).items() if not case.traceable} | {
    "a packed sequence",
    "inputs by keyword",
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_fx_and_the_running_model_agree_wherever_fx_can_trace() -> None:
    refused = set()
    for name, model, inputs, keywords in every_model():
        index = ModuleIndex(model)
        try:
            static = fx_order(model, index)
        except ConfigError:
            refused.add(name)
            continue
        running = table_depths(statsbridge.trace(model, *inputs, **keywords))
        running = {call: depth for call, depth in running.items() if ".parametrizations." not in call[0]}
        named = {(index.entries[module].name, call): depth for (module, call), (_, depth) in static.items()}
        assert list(named.items()) == list(running.items()), name
        assert [order for order, _ in static.values()] == list(range(len(static)))
    assert refused == TOO_MUCH_FOR_FX

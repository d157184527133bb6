"""After a test of the toolkit all is as it was before, to the bit: also where it fails half-way or is interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from debug_helpers import Everyday, bits, everything, in_use
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from statsbridge import ConfigError
from statsbridge.debug import (
    find_dead_units,
    gradient_check,
    initial_loss_check,
    learning_rate_range_test,
    overfit_one_batch,
    preserved,
)


def wreck(model: Everyday, optimizer: torch.optim.Optimizer) -> None:
    """Change all that can be changed."""
    model.eval()
    model.frozen.requires_grad_(True)
    model.first.weight.requires_grad_(False)
    nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 2, 0])).backward()
    model.norm.running_mean = torch.ones(16)
    model.last.weight = nn.Parameter(torch.zeros(3, 16))
    model.added = nn.Linear(2, 2)  # type: ignore[assignment]
    del model.norm.running_var
    optimizer.param_groups[0]["lr"] = 3.0
    optimizer.add_param_group({"params": [model.last.weight]})
    optimizer.state[model.first.weight]["exp_avg"].fill_(9)
    optimizer.state[model.first.weight]["more"] = 1
    optimizer.state[model.last.weight] = {}
    for parameter in model.parameters():
        parameter.data.fill_(7)
        parameter.grad = torch.ones_like(parameter)
    torch.rand(3), np.random.rand(3), random.random()


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_all_is_put_back_whatever_the_block_does(error: type[BaseException] | None) -> None:
    model, optimizer, _ = in_use()
    before = everything(model, optimizer)
    calls = model.calls
    if error is None:
        with preserved(model, optimizer):
            wreck(model, optimizer)
            assert everything(model, optimizer) != before
    else:
        with pytest.raises(error), preserved(model, optimizer):
            wreck(model, optimizer)
            raise error
    assert everything(model, optimizer) == before
    assert model.calls is calls
    assert model.calls == [12, 12]
    assert not hasattr(model, "added")


def test_gradients_are_away_inside_and_the_same_tensors_afterwards() -> None:
    model, optimizer, _ = in_use()
    held = {name: parameter.grad for name, parameter in model.named_parameters()}
    with preserved(model, optimizer):
        assert all(parameter.grad is None for parameter in model.parameters())
    assert held["last.weight"] is not None
    assert held["first.bias"] is None
    assert all(parameter.grad is held[name] for name, parameter in model.named_parameters())


def test_other_modules_generators_loaders_and_batches_are_put_back_too() -> None:
    model, _, batch = in_use()
    criterion = nn.BatchNorm1d(3)
    generator, numbers = torch.Generator().manual_seed(1), np.random.default_rng(1)
    loader = DataLoader(TensorDataset(*batch), 4, shuffle=True, generator=torch.Generator().manual_seed(2))

    def state() -> Any:
        found = [generator.get_state(), loader.generator.get_state(), *criterion.state_dict().values()]
        return [one.numpy().tobytes() for one in found], numbers.bit_generator.state, bits(batch)

    before = state()
    with preserved(model, also=[criterion, generator, numbers, loader, batch]):
        criterion(torch.randn(5, 3))
        torch.rand(2, generator=generator), numbers.random(), list(loader), batch[0].zero_()
        assert state() != before
    assert state() == before


def test_a_parameter_that_only_the_optimizer_holds_is_put_back() -> None:
    model, _, _ = in_use()
    alone = nn.Parameter(torch.ones(3))
    alone.grad = gradient = torch.full((3,), 2.0)
    optimizer = torch.optim.SGD([alone], lr=0.1, momentum=0.9)
    with preserved(model, optimizer):
        assert alone.grad is None
        alone.grad = torch.ones(3)
        optimizer.step()
        assert alone.tolist() != [1, 1, 1]
    assert alone.tolist() == [1, 1, 1]
    assert alone.grad is gradient
    assert not optimizer.state


def test_a_rate_that_is_a_tensor_and_a_scheduler_are_put_back() -> None:
    model, optimizer, _ = in_use(lambda parameters, lr: torch.optim.Adam(parameters, lr=torch.tensor(lr)))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before, step = everything(model, optimizer), optimizer.step
    with preserved(model, optimizer):
        optimizer.param_groups[0]["lr"].fill_(5.0)
        optimizer.step()
    assert everything(model, optimizer) == before
    assert optimizer.step == step
    assert scheduler.optimizer is optimizer


def test_a_scripted_part_gets_its_mode_back() -> None:
    model = nn.Sequential(torch.jit.script(nn.Dropout(0.5)))
    with preserved(model):
        model.eval()
    assert model[0].training


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("a text", "model is a str: give a torch.nn.Module"),
        (nn.LazyLinear(3), "weight has no shape yet: call the model once"),
    ],
)
def test_what_is_no_usable_model_is_said(model: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said), preserved(model):
        pass


# ------------------------------------------------------------------ the tests of the toolkit


def loader_of(batch: tuple[torch.Tensor, torch.Tensor]) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*batch), 3, shuffle=True, generator=torch.Generator().manual_seed(5))


TESTS: dict[str, Callable[..., Any]] = {
    "overfit": lambda model, loss, loader, optimizer: overfit_one_batch(
        model, loss, loader, optimizer=optimizer, steps=5
    ),
    "overfit with Adam": lambda model, loss, loader, _: overfit_one_batch(model, loss, loader, steps=3),
    "rates": lambda model, loss, loader, optimizer: learning_rate_range_test(
        model, loss, loader, optimizer=optimizer, steps=20
    ),
    "gradients": lambda model, loss, loader, _: gradient_check(model, loss, loader, coordinates=1),
    "initial loss": lambda model, loss, loader, _: initial_loss_check(model, loss, loader, classes=3),
}


@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize("test", TESTS)
def test_every_test_leaves_everything_as_it_was(test: str, mode: str) -> None:
    model, optimizer, batch = in_use()
    loader = loader_of(batch)
    if mode == "evaluation":
        model.eval()
    before = everything(model, optimizer, loaders=[loader])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        np.random.rand(), random.random(), torch.rand(2)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    TESTS[test](model, loss, loader, optimizer)
    assert everything(model, optimizer, loaders=[loader]) == before


@pytest.mark.parametrize("error", [ValueError("planted"), KeyboardInterrupt("planted")], ids=["error", "interrupt"])
@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("test", TESTS)
def test_so_it_does_where_the_loss_raises_half_way(test: str, at: int, error: BaseException) -> None:
    model, optimizer, batch = in_use()
    loader = loader_of(batch)
    before = everything(model, optimizer, loaders=[loader])
    calls = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        value = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if calls >= at:
            raise error
        return value

    with pytest.raises(type(error), match="planted"):
        TESTS[test](model, loss, loader, optimizer)
    assert everything(model, optimizer, loaders=[loader]) == before


@pytest.mark.parametrize("test", TESTS)
def test_a_loss_may_change_its_batch_and_take_keys_out_of_it(test: str) -> None:
    model, optimizer, (inputs, targets) = in_use()
    batch = {"inputs": inputs, "labels": targets}
    before = bits(batch)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch.pop("labels")
        return nn.functional.cross_entropy(model(batch["inputs"].mul_(2)), labels)

    TESTS[test](model, loss, [batch] if test == "rates" else batch, optimizer)
    assert bits(batch) == before


@pytest.mark.parametrize("test", TESTS)
def test_a_test_can_be_repeated_to_the_bit(test: str) -> None:
    model, optimizer, batch = in_use()
    loader = loader_of(batch)
    results = [TESTS[test](model, nn.CrossEntropyLoss(), loader, optimizer) for _ in range(2)]
    assert str(results[0]) == str(results[1])
    assert results[0].table == results[1].table


@pytest.mark.parametrize("test", TESTS)
def test_it_works_where_gradients_are_off(test: str) -> None:
    model, optimizer, batch = in_use()
    loader = loader_of(batch)
    expected = TESTS[test](model, nn.CrossEntropyLoss(), loader, optimizer)
    with torch.no_grad():
        assert TESTS[test](model, nn.CrossEntropyLoss(), loader, optimizer).numbers == expected.numbers


def of_a_gradient(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss that takes a gradient of its own, as gradient penalties and physics-informed networks do."""
    inputs = batch[0].requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return slope.square().mean() + model(inputs).square().mean() + torch.rand(()) / 1000


@pytest.mark.parametrize(
    "test",
    [
        lambda model, batch: initial_loss_check(model, of_a_gradient, batch, expected=1.0),
        lambda model, batch: gradient_check(model, of_a_gradient, batch),
        lambda model, batch: overfit_one_batch(model, of_a_gradient, batch, threshold=-1, steps=3),
        lambda model, batch: learning_rate_range_test(model, of_a_gradient, [batch], steps=20),
        lambda model, batch: find_dead_units(model, of_a_gradient, [batch]),
    ],
    ids=["initial loss", "gradient", "overfit", "learning rate", "dead units"],
)
def test_a_loss_may_take_gradients_of_its_own(test: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1), nn.ReLU())
    before = {name: bits(tensor) for name, tensor in model.named_parameters()}
    test(model, (torch.randn(6, 4), torch.zeros(6)))
    assert {name: bits(tensor) for name, tensor in model.named_parameters()} == before
    assert all(parameter.grad is None for parameter in model.parameters())


class Remembering(nn.Module):
    """Keeps tensors and numbers in containers of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.memory = [torch.zeros(2)]
        self.by_name = {"hidden": (torch.zeros(2), [1]), "deeper": {"seen": {1}}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: Any = self.by_name["hidden"]
        deeper: Any = self.by_name["deeper"]
        self.memory[0].add_(1)
        hidden[0].add_(1)
        hidden[1].append(2)
        deeper["seen"].add(3)
        return self.layer(x)


def test_what_lies_deeper_in_lists_and_dicts_is_put_back() -> None:
    model = Remembering()
    memory = model.memory[0]
    initial_loss_check(model, nn.CrossEntropyLoss(), (torch.randn(4, 8), torch.tensor([0, 1, 2, 0])))
    hidden, deeper = model.by_name["hidden"], model.by_name["deeper"]
    assert model.memory[0] is memory
    assert memory.tolist() == [0, 0]
    assert hidden[0].tolist() == [0, 0]  # type: ignore[index]
    assert (hidden[1], deeper) == ([1], {"seen": {1}})  # type: ignore[index]


def test_the_lists_in_the_state_of_an_optimizer_are_put_back() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 1), torch.randn(8, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    (state,) = optimizer.state.values()
    before = [bits(tensor) for tensor in state["old_dirs"]]
    with preserved(model, optimizer):
        optimizer.step(closure)
        assert len(state["old_dirs"]) > len(before)
    assert [bits(tensor) for tensor in state["old_dirs"]] == before

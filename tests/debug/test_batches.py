"""Batches of any structure, and the two ways in which a loss is called."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset
from transformers.modeling_outputs import BaseModelOutput
from transformers.tokenization_utils_base import BatchEncoding

from statsbridge import ConfigError
from statsbridge.collect.outputs import tensors_in
from statsbridge.debug.batches import (
    batch_size,
    call_model,
    checked_loader,
    first_batch,
    fresh,
    loss_value,
    map_tensors,
    without_dropout,
)


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class Frozen:
    image: torch.Tensor
    name: str
    parts: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Late:
    size: int
    data: torch.Tensor = field(init=False)


def late() -> Late:
    made = Late(3)
    made.data = torch.ones(3)
    return made


ones, numbers = torch.ones(2, 3), torch.arange(2)
BATCHES: dict[str, Any] = {
    "tensor": ones,
    "tuple": (ones, numbers),
    "list": [ones, [numbers, "text", None]],
    "named tuple": Pair(ones, numbers),
    "dict": {"x": ones, "more": {"y": numbers, 3: 4}},
    "ordered": OrderedDict(x=ones),
    "mapping that cannot be written": MappingProxyType({"x": ones}),
    "BatchEncoding": BatchEncoding({"input_ids": numbers}),
    "ModelOutput": BaseModelOutput(last_hidden_state=ones),
    "frozen dataclass": Frozen(ones, "name", [numbers]),
    "field set later": late(),
    "packed": pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_tensors_are_replaced_and_all_else_stays(kind: str) -> None:
    batch = BATCHES[kind]
    before = [(path, tensor.clone()) for path, tensor in tensors_in(batch)]
    mapped = map_tensors(batch, lambda tensor: tensor + 5)
    assert len(before) > 0
    assert type(mapped) is type(batch) or isinstance(batch, MappingProxyType)
    after = list(tensors_in(mapped))
    assert [path for path, _ in after] == [path for path, _ in before]
    assert all(torch.equal(new, old + 5) for (_, new), (_, old) in zip(after, before, strict=True))
    assert all(torch.equal(now, old) for (_, now), (_, old) in zip(tensors_in(batch), before, strict=True))


def test_what_is_no_tensor_is_taken_as_it_is() -> None:
    thing = object()
    mapped = map_tensors({"x": ones, "thing": thing, "names": ["a"], "count": 3}, torch.zeros_like)
    assert mapped["thing"] is thing
    assert mapped["names"] == ["a"]
    assert mapped["count"] == 3
    assert map_tensors(Frozen(ones, "kept"), torch.clone).name == "kept"


def test_a_packed_sequence_keeps_where_its_values_go() -> None:
    packed = pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)
    mapped = map_tensors(packed, lambda tensor: tensor.double())
    assert isinstance(mapped, PackedSequence)
    assert mapped.data.dtype == torch.float64
    assert torch.equal(mapped.batch_sizes, packed.batch_sizes)
    assert mapped.sorted_indices is packed.sorted_indices


def test_a_batch_inside_itself_ends() -> None:
    batch: list[Any] = [ones]
    batch.append(batch)
    assert torch.equal(map_tensors(batch, torch.zeros_like)[0], torch.zeros(2, 3))


def test_a_fresh_batch_shares_no_memory_and_needs_a_gradient_where_the_first_did() -> None:
    wanted = torch.ones(2, requires_grad=True)
    made = fresh({"x": wanted, "y": numbers})
    made["x"].data.zero_()
    del made["y"]
    assert made["x"].requires_grad
    assert made["x"].is_leaf
    assert wanted.tolist() == [1, 1]
    assert fresh([ones], torch.device("meta"))[0].is_meta


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ((torch.ones(4, 2), torch.ones(4)), 4),
        ({"x": torch.ones(3, 2), "weights": torch.ones(9), "y": torch.ones(3)}, 3),
        ([torch.tensor(1.0)], None),
        ("text", None),
    ],
)
def test_the_size_of_a_batch(batch: Any, size: int | None) -> None:
    assert batch_size(batch) == size


# ------------------------------------------------------------------ the loss


class Named(nn.Module):
    def forward(self, *, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left - right


class TwoInputs(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left - right


def test_inputs_are_given_one_by_one_or_by_name() -> None:
    assert call_model(TwoInputs(), (ones, 2 * ones)).tolist() == (-ones).tolist()
    assert call_model(Named(), {"right": ones, "left": 3 * ones}).tolist() == (2 * ones).tolist()
    assert call_model(nn.Identity(), ones) is ones
    pair = Pair(ones, numbers)
    assert call_model(nn.Identity(), pair) is pair


@pytest.mark.parametrize(
    "criterion", [nn.MSELoss(), functional.mse_loss, partial(functional.mse_loss, reduction="mean")]
)
@pytest.mark.parametrize("container", [list, tuple])
def test_a_criterion_compares_outputs_with_targets(criterion: Any, container: Any) -> None:
    batch = container([torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])])
    assert float(loss_value(nn.Identity(), criterion, batch)) == 2.5


def test_any_other_callable_is_given_the_model_and_the_batch() -> None:
    class Method:
        def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).sum()

    assert float(loss_value(nn.Identity(), lambda model, batch: model(batch["x"]).sum(), {"x": ones})) == 6
    assert float(loss_value(nn.Identity(), Method().loss, ones)) == 6
    assert loss_value(nn.Identity(), lambda model, batch: batch.sum().reshape(1, 1), ones).shape == ()


@pytest.mark.parametrize(
    ("loss", "batch", "said"),
    [
        (3, ones, "loss is a int: give a callable"),
        (nn.MSELoss(), {"x": ones}, r"the batch is a dict: a criterion needs a pair \(inputs, targets\)"),
        (nn.MSELoss(), (ones, ones, ones), "the batch is a tuple of 3: a criterion needs a pair"),
        (lambda model, batch: 1.0, ones, "loss gave a float: it has to return a torch tensor"),
        (lambda model, batch: batch, ones, r"loss gave a tensor of shape \[2, 3\] and torch.float32"),
        (lambda model, batch: torch.tensor(1), ones, r"loss gave a tensor of shape \[\] and torch.int64"),
    ],
)
def test_a_wrong_loss_is_said(loss: Any, batch: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loss_value(nn.Identity(), loss, batch)


def test_a_function_of_outputs_and_targets_is_told_how_it_was_called() -> None:
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        loss_value(nn.Identity(), lambda outputs, targets: (outputs - targets).square().mean(), (ones, ones))
    assert "statsbridge called this as loss(model, batch)" in caught.value.__notes__[0]


# ------------------------------------------------------------------ loaders


def test_the_first_batch_is_taken_without_a_trace() -> None:
    loader = DataLoader(TensorDataset(torch.arange(20)), 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    before = loader.generator.get_state(), torch.get_rng_state()
    taken = first_batch(loader)
    assert torch.equal(loader.generator.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.equal(next(iter(loader))[0], taken[0])


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (iter([ones]), "loader is a list_iterator, which can be read only once"),
        ((batch for batch in [ones]), "loader is a generator, which can be read only once"),
        (3, "loader is a int: give a DataLoader"),
        ([], "the loader gives no batch"),
        (DataLoader(TensorDataset(ones), 5, drop_last=True), "the loader gives no batch: its data set is empty, or"),
    ],
)
def test_a_wrong_loader_is_said(loader: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        first_batch(loader)


def test_a_loader_may_be_any_iterable() -> None:
    assert checked_loader([ones]) == [ones]
    assert first_batch(TensorDataset(ones, numbers))[1] == 0


def test_dropout_is_off_and_the_rest_trains_until_the_end() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2).eval(), nn.Dropout2d(0.5).eval())
    with pytest.raises(ValueError, match="planted"), without_dropout(model):
        assert [module.training for module in model.modules()] == [True, False, True, False]
        raise ValueError("planted")
    assert [module.training for module in model.modules()] == [True, True, False, False]

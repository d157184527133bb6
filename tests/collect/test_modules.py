"""Entries and parameters of modules, with the wrappers and parametrizations that torch itself makes."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from statsbridge.collect.modules import ModuleIndex


def names(index: ModuleIndex) -> list[str]:
    return [entry.name for entry in index.entries]


def tensors(index: ModuleIndex) -> list[tuple[str, str]]:
    return [(found.module.name, found.tensor) for found in index.parameters()]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_entries_in_the_order_of_declaration() -> None:
    index = ModuleIndex(small())
    assert [(e.index, e.name, e.type, e.parent, e.leaf, e.parameters) for e in index.entries] == [
        (0, "", "Sequential", None, False, 0),
        (1, "0", "Linear", "", True, 16),
        (2, "1", "Sequential", "", False, 0),
        (3, "1.0", "ReLU", "1", True, 0),
        (4, "1.1", "Linear", "1", True, 10),
    ]


def test_entries_are_found_by_identity() -> None:
    model = small()
    index = ModuleIndex(model)
    assert [index.entry(module) for module in model.modules()] == index.entries
    assert [index.module(entry) for entry in index.entries] == list(model.modules())
    assert all(index.entry(module) is None for module in copy.deepcopy(model).modules())
    assert index.entry(nn.Linear(3, 4)) is None


def test_an_id_that_is_used_again_is_no_match() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    index = ModuleIndex(model)
    number = id(model[0])
    del model[0]
    gc.collect()
    others = [nn.Module.__new__(nn.Module)]
    while id(others[-1]) != number and len(others) < 100_000:
        others.append(nn.Module.__new__(nn.Module))
    assert id(others[-1]) == number, "the allocator did not use the address again: this shows nothing"
    assert all(index.entry(other) is None for other in others)
    assert index.module(index.entries[1]) is None


def test_several_models_have_their_keys_for_roots() -> None:
    shared = nn.Linear(2, 2)
    models = {"G": nn.Sequential(shared), "D": nn.Sequential(nn.Tanh(), shared)}
    index = ModuleIndex(models)
    assert [(e.name, e.parent) for e in index.entries] == [
        ("G", None),
        ("G.0", "G"),
        ("D", None),
        ("D.0", "D"),
    ]
    assert tensors(index) == [("G.0", "weight"), ("G.0", "bias")]


def test_nothing_of_the_model_is_kept_alive() -> None:
    model = small()
    index = ModuleIndex(model)
    index.parameters()
    gone = [weakref.ref(thing) for thing in (*model.modules(), *model.parameters())]
    del model
    gc.collect()
    assert all(reference() is None for reference in gone)
    assert index.parameters() == []
    assert not index.refresh()
    assert [index.module(entry) for entry in index.entries] == [None] * 5


def test_the_model_sees_no_difference() -> None:
    model = small()
    before = [dict(vars(module)) for module in model.modules()]
    plain = pickle.dumps(model)
    index = ModuleIndex(model)
    index.parameters()
    index.refresh()
    assert [dict(vars(module)) for module in model.modules()] == before
    assert pickle.dumps(model) == plain
    torch.save(model, io.BytesIO())


# Wrappers


def test_distributed_data_parallel(process_group: None) -> None:
    model = small()
    expected = ModuleIndex(model).entries
    wrapped = nn.parallel.DistributedDataParallel(model)
    index = ModuleIndex(wrapped)
    assert index.entries == expected
    assert index.entry(wrapped) is None
    assert index.module(index.entries[0]) is model


def test_a_child_that_a_user_calls_module_is_no_wrapper() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert names(ModuleIndex(model)) == ["", "module"]


def test_compiled_and_data_parallel_and_checkpointed() -> None:
    model = small()
    expected = ModuleIndex(model).entries
    assert ModuleIndex(torch.compile(model)).entries == expected
    assert ModuleIndex(nn.DataParallel(model)).entries == expected
    model[1][1] = checkpoint_wrapper(torch.compile(model[1][1]))
    model[1] = torch.compile(model[1])
    index = ModuleIndex(torch.compile(nn.DataParallel(model)))
    assert index.entries == expected
    assert tensors(index)[-1] == ("1.1", "bias")


def test_fully_sharded(process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    expected = ModuleIndex(model).entries
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert type(model[0]).__name__ == "FSDPLinear"
    assert ModuleIndex(model).entries == expected


def test_a_users_class_of_such_a_name_stays() -> None:
    class FSDPLinear(nn.Linear): ...

    class ParametrizedLinear(nn.Linear): ...

    index = ModuleIndex(nn.Sequential(FSDPLinear(1, 1), ParametrizedLinear(1, 1)))
    assert [entry.type for entry in index.entries[1:]] == ["FSDPLinear", "ParametrizedLinear"]


def test_scripted_modules() -> None:
    model = nn.Sequential(torch.jit.script(small()))
    index = ModuleIndex(model)
    assert [(e.name, e.type, e.parameters) for e in index.entries[:3]] == [
        ("", "Sequential", 0),
        ("0", "Sequential", 0),
        ("0.0", "Linear", 16),
    ]
    assert index.entry(model[0]) is index.entries[1]
    assert tensors(index)[:2] == [("0.0", "weight"), ("0.0", "bias")]


# Parametrizations


def test_parametrizations_belong_to_the_module_they_compute_for() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(3, 2)), nn.Linear(2, 2))
    index = ModuleIndex(model)
    assert [(e.name, e.type, e.leaf, e.parameters, e.in_parametrization) for e in index.entries] == [
        ("", "Sequential", False, 0, False),
        ("0", "Linear", True, 2 + 2 + 6, False),
        ("0.parametrizations", "ModuleDict", False, 0, True),
        ("0.parametrizations.weight", "ParametrizationList", False, 0, True),
        ("0.parametrizations.weight.0", "_WeightNorm", True, 0, True),
        ("1", "Linear", True, 6, False),
    ]
    assert tensors(index) == [
        ("0", "bias"),
        ("0", "parametrizations.weight.original0"),
        ("0", "parametrizations.weight.original1"),
        ("1", "weight"),
        ("1", "bias"),
    ]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale.mean()


def test_a_parametrized_root_and_a_parameter_of_a_parametrization() -> None:
    model = nn.Linear(3, 2)
    register_parametrization(model, "weight", Scaled())
    index = ModuleIndex(model)
    assert tensors(index) == [
        ("", "bias"),
        ("", "parametrizations.weight.original"),
        ("", "parametrizations.weight.0.scale"),
    ]
    assert [entry.parameters for entry in index.entries] == [2 + 6 + 3, 0, 0, 0]


def test_a_parametrized_tensor_is_never_computed() -> None:
    model = nn.Sequential(spectral_norm(nn.Linear(3, 2)))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert before
    index = ModuleIndex(model)
    index.refresh()
    index.parameters()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


# Parameters


def test_a_tied_parameter_is_listed_once_at_its_first_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    index = ModuleIndex(model)
    assert tensors(index) == [("0", "weight"), ("0", "bias"), ("1", "bias")]
    assert [entry.parameters for entry in index.entries] == [0, 12, 3]


def test_parameters_are_those_of_the_moment() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    index = ModuleIndex(model)
    model[0].weight = nn.Parameter(torch.zeros(3, 3), requires_grad=False)
    model[0].register_parameter("extra", nn.Parameter(torch.ones(2)))
    model[0].bias = None
    assert tensors(index) == [("0", "weight"), ("0", "extra")]
    assert index.parameters()[0].parameter is model[0].weight


def test_a_lazy_module_is_described_when_it_has_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    index = ModuleIndex(model)
    assert tensors(index) == []
    assert (index.entries[1].type, index.entries[1].parameters) == ("LazyLinear", 0)
    model(torch.ones(1, 5))
    assert tensors(index) == [("0", "weight"), ("0", "bias")]
    assert index.refresh()
    assert (index.entries[1].type, index.entries[1].parameters) == ("Linear", 12)


def test_the_ids_of_parameters_tell_when_others_are_there() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.LazyLinear(3))
    model[1].weight = model[0].weight
    index = ModuleIndex(model)
    assert set(index.parameter_ids()) == {id(found.parameter) for found in index.parameters()}
    assert len(index.parameter_ids()) == 4
    before = index.parameter_ids()
    model(torch.ones(1, 3))
    assert index.parameter_ids()[:4] == before
    assert len(index.parameter_ids()) == 6
    swapped = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.register_forward_pre_hook(lambda *_: seen.append(index.parameter_ids()))
    seen: list[list[int]] = []
    torch.func.functional_call(model, swapped, (torch.ones(1, 3),))
    assert len(seen[0]) == 6
    assert set(seen[0]) == {id(tensor) for tensor in swapped.values()}


# Changes of the model


def test_nothing_changes_where_nothing_has_changed() -> None:
    model = small()
    index = ModuleIndex(model)
    before = list(index.entries)
    assert not index.refresh()
    assert all(now is then for now, then in zip(index.entries, before, strict=True))


def test_modules_added_later_come_last() -> None:
    model = small()
    index = ModuleIndex(model)
    before = list(index.entries)
    model.add_module("head", nn.Linear(2, 1))
    assert index.refresh()
    assert index.entries[:5] == before
    assert (index.entries[5].index, index.entries[5].name) == (5, "head")
    assert index.entry(model.head) is index.entries[5]


def test_a_module_that_was_moved_has_the_entry_of_its_new_path() -> None:
    model = small()
    index = ModuleIndex(model)
    moved = model[1][0]
    model[1].insert(0, nn.Tanh())
    assert index.refresh()
    assert [(e.name, e.type) for e in index.entries[3:]] == [
        ("1.0", "Tanh"),
        ("1.1", "ReLU"),
        ("1.2", "Linear"),
    ]
    assert index.entry(moved) is index.entries[4]
    assert [e.index for e in index.entries] == list(range(6))


def test_a_replaced_module_hands_its_entry_over() -> None:
    model = small()
    index = ModuleIndex(model)
    old = model[0]
    model[0] = nn.Bilinear(3, 3, 4)
    assert index.refresh()
    assert (len(index.entries), index.entries[1].name, index.entries[1].type) == (5, "0", "Bilinear")
    assert index.module(index.entries[1]) is model[0]
    assert index.entry(old) is None


def test_the_entry_of_a_removed_module_stays_until_its_path_is_used_again() -> None:
    model = small()
    model.add_module("head", nn.Linear(2, 1))
    index = ModuleIndex(model)
    before = list(index.entries)
    head = model.head
    del model.head
    assert index.refresh()
    assert index.entries == before
    assert (index.entry(head), index.module(before[5])) == (None, None)
    assert ("head", "weight") not in tensors(index)
    assert not index.refresh()
    model.head = head
    assert index.refresh()
    assert index.entry(head) is before[5]


def test_a_parametrization_added_later() -> None:
    model = small()
    index = ModuleIndex(model)
    weight_norm(model[0])
    assert index.refresh()
    assert [e.name for e in index.entries[5:]] == [
        "0.parametrizations",
        "0.parametrizations.weight",
        "0.parametrizations.weight.0",
    ]
    assert (index.entries[1].type, index.entries[1].leaf) == ("Linear", True)
    assert ("0", "parametrizations.weight.original1") in tensors(index)

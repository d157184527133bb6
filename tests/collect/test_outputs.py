"""Tensors of an output, and the gradients that hooks on their targets see, against autograd by hand."""

import gc
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from collect.models import CausalOutput
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from statsbridge.collect.outputs import gradient_target, tensors_in

a, b, c = (torch.full((2,), float(n)) for n in range(3))
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class State:
    hidden: Tensor
    note: str = "text"
    memory: tuple[Tensor, ...] = ()


def in_a_circle() -> list[Any]:
    circle: list[Any] = [a]
    circle.append({"again": circle, "b": b})
    return circle


def unread() -> Iterator[Tensor]:
    raise AssertionError("a generator was read")
    yield a


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (a, {"": a}),
        ((a,), {"0": a}),
        ([a, b], {"0": a, "1": b}),
        ((a, (b, c)), {"0": a, "1.0": b, "1.1": c}),
        ({"logits": a, "aux": [b, None]}, {"logits": a, "aux.0": b}),
        ({0: a, ("x", 1): b}, {"0": a, "('x', 1)": b}),
        (Pair(a, [b]), {"left": a, "right.0": b}),
        (State(a, memory=(b, c)), {"hidden": a, "memory.0": b, "memory.1": c}),
        ((a, State(b)), {"0": a, "1.hidden": b}),
        (
            CausalOutput(logits=a, hidden_states=(b, c)),
            {"logits": a, "hidden_states.0": b, "hidden_states.1": c},
        ),
        (torch.return_types.max((a, b)), {"0": a, "1": b}),
        (None, {}),
        ("text", {}),
        (State, {}),
        ((1, 2.0, "x", None, {1, 2}), {}),
        (unread(), {}),
        (in_a_circle(), {"0": a, "1.b": b}),
    ],
)
def test_paths(value: object, expected: dict[str, Tensor]) -> None:
    found = list(tensors_in(value))
    assert [path for path, _ in found] == list(expected)
    assert all(tensor is expected[path] for path, tensor in found)


def test_of_a_packed_sequence_there_are_only_the_values() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.zeros(1, 2)])
    assert [(path, tensor.shape) for path, tensor in tensors_in(packed)] == [("data", (4, 2))]
    lstm = nn.LSTM(2, 5)
    assert [path for path, _ in tensors_in(lstm(packed))] == ["0.data", "1.0", "1.1"]


def test_nesting_without_end_is_left() -> None:
    deep: Any = a
    for _ in range(40):
        deep = [deep]
    assert list(tensors_in(deep)) == []


class Shaped(nn.Module):
    """Twice its input, in another order: a view of all of a tensor made inside."""

    def forward(self, x: Tensor) -> Tensor:
        return (2 * x).transpose(0, 1)


LEAVES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 5), torch.randn(2, 4)),
    "linear on three dimensions": (lambda: nn.Linear(4, 5), torch.randn(2, 3, 4)),
    "max pooling": (lambda: nn.MaxPool1d(2), torch.randn(2, 3, 4)),
    "average pooling": (lambda: nn.AdaptiveAvgPool1d(2), torch.randn(2, 3, 4)),
    "instance norm": (lambda: nn.InstanceNorm1d(3), torch.randn(2, 3, 4)),
    "convolution without a batch": (lambda: nn.Conv1d(3, 5, 2), torch.randn(3, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), torch.randn(2, 3, 4)),
    "flatten of what is not contiguous": (nn.Flatten, torch.randn(2, 3, 4).transpose(1, 2)),
    "recurrent": (lambda: nn.LSTM(4, 5, batch_first=True), torch.randn(2, 3, 4)),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(2, 3, 4)),
    "another order": (Shaped, torch.randn(2, 3)),
}

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "unchanged": lambda y: y * 1.0,
    "relu_": lambda y: y.relu_(),
    "+=": lambda y: y.add_(y.detach() ** 2).mul_(3.0),
    "read before the change": lambda y: y * 2.0 + y.mul_(3.0).exp(),
}


def call(module: nn.Module, x: Tensor) -> Any:
    return module(x, x, x) if isinstance(module, nn.MultiheadAttention) else module(x)


# autograd itself refuses changes of what an LSTM returned.
@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name in LEAVES for change in CHANGES if name != "recurrent" or change == "unchanged"],
)
def test_gradient_of_a_leafs_output_whatever_happens_to_it(name: str, change: str) -> None:
    make, x = LEAVES[name]
    module = make()
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    outputs = [tensor for _, tensor in tensors_in(call(module, x * 1.0))]
    value = outputs[0].detach().clone().requires_grad_()
    weight = torch.randn(value.shape)
    (expected,) = torch.autograd.grad((CHANGES[change](value.clone()) * weight).sum(), value)

    target = gradient_target(outputs[0], True, inputs=((x,), {}), outputs=outputs)
    assert target is not None
    assert target.watch is None
    seen: list[Tensor] = []
    target.tensor.register_hook(seen.append)
    (CHANGES[change](outputs[0]) * weight).sum().backward()
    assert len(seen) == 1
    # A base has the same elements in another order.
    torch.testing.assert_close(seen[0].flatten().sort().values, expected.flatten().sort().values)


def test_a_view_of_an_input_is_watched() -> None:
    hidden = nn.Conv1d(1, 2, 3)(torch.randn(2, 1, 8))
    hidden = hidden * 2
    output = nn.Flatten()(hidden)
    target = gradient_target(output, True, inputs=((hidden,), {}), outputs=[output])
    assert target is not None
    assert target.tensor is output
    assert target.watch is not None
    seen: list[Tensor] = []
    target.tensor.register_hook(seen.append)
    assert not target.watch.modified()
    output.relu_()
    output.sum().backward()
    assert target.watch.modified()
    assert seen == []


def test_an_unchanged_view_gives_its_gradient() -> None:
    hidden = torch.randn(2, 6, requires_grad=True) * 2
    parts = hidden.chunk(2, dim=1)
    targets = [gradient_target(part, True, inputs=(hidden,), outputs=parts) for part in parts]
    seen: dict[int, Tensor] = {}
    for number, target in enumerate(targets):
        assert target is not None
        assert target.tensor is parts[number]
        target.tensor.register_hook(lambda grad, n=number: seen.__setitem__(n, grad))
    (parts[0] * 3 + parts[1] ** 2).sum().backward()
    torch.testing.assert_close(seen[0], torch.full((2, 3), 3.0))
    torch.testing.assert_close(seen[1], 2 * parts[1].detach())
    assert [t.watch.modified() for t in targets if t is not None and t.watch is not None] == [False, False]


def test_a_change_of_another_view_of_the_same_memory_is_noticed() -> None:
    base = torch.randn(4, 3, requires_grad=True) * 2
    target = gradient_target(base[:2], False)
    assert target is not None
    assert target.watch is not None
    base[2:].mul_(2.0)
    assert target.watch.modified()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: ((y := x * 2).view(-1), y),  # the base is an output itself
        lambda x: ((y := x * 2).view(-1), y.t()),  # two outputs share it
        lambda x: ((x * 2)[:1],),  # only a part
        lambda x: ((x * 2).as_strided((2, 3), (0, 1)),),  # elements twice
        lambda x: (nn.Parameter(torch.ones(2, 3)).t(),),  # of a parameter
        lambda x: (x.view(-1),),  # of the input
        lambda x: (x[0],),  # of a part of the input
    ],
)
def test_a_base_that_is_not_the_outputs_alone_is_not_taken(
    make: Callable[[Tensor], tuple[Tensor, ...]],
) -> None:
    x = torch.randn(2, 3, requires_grad=True) * 1.0
    outputs = make(x)
    target = gradient_target(outputs[0], True, inputs=(x,), outputs=outputs)
    assert target is not None
    assert target.tensor is outputs[0]
    assert target.watch is not None


def test_an_input_that_is_a_view_shares_its_base_with_the_output() -> None:
    whole = torch.randn(4, 3, requires_grad=True) * 1.0
    x = whole.view(2, 6)
    output = x.view(12)
    target = gradient_target(output, True, inputs=((), {"input": x}), outputs=[output])
    assert target is not None
    assert target.tensor is output


def test_a_container_may_use_its_base_otherwise() -> None:
    output = nn.Linear(4, 5)(torch.randn(2, 3, 4))
    target = gradient_target(output, False)
    assert target is not None
    assert target.tensor is output


def test_an_output_that_needs_no_gradient_has_no_target() -> None:
    assert gradient_target(torch.ones(2), True) is None
    with torch.no_grad():
        assert gradient_target(nn.Linear(2, 2)(torch.ones(3, 2, 2)), True) is None


def test_a_watch_keeps_neither_the_output_nor_its_memory() -> None:
    output = (torch.randn(2, 3, requires_grad=True) * 2)[:1]
    target = gradient_target(output, False)
    assert target is not None
    watch, gone = target.watch, weakref.ref(output)
    assert watch is not None
    assert watch.counter.untyped_storage().nbytes() == 0
    del target
    output.mul_(2.0)
    del output
    gc.collect()
    assert gone() is None
    assert watch.modified()
    assert watch.counter._base is None

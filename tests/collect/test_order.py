"""Depth and order of module calls, against dictionaries computed by hand and numpy."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from collect.models import (
    ADVERSARIAL_DEPTH,
    RESNET_DEPTH,
    UNET_DEPTH,
    Adversarial,
    Branches,
    CausalOutput,
    Doubled,
    Plain,
    Recurrent,
    ResNet,
    Reversed,
    Traced,
    UNet,
    depths,
    first_calls,
    linear,
    rows,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from statsbridge.collect.modules import ModuleIndex

# Models whose depths were counted by hand


def test_unet_with_skip_connections() -> None:
    assert depths(UNet(), torch.randn(2, 1, 8, 8)) == UNET_DEPTH


def test_resnet_with_residual_additions() -> None:
    assert first_calls(depths(ResNet(), torch.randn(2, 1, 8, 8))) == RESNET_DEPTH


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_transformer_encoder_whose_attention_never_calls_its_projection(dropout: float) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
    order = ["self_attn", "dropout1", "norm1", "linear1", "dropout", "linear2", "dropout2", "norm2"]
    expected = {f"layers.{n}.{name}": 8 * n + k for n in range(2) for k, name in enumerate(order, 1)}
    expected |= {"layers.0": 8, "layers.1": 16, "": 16}
    assert first_calls(depths(nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 8))) == expected


def test_recurrent_loop_deepens_with_time() -> None:
    cells = {("cell", t): t + 2 for t in range(4)}
    assert depths(Recurrent(), torch.randn(2, 4, 3)) == {("lstm", 0): 1, **cells, ("head", 0): 6, ("", 0): 6}


def test_everything_that_has_misled_a_tracer() -> None:
    assert depths(Adversarial(), torch.randn(4, 6)) == ADVERSARIAL_DEPTH


def test_branches_on_values_and_any_number_of_inputs() -> None:
    inputs = (torch.ones(2, 3), -torch.ones(2, 3))
    long = {("long.0", 0): 1, ("long.1", 0): 2, ("long.2", 0): 3, ("long", 0): 3}
    assert depths(Branches(), *inputs) == {**long, ("short", 0): 1, ("last", 0): 4, ("", 0): 4}
    assert depths(Branches(), inputs[1]) == {("short", 0): 1, ("last", 0): 2, ("", 0): 2}


def test_order_counts_calls_when_their_output_is_ready() -> None:
    with Traced(model := UNet()) as traced:
        model(torch.randn(2, 1, 8, 8))
    assert list(traced.order) == list(UNET_DEPTH)
    assert list(traced.order.values()) == list(range(14))


# One trap at a time: what runs, and the depth of its last module, `end`

TRAPS: dict[str, tuple[Callable[..., Any], int]] = {
    "reuse": (lambda m, x: m.end(m.a(m.a(m.a(x)))), 4),
    "parallel branches share depths": (lambda m, x: m.end(m.a(x) + m.b(x)), 2),
    "concatenation takes the deepest": (lambda m, x: m.end(torch.cat([x, m.b(m.a(x)), m.c(x)])), 3),
    "an addition of both sides": (lambda m, x: m.end(x + m.b(m.a(x))), 3),
    "detach": (lambda m, x: m.end(m.a(x).detach()), 2),
    "data": (lambda m, x: m.end(m.a(x).data), 2),
    "without gradients": (lambda m, x: m.end(torch.no_grad()(m.a)(x)), 2),
    "iteration": (lambda m, x: m.end(torch.stack(list(m.a(x)))), 2),
    "iteration without gradients": (lambda m, x: m.end(torch.stack(list(m.a(x).detach()))), 2),
    "unpacking a tuple of results": (lambda m, x: m.end(m.a(x).sort(dim=1)[0]), 2),
    "unbind": (lambda m, x: m.end(m.a(x).unbind(0)[1]), 2),
    "an index decides": (lambda m, x: m.end(x[m.a(x).argmax(dim=1)]), 2),
    "a mask decides": (lambda m, x: m.end(torch.where(m.a(x) > 0, x, -x)), 2),
    "einsum": (lambda m, x: m.end(torch.einsum("ij,kj->ik", m.b(m.a(x)), x)[:, :3]), 3),
    "keyword arguments": (lambda m, x: m.end(input=m.a(input=x)), 2),
    "a kernel torch cannot look into": (lambda m, x: m.end(Doubled.apply(m.b(m.a(x)))), 3),
    "a function that returns its input": (lambda m, x: m.end(Reversed.apply(m.b(m.a(x)))), 3),
    "a scripted function": (lambda m, x: m.end(scripted_double(m.a(x))), 2),
    "a custom operator": (lambda m, x: m.end(copied_by_operator(m.a(x))), 2),
    "a checkpoint": (lambda m, x: m.end(checkpoint(m.a, x, use_reentrant=False)), 2),
    "a reentrant checkpoint": (
        lambda m, x: m.end(checkpoint(m.a, x.requires_grad_(), use_reentrant=True)),
        2,
    ),
    "a shape is no data": (lambda m, x: m.end(x + torch.zeros(m.a(x).shape)), 1),
    "zeros like something are no data": (lambda m, x: m.end(x + torch.zeros_like(m.a(x))), 1),
    "a type is no data": (lambda m, x: m.end(x.to(m.a(x))), 1),
    "views of several tensors at once": (
        lambda m, x: m.end(torch.broadcast_tensors(x[:1], m.a(x))[0]),
        1,
    ),
    "the same tensor comes back": (lambda m, x: m.end(m.a(x).contiguous().float()), 2),
    "an output buffer": (lambda m, x: m.end(torch.add(m.a(x).detach(), 1, out=torch.empty(4, 3))), 2),
    "functional in place": (
        lambda m, x: (y := x.clone(), functional.relu(y.add_(m.a(x)), inplace=True), m.end(y))[2],
        2,
    ),
    "the whole of a tensor is written after a view of it was taken": (
        lambda m, x: (y := x.clone(), v := y[:2], y.add_(m.a(x)), m.end(v))[3],
        2,
    ),
    "a view is written after another of the same rows was taken": (
        lambda m, x: (y := x.clone(), v := y[:2], y[1:].add_(m.a(x)[1:]), m.end(v))[3],
        2,
    ),
    "the other half is written": (
        lambda m, x: (y := x.clone(), v := y[:2], y[2:].add_(m.a(x)[2:]), m.end(v))[3],
        1,
    ),
    "a chunk of a view whose base nobody holds": (
        lambda m, x: (c := halves(m.a(x[None])), c[0].add_(m.b(c[1])), m.end(c[1]))[2],
        2,
    ),
    "the other chunk of it": (
        lambda m, x: (c := halves(m.a(x[None])), c[0].add_(m.b(c[1])), m.end(c[0]))[2],
        3,
    ),
    "every second row is written": (
        lambda m, x: (y := x.clone(), y[::2].copy_(m.a(x)[::2]), m.end(y))[2],
        2,
    ),
    "a view without gradients whose base is changed": (lambda m, x: m.end(viewed_without_gradients(m, x)), 3),
    "new data": (lambda m, x: (y := x.clone(), setattr(y, "data", m.a(x).data), m.end(y))[2], 2),
    "an error that the model catches": (lambda m, x: m.end(caught(m, x)), 2),
}


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :2], x[:, 2:]


@torch.jit.script
def scripted_double(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("statsbridge_tests::copy_into", mutates_args={"out"})
def copy_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x)


def copied_by_operator(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    copy_into(x.detach(), out)
    return out


def viewed_without_gradients(m: Any, x: Tensor) -> Tensor:
    """What the view's autograd node is, torch refuses to say."""
    y = m.a(x)
    with torch.no_grad():
        view = y.view(-1)
    y.add_(m.b(y))
    with torch.no_grad():
        return view.mul_(1).view_as(x) * 1


def caught(m: Any, x: Tensor) -> Tensor:
    try:
        m.b(torch.zeros(1, 99))
    except RuntimeError:
        return m.a(x)
    raise AssertionError("a Linear took 99 features")


@pytest.mark.parametrize("trap", TRAPS)
def test_depth_follows_the_data(trap: str) -> None:
    run, expected = TRAPS[trap]
    depth = depths(Plain(run, **linear("a", "b", "c", "end")), rows())
    assert depth["end", 0] == expected
    assert depth["", 0] == expected


class Lookup(nn.Module):
    """A leaf that reads what somebody else has put on it."""

    def __init__(self) -> None:
        super().__init__()
        self.context: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.context is not None
        return x + self.context


def test_a_leaf_reads_what_is_no_argument() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        m.lookup.context = m.b(m.a(x))
        return m.end(m.lookup(x))

    depth = first_calls(depths(Plain(run, lookup=Lookup(), **linear("a", "b", "end")), rows()))
    assert (depth["lookup"], depth["end"]) == (3, 4)


class Stamp(nn.Module):
    """A leaf that writes into its argument and returns nothing."""

    def forward(self, canvas: Tensor) -> None:
        canvas[:2] = 1.0


def test_a_leaf_writes_into_its_argument() -> None:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        canvas = m.a(x)
        m.stamp(canvas)
        return m.end(canvas[2:]), m.other(canvas[:2])

    depth = first_calls(depths(Plain(run, stamp=Stamp(), **linear("a", "end", "other")), rows()))
    assert depth == {"a": 1, "stamp": 2, "end": 2, "other": 3, "": 3}


class Mark(nn.Module):
    """A leaf that writes into a tensor which somebody else has put on it."""

    def __init__(self) -> None:
        super().__init__()
        self.canvas: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.canvas is not None
        self.canvas[:2] = x[:2]
        return x.sum()


def test_a_leaf_writes_into_what_is_no_argument() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        m.mark.canvas = torch.zeros_like(x)
        m.mark(m.a(x))
        return m.end(m.mark.canvas)

    depth = first_calls(depths(Plain(run, mark=Mark(), **linear("a", "end")), rows()))
    assert depth == {"a": 1, "mark": 2, "end": 3, "": 3}


def test_an_inplace_module_deepens_the_tensor_it_changes() -> None:
    model = Plain(lambda m, x: m.end(x) if m.relu(x[:2]) is not None else x, relu=nn.ReLU(True), **linear("end"))
    assert first_calls(depths(model, rows())) == {"relu": 1, "end": 2, "": 2}


def test_running_statistics_carry_no_data() -> None:
    model = Plain(lambda m, x: m.norm(m.a(m.a(x))) + m.norm(x), norm=nn.BatchNorm1d(3), **linear("a"))
    assert depths(model, rows()) == {("a", 0): 1, ("a", 1): 2, ("norm", 0): 3, ("norm", 1): 1, ("", 0): 3}


def test_modules_in_parametrizations_add_no_depth() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(3, 3)), spectral_norm(nn.Linear(3, 3)), nn.Tanh())
    depth = depths(model, rows())
    assert {name: deep for (name, _), deep in depth.items() if "parametrizations" not in name} == {
        "0": 1,
        "1": 2,
        "2": 3,
        "": 3,
    }
    assert {deep for (name, _), deep in depth.items() if "parametrizations" in name} == {0}


def test_a_scripted_child_is_one_call() -> None:
    inner = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    model = Plain(lambda m, x: m.end(m.inner(m.a(x))), inner=inner, **linear("a", "end"))
    assert first_calls(depths(model, rows())) == {"a": 1, "inner": 2, "end": 3, "": 3}


def test_modules_that_are_not_tracked_are_plain_code() -> None:
    hidden = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = Plain(lambda m, x: m.end(hidden(m.a(x))), **linear("a", "end"))
    assert first_calls(depths(model, rows())) == {"a": 1, "end": 2, "": 2}


def test_a_module_held_in_a_list_is_called_by_one_that_seems_childless() -> None:
    inner = nn.Linear(3, 3)
    outer = Plain(lambda m, x: inner(x * 2) + 1)
    model = Plain(lambda m, x: m.end(m.outer(m.a(x))), outer=outer, inner=inner, **linear("a", "end"))
    assert first_calls(depths(model, rows())) == {"a": 1, "inner": 2, "outer": 2, "end": 3, "": 3}


def test_a_container_without_a_tensor_in_its_output_is_as_deep_as_its_deepest_call() -> None:
    model = Plain(lambda m, x: m.b(m.a(x)).sum().item(), **linear("a", "b"))
    assert first_calls(depths(model, rows())) == {"a": 1, "b": 2, "": 2}


def test_outputs_that_are_dictionaries_and_dataclasses() -> None:
    inner = Plain(lambda m, x: CausalOutput(logits=m.a(x), hidden_states=(m.b(m.a(x)),)), **linear("a", "b"))
    model = Plain(lambda m, x: m.end(m.inner(x).hidden_states[0]), inner=inner, **linear("end"))
    depth = depths(model, rows())
    assert (depth["inner", 0], depth["end", 0]) == (2, 3)


def test_a_model_may_fail_and_run_again() -> None:
    model = Plain(lambda m, x: m.b(m.a(x)), **linear("a", "b"))
    index = ModuleIndex(model)
    with Traced(model, index), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(2, 99))
    with Traced(model, index) as traced:
        model(rows())
    assert first_calls(traced.depth) == {"a": 1, "b": 2, "": 2}


# Any program of views and in-place changes, against numpy arrays that hold the depth of each element

step = st.tuples(
    st.sampled_from(["leaf", "add", "add_", "set", "rows", "columns", "chunk", "clone", "cat"]),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 3),
)


@given(st.lists(step, max_size=14))
def test_depth_of_any_program_is_that_of_its_elements(program: list[tuple[str, int, int, int]]) -> None:
    class Leaf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1.5

    def run(m: Any, x: Tensor) -> list[Tensor]:
        tensors, deep = [x], [np.zeros((4, 4), int)]
        for kind, i, j, n in program:
            a, b = i % len(tensors), j % len(tensors)
            t, d = tensors[a], deep[a]
            if d.size == 0 or deep[b].size == 0:
                continue
            new: list[tuple[Tensor, np.ndarray]] = []
            if kind == "leaf":
                new = [(m.leaf(t), np.full(d.shape, d.max() + 1))]
            elif kind == "add":
                new = [(t + tensors[b].mean(), np.full(d.shape, max(d.max(), deep[b].max())))]
            elif kind == "add_":
                t.add_(tensors[b].mean())
                d[...] = max(d.max(), deep[b].max())
            elif kind == "set":
                t[n:] = tensors[b].mean()
                if d[n:].size:
                    d[n:] = np.maximum(d[n:], deep[b].max())
            elif kind == "rows":
                new = [(t[n:], d[n:])]
            elif kind == "columns":
                new = [(t[:, : n + 1], d[:, : n + 1])]
            elif kind == "chunk":
                new = list(zip(t.chunk(2, dim=n % 2), chunks(d, n % 2), strict=True))
            elif kind == "clone":
                new = [(t.clone(), np.full(d.shape, d.max()))]
            elif kind == "cat":
                new = [(torch.cat([t.flatten(), tensors[b].flatten()])[None].expand(4, -1)[:, :4], np.array([]))]
                new = [(new[0][0].clone(), np.full(new[0][0].shape, max(d.max(), deep[b].max())))]
            tensors.extend(t for t, _ in new)
            deep.extend(d for _, d in new)
        expected.extend(int(d.max()) + 1 for d in deep if d.size)
        return [m.probe(t) for t, d in zip(tensors, deep, strict=True) if d.size]

    expected: list[int] = []
    found = depths(Plain(run, leaf=Leaf(), probe=Leaf()), torch.randn(4, 4))
    assert [deep for (name, _), deep in found.items() if name == "probe"] == expected


def chunks(array: np.ndarray, axis: int) -> list[np.ndarray]:
    """As torch.chunk(2) cuts: pieces of ceil(n / 2), views of the array."""
    half = -(-array.shape[axis] // 2)
    pieces = (array[:half], array[half:]) if axis == 0 else (array[:, :half], array[:, half:])
    return [piece for piece in pieces if piece.size]


# The model computes what it would without us


def trained(model: nn.Module, inputs: tuple[Tensor, ...], traced: bool) -> list[Tensor | None]:
    torch.manual_seed(3)
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    if traced:
        with Traced(model):
            output = model(*inputs)
    else:
        output = model(*inputs)
    output = output["logits"] if isinstance(output, dict) else output
    output.square().sum().backward()
    return [output, *(x.grad for x in inputs), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (UNet, [(2, 1, 8, 8)]),
        (ResNet, [(2, 1, 8, 8)]),
        (Recurrent, [(2, 4, 3)]),
        (Adversarial, [(4, 6)]),
        (Branches, [(2, 3), (2, 3), (2, 3)]),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16), [(5, 2, 8)]),
    ],
)
def test_outputs_and_gradients_are_bit_identical(make: Any, shapes: list[tuple[int, ...]]) -> None:
    model = make()
    inputs = tuple(torch.randn(shape) for shape in shapes)
    twin = copy.deepcopy(model)
    for plain, traced in zip(trained(model, inputs, False), trained(twin, inputs, True), strict=True):
        assert (plain is None) == (traced is None)
        assert plain is None or traced is None or torch.equal(plain, traced)


def test_no_tensor_is_kept_alive() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x).detach()
        y[:1] = 0.0
        kept.append(weakref.ref(y))
        return x * 2

    with Traced(model := Plain(run, **linear("a"))):
        model(rows())
        gc.collect()
        assert kept[0]() is None

"""Training is the same, bit for bit, with and without statsbridge, and nothing stays behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recording import Small, events, row, rows
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as torch_module

import statsbridge
from statsbridge import StatsBridgeWarning
from statsbridge.collect import collector as collector_module
from statsbridge.collect.piece import Piece
from statsbridge.collect.rows import Row

Record = Callable[..., statsbridge.Run]


class Convolutional(nn.Module):
    """In-place ReLU, a residual add in place, batch norm, dropout: what hooks usually break."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.dropout = nn.Dropout2d(0.3)
        self.head = nn.Linear(8 * 36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.stem(x)))
        y = self.conv(x)
        y += x
        return self.head(self.dropout(y).flatten(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout": (lambda: Small(dropout=0.4), (16, 8)),
    "convolution": (Convolutional, (4, 1, 6, 6)),
    "transformer": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(40, 3)),
        (6, 5, 8),
    ),
}


def train(kind: str, steps: int, record: Callable[[nn.Module], statsbridge.Run] | None) -> tuple[list[Any], Any]:
    torch.manual_seed(7)
    make, shape = MODELS[kind]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = None if record is None else record(model)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(shape)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
        if run is not None:
            run.step(loss=loss)
    if run is not None:
        run.finish()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_losses_and_weights_are_bit_identical(kind: str, every: int, record: Record) -> None:
    plain = train(kind, 50, None)
    watched = train(kind, 50, lambda model: record(model, every=every, histograms=True))
    assert all(torch.equal(a, b) for a, b in zip(plain[0], watched[0], strict=True))
    assert plain[1].keys() == watched[1].keys()
    assert all(torch.equal(plain[1][name], watched[1][name]) for name in plain[1])


def hooks_anywhere(model: nn.Module) -> int:
    names = [name for name in vars(torch_module) if name.startswith("_global_") and "hooks" in name]
    names = [name for name in names if isinstance(getattr(torch_module, name), dict)]
    count = sum(len(getattr(torch_module, name)) for name in names)
    for child in model.modules():
        count += sum(len(value) for name, value in vars(child).items() if name.endswith("_hooks"))
    return count


def test_no_hook_between_sampled_steps(record: Record) -> None:
    model = Small()
    run = record(model, every=3, alerts=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(7):
        seen.append(hooks_anywhere(model) > 0)
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        run.step()
    assert seen == [True, False, False, True, False, False, True]
    run.finish()
    assert hooks_anywhere(model) == 0
    optimizer_module = sys.modules["torch.optim.optimizer"]
    assert not optimizer_module._global_optimizer_pre_hooks
    assert not optimizer_module._global_optimizer_post_hooks


def test_the_model_pickles_copies_and_saves_inside_a_sampled_step(record: Record) -> None:
    model = Small()
    run = record(model)
    plain = pickle.dumps(Small())
    loss = model(torch.randn(4, 8)).sum()
    assert len(pickle.dumps(model)) == len(plain)
    copied = copy.deepcopy(model)
    torch.save(model.state_dict(), io.BytesIO())
    torch.save(model, io.BytesIO())
    copied(torch.randn(9, 8)).sum().backward()  # a copy is another model: not counted
    loss.backward()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    assert row(data, module="second", site="activation")["count"] == 4 * 3


def test_validation_inside_a_sampled_step_is_not_counted(record: Record) -> None:
    model = Small()
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).sum().backward()
    model.eval()
    with torch.no_grad():
        model(torch.randn(100, 8))
    model.train()
    with torch.inference_mode():
        model(torch.randn(100, 8))
    optimizer.step()
    run.step()
    run.finish()
    assert row(statsbridge.load(run.path), module="", site="activation")["count"] == 4 * 3


def traced(model: nn.Module, x: torch.Tensor) -> list[str]:
    """The operations of the model as three tracers see them."""
    program = torch.jit.trace(model, x)  # it raises where a second trace is another program
    written = make_fx(model)(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        shape = str(model(torch.randn(x.shape)).shape)
    return [*(node.kind() for node in program.inlined_graph.nodes()), *map(str, written.graph.nodes), shape]


def test_tracers_see_nothing_of_us_and_their_passes_are_not_counted(record: Record) -> None:
    model, x = Small(), torch.randn(16, 8)
    expected = traced(model, x)
    run = record(model, alerts=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    assert traced(model, x) == expected
    optimizer.step()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    assert {found["count"] for found in rows(data, module="first", site="activation")} == {16 * 16}
    assert all(found["mean"] is not None for found in rows(data, site="activation"))
    assert data.events.to_pylist() == []


def test_a_forward_that_raises_is_not_counted(record: Record) -> None:
    model = Small()
    run = record(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 9))
    with pytest.raises(TypeError):
        model("nonsense")
    model(torch.randn(5, 8)).sum().backward()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    assert row(data, module="first", site="activation")["count"] == 5 * 16
    assert row(data, module="", site="activation")["count"] == 5 * 3


def test_a_keyboard_interrupt_leaves_nothing_behind(record: Record) -> None:
    class Interrupted(Small):
        stop = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            if self.stop:
                raise KeyboardInterrupt
            return self.second(self.relu(y))

    model = Interrupted()
    run = record(model)
    before = torch._C._len_torch_function_stack()
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, 8))
    model.stop = False
    model(torch.randn(6, 8)).sum().backward()
    run.step()
    assert torch._C._len_torch_function_stack() == before
    run.finish()
    data = statsbridge.load(run.path)
    assert row(data, module="first", site="activation")["count"] == 6 * 16
    assert row(data, module="second", site="activation")["depth"] == 3


def test_memory_is_flat(record: Record) -> None:
    model = Small()
    run = record(model, every=2, flush_interval=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).sum()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
        run._writer.flush()

    steps(400)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    held = sum(isinstance(thing, (torch.Tensor, Piece, Row)) for thing in gc.get_objects())
    steps(1600)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 400_000, f"{grown} bytes more after 1,600 steps"
    assert sum(isinstance(thing, (torch.Tensor, Piece, Row)) for thing in gc.get_objects()) <= held + 20


def test_what_waits_is_little_work_for_the_garbage_collector(record: Record) -> None:
    """A full collection stops training for a tenth of a second: what survives young ones brings it nearer."""
    model = nn.Sequential(*(nn.Linear(80, 80) for _ in range(30)))
    run = record(model, every=1, flush_interval=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def steps(count: int) -> int:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(100, 80)).sum().backward()
            optimizer.step()
            run.step()
        gc.collect()
        return len(gc.get_objects())

    steps(3)
    before = steps(1)
    grown = steps(5) - before
    run.finish()
    made = sum(1 for row in rows(statsbridge.load(run.path)) if row["step"] == 0)
    assert made == 30 * 8 + 2
    assert grown < 5 * 3.2 * made, f"{grown / 5 / made:.2f} objects a row wait"


def test_an_error_of_our_own_ends_nothing(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("injected")

    plain = train("dropout", 5, None)
    monkeypatch.setattr(collector_module, "measure", broken)
    with pytest.warns(StatsBridgeWarning, match="injected") as warned:
        run: list[statsbridge.Run] = []
        watched = train("dropout", 5, lambda model: run.append(record(model)) or run[0])  # type: ignore[func-returns-value]
    assert all(torch.equal(a, b) for a, b in zip(plain[0], watched[0], strict=True))
    ours = [str(w.message) for w in warned if issubclass(w.category, StatsBridgeWarning)]
    sites = {text.split("measuring ")[1].split(" ")[0] for text in ours}
    assert sites == {"activation", "activation_grad", "parameter", "parameter_grad", "update"}
    assert len(ours) == len(sites), f"each cause is said once: {ours}"
    data = statsbridge.load(run[0].path)
    told = events(data, "internal_error")
    assert told
    assert all("ZeroDivisionError: injected" in event["message"] for event in told)
    assert {row["status"] for row in rows(data)} == {"internal_error"}
    assert data.scalars.num_rows > 0


@pytest.mark.parametrize("method", ["_enter", "_leave"])
def test_a_broken_hook_ends_nothing(method: str, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    from statsbridge.collect.forward import ForwardHooks

    def broken(*_: Any) -> None:
        raise RuntimeError("injected")

    plain = train("convolution", 3, None)
    monkeypatch.setattr(ForwardHooks, method, broken)
    with pytest.warns(StatsBridgeWarning):
        watched = train("convolution", 3, record)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], watched[0], strict=True))


def test_warnings_as_errors_do_not_stop_training(record: Record) -> None:
    import warnings

    model = nn.Linear(2, 2)
    run = record(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step(loss=object())
    run.finish()
    assert len(events(statsbridge.load(run.path), "bad_scalar")) == 1

"""`statsbridge.trace`: the order table without training, and a model that is afterwards what it was."""

from __future__ import annotations

import copy
import io
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from depth_oracle import table_depths
from recording import Small, row
from torch import nn
from torch.utils.checkpoint import checkpoint

import statsbridge
from statsbridge import ConfigError, StatsBridgeWarning

Record = Callable[..., statsbridge.Run]


class Restless(nn.Module):
    """A forward that changes everything it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.embed = nn.Embedding(9, 4, max_norm=0.1)  # shrinks its own weight in place
        self.linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.drop = nn.Dropout(0.5)
        self.register_buffer("average", torch.zeros(4))
        self.plain = torch.zeros(4)
        self.calls = 0
        self.seen: list[float] = []
        self.last: Any = None
        self.recent = deque([1.0], maxlen=2)
        self.average: torch.Tensor

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        x.mul_(scale)
        self.average.data.mul_(0.9).add_(x.mean(0).detach())
        self.plain += 1
        self.seen.append(random.random() + float(np.random.rand()))
        self.recent.append(2.0)
        y = self.drop(self.linear(self.norm(x) + self.embed(tokens)))
        self.last = y
        self.extra = nn.Linear(2, 2) if not hasattr(self, "extra") else self.extra
        y.sum().backward(retain_graph=True)
        self.train(False)
        return y


def everything(model: Restless) -> dict[str, Any]:
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "others": (model.calls, list(model.seen), list(model.recent), model.last, model.plain.clone()),
        "generators": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),  # type: ignore[index]
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def test_nothing_of_the_model_is_changed() -> None:
    model = Restless()
    model.norm.weight.grad = torch.full((4,), 7.0)
    gradient = model.norm.weight.grad
    x, tokens = torch.randn(6, 4), torch.randint(0, 9, (6,))
    given = x.clone()
    before, versions = everything(model), [p._version for p in model.linear.parameters()]
    table = statsbridge.trace(model, x, tokens, scale=2.0)
    assert same(before, everything(model))
    assert torch.equal(x, given)
    assert model.norm.weight.grad is gradient
    assert [p._version for p in model.linear.parameters()] == versions, "a graph that the user holds is still good"
    depth = table_depths(table)
    assert (depth["norm", 0], depth["embed", 0], depth["linear", 0], depth["drop", 0]) == (1, 1, 2, 3)
    changed = everything(model)
    model(x, tokens, scale=2.0)
    assert not any(same(changed[key], everything(model)[key]) for key in changed), "this forward changes everything"


def test_a_graph_that_the_user_holds_survives() -> None:
    model = Small()
    loss = model(torch.randn(4, 8)).sum()
    statsbridge.trace(model, torch.randn(4, 8))
    loss.backward()


def test_the_table_has_the_columns_of_a_recorded_run(record: Record) -> None:
    torch.manual_seed(0)
    model, x = Small(), torch.randn(4, 8)
    model.unused = nn.Linear(2, 2)
    table = statsbridge.trace(model, x)
    run = record(model)
    model(x).sum().backward()
    run.step()
    run.finish()
    recorded = statsbridge.load(run.path).modules
    assert table.schema.equals(recorded.schema, check_metadata=False)
    assert table.drop_columns("step").to_pylist() == recorded.drop_columns("step").to_pylist()
    assert table["step"].null_count == table.num_rows


def test_a_pass_that_is_traced_is_in_no_record(record: Record) -> None:
    model = Small()
    run = record(model)
    model(torch.randn(4, 8)).sum().backward()
    statsbridge.trace(model, torch.randn(99, 8))
    run.step()
    run.finish()
    assert row(statsbridge.load(run.path), module="first", site="activation")["count"] == 4 * 16


def test_eval_mode_no_grad_and_checkpoints_are_traced_all_the_same() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(checkpoint(self.a, x, use_reentrant=False))

    model = Model().eval()
    with torch.no_grad():
        assert table_depths(statsbridge.trace(model, torch.randn(2, 3))) == {("a", 0): 1, ("b", 0): 2, ("", 0): 2}
    assert not torch.overrides._get_current_function_mode_stack()


def test_wrappers_are_traced_by_what_they_wrap() -> None:
    inner = Small()
    plain = statsbridge.trace(inner, torch.randn(4, 8))
    for wrapper in (nn.DataParallel(inner), torch.compile(inner)):
        assert statsbridge.trace(wrapper, torch.randn(4, 8)).equals(plain)


def test_a_model_compiled_in_place_is_traced_eagerly_and_stays_compiled() -> None:
    model = Small()
    plain = statsbridge.trace(copy.deepcopy(model), torch.randn(4, 8))
    compiled: list[int] = []
    model.compile(backend=lambda graph, _: compiled.append(1) or graph.forward)
    assert statsbridge.trace(model, torch.randn(4, 8)).equals(plain)
    assert not compiled
    model(torch.randn(4, 8))
    assert compiled
    torch.save(model.state_dict(), io.BytesIO())


@pytest.mark.parametrize(
    ("model", "inputs", "error", "said"),
    [
        ("resnet", (), ConfigError, "model is a str: give one torch.nn.Module"),
        ({"a": nn.Linear(2, 2)}, (), ConfigError, "model is a dict"),
        (nn.Sequential(nn.LazyLinear(3)), (torch.ones(1, 2),), ConfigError, "lazy modules"),
        (nn.Linear(2, 2), (torch.ones(1, 3),), RuntimeError, "cannot be multiplied"),
        (nn.Linear(2, 2), (), TypeError, "missing 1 required positional argument"),
    ],
)
def test_what_cannot_be_traced_says_why(model: Any, inputs: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        statsbridge.trace(model, *inputs)
    if error is not ConfigError:
        note = "Tensor[1, 3] of torch.float32" if inputs else "no inputs"
        assert caught.value.__notes__ == [f"statsbridge.trace called the model with {note}"]
    assert not torch.overrides._get_current_function_mode_stack()


def test_an_interrupt_leaves_nothing_behind() -> None:
    class Interrupted(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first(x)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        statsbridge.trace(Interrupted(), torch.randn(2, 8))
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_tracer_that_fails_gives_the_order_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from statsbridge.collect.order import DepthTracer

    def broken(self: DepthTracer, *_: Any) -> int:
        raise RuntimeError("injected")

    monkeypatch.setattr(DepthTracer, "_exit", broken)
    with pytest.warns(StatsBridgeWarning, match="depth could not be traced.*injected"):
        table = statsbridge.trace(Small(), torch.randn(2, 8))
    assert table["order"].to_pylist() == [0, 1, 2, 3, 4]
    assert set(table["order_source"].to_pylist()) == {"execution"}
    assert table["depth"].null_count == 5

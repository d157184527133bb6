"""`torch.compile`: sampled steps are recorded whole, all others run compiled, and nothing is compiled again."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from recording import events, rows, scalars
from torch import nn
from torch.utils.checkpoint import checkpoint

import statsbridge
from statsbridge import StatsBridgeWarning

Record = Callable[..., statsbridge.Run]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    assert not runs_eagerly(), "the stance was left behind"
    torch._dynamo.reset()


class Backend:
    """Runs graphs as they are, and counts how many were compiled and how often they ran."""

    def __init__(self) -> None:
        self.graphs = 0
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


def runs_eagerly() -> bool:
    """Whether a compiled function of somebody else runs eagerly now."""
    backend = Backend()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    return backend.calls == 0


class Block(nn.Sequential):
    """torch.compile passes by what is made of torch's own modules alone."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[2](self[1](self[0](x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.fail: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x) + x)
        if self.fail is not None:
            raise self.fail
        return y


def compiled_outside(model: nn.Module, backend: Any) -> tuple[nn.Module, nn.Module]:
    return model, torch.compile(model, backend=backend)  # type: ignore[return-value]


def compiled_wrapper(model: nn.Module, backend: Any) -> tuple[nn.Module, nn.Module]:
    compiled: Any = torch.compile(model, backend=backend)
    return compiled, compiled


def compiled_in_place(model: nn.Module, backend: Any) -> tuple[nn.Module, nn.Module]:
    model.compile(backend=backend)
    return model, model


def compiled_blocks(model: Any, backend: Any) -> tuple[nn.Module, nn.Module]:
    model.first = torch.compile(model.first, backend=backend)
    model.second.compile(backend=backend)
    return model, model


def compiled_forward(model: Any, backend: Any) -> tuple[nn.Module, nn.Module]:
    model.forward = torch.compile(model.forward, backend=backend)
    return model, model


def compiled_with_a_key(model: nn.Module, backend: Any) -> tuple[Any, nn.Module]:
    given, called = compiled_wrapper(model, backend)
    return {"net": given}, called


#: What torch.compile is applied to: from a model to what init() is given, and what the loop calls.
MODELS = {
    "torch.compile, init(compiled)": compiled_wrapper,
    "torch.compile, init(model)": compiled_outside,
    "model.compile()": compiled_in_place,
    "blocks": compiled_blocks,
    "model.forward": compiled_forward,
    "a dict of models": compiled_with_a_key,
}


class Loop:
    """A training of seven steps, the same for every way to compile, with a validation pass after each."""

    def __init__(self, how: str, record: Record | None, **options: Any) -> None:
        torch.manual_seed(5)
        self.backend = Backend()
        model = Model()
        self.model = model
        given, called = MODELS[how](model, self.backend) if how in MODELS else (model, model)
        self.called = called
        self.run = None if record is None else record(given, every=3, **options)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.step: Callable[[torch.Tensor], torch.Tensor] = self._step
        if how == "loss":
            self._loss = torch.compile(self._loss, backend=self.backend)  # type: ignore[method-assign]
        elif how == "whole step":
            self.step = torch.compile(self._step, backend=self.backend)
        self.sampling = how in ("loss", "whole step")

    def _loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(x).pow(2).mean()  # type: ignore[no-any-return]

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self._loss(x)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def validate(self) -> torch.Tensor:
        self.called.eval()
        with torch.no_grad():
            loss = self._loss(torch.ones(4, 6))
        self.called.train()
        return loss

    def train(self) -> tuple[list[float], list[int], list[int]]:
        """Losses, and how many compiled graphs ran in each training step and in each validation pass."""
        losses, training, validating = [], [], []
        for _ in range(7):
            x = torch.randn(8, 6)
            before = self.backend.calls
            with self.run.sampling() if self.run is not None and self.sampling else nullcontext():
                loss = self.step(x)
            training.append(self.backend.calls - before)
            if self.run is not None:
                self.run.step(loss=loss)
            before = self.backend.calls
            losses += [loss.item(), self.validate().item()]
            validating.append(self.backend.calls - before)
        return losses, training, validating


WAYS = [*MODELS, "loss", "whole step"]


@pytest.mark.parametrize("how", WAYS)
def test_sampled_steps_are_recorded_and_all_others_run_compiled(how: str, record: Record) -> None:
    plain = Loop(how, None)
    plain_losses, plain_training, plain_validating = plain.train()
    torch._dynamo.reset()
    loop = Loop(how, record)
    losses, training, validating = loop.train()
    assert loop.run is not None
    # Of a whole step there is one graph less: the first step, without momentum, was never compiled.
    assert loop.backend.graphs == plain.backend.graphs - (how == "whole step"), "something was compiled once more"
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), plain.model.parameters(), strict=True))
    assert [n for step, n in enumerate(training) if step % 3 == 0] == [0, 0, 0], "a sampled step ran compiled"
    assert [n for step, n in enumerate(training) if step % 3] == [plain_training[1]] * 4
    assert validating == plain_validating, "a validation pass ran eagerly"
    graphs = loop.backend.graphs
    loop.run.finish()
    loop.step(torch.randn(8, 6))
    loop.validate()
    assert loop.backend.graphs == graphs, "the end of the run has made torch.compile start anew"

    eager = Loop("eager", record)
    eager.train()
    assert eager.run is not None
    eager.run.finish()
    expected, found = (statsbridge.load(loop.run.path) for loop in (eager, loop))
    prefix = "net" if how == "a dict of models" else ""

    def numbers(data: statsbridge.RunData) -> dict[tuple[Any, ...], dict[str, Any]]:
        made = {}
        for r in rows(data):
            module = r["module"].removeprefix(prefix).lstrip(".")
            made[r["step"], module, r["call"], r["site"], r["tensor"]] = {
                name: value for name, value in r.items() if name not in ("module", "seq", "time")
            }
        return made

    assert numbers(found) == numbers(expected)
    assert {key[0] for key in numbers(found)} == {0, 3, 6}
    assert scalars(found.scalars, "loss") == scalars(expected.scalars, "loss")
    assert events(found, "internal_error") == []


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("how", WAYS)
def test_what_ends_a_sampled_step_early_leaves_no_eager_mode_on(how: str, error: BaseException, record: Record) -> None:
    loop = Loop(how, record, order="execution")
    assert loop.run is not None
    loop.model.fail = error
    with pytest.raises(type(error)), loop.run.sampling() if loop.sampling else nullcontext():
        loop.step(torch.randn(8, 6))
    if how != "torch.compile, init(model)" or isinstance(error, Exception):
        assert not runs_eagerly()
    loop.model.fail = None
    loop.train()
    loop.run.finish()
    found = rows(statsbridge.load(loop.run.path), site="activation", type="ReLU", step=0)
    assert [r["count"] for r in found] == [8 * 6] * 2


def test_a_wrapper_unknown_to_init_is_left_at_the_next_call(record: Record) -> None:
    """`init(model)` and a loop that calls `torch.compile(model)`: no hook runs after an interrupt."""
    loop = Loop("torch.compile, init(model)", record)
    assert loop.run is not None
    loop.model.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        loop.step(torch.randn(8, 6))
    assert runs_eagerly(), "there is nothing to be left"
    loop.model.fail = None
    loop.validate()
    assert loop.backend.calls == 1
    assert not runs_eagerly()
    loop.train()
    while not loop.run._collector.is_open:
        loop.run.step()
    loop.model.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        loop.step(torch.randn(8, 6))
    assert not runs_eagerly(), "by now the wrapper is known"


def test_the_end_of_a_step_leaves_what_an_interrupt_left(record: Record) -> None:
    for end in ("step", "finish"):
        loop = Loop("torch.compile, init(model)", record)
        loop.model.fail = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            loop.step(torch.randn(8, 6))
        assert runs_eagerly()
        getattr(loop.run, end)()
        assert not runs_eagerly()


@pytest.mark.parametrize("how", ["loss", "whole step"])
@pytest.mark.parametrize("given", [True, False])
def test_a_compiled_step_without_sampling_is_said_once(how: str, given: bool, record: Record) -> None:
    plain = Loop(how, None)
    losses = plain.train()[0]
    torch._dynamo.reset()
    loop = Loop(how, record)
    loop.sampling = False
    assert loop.run is not None
    if given:
        loop.run._collector.optimizers.add(loop.optimizer)
    with pytest.warns(StatsBridgeWarning, match=r"`with run.sampling\(\):`") as warned:
        found, training, _ = loop.train()
    assert len([w for w in warned if issubclass(w.category, StatsBridgeWarning)]) == 1
    loop.run.finish()
    assert found == losses
    assert loop.backend.graphs == plain.backend.graphs
    assert min(training) > 0
    data = statsbridge.load(loop.run.path)
    assert {event["kind"] for event in data.events.to_pylist()} == {"compiled_not_recorded"}
    assert {r["status"] for r in rows(data, site="activation")} == {"not_called"}


def test_a_model_compiled_after_init_is_recorded_from_the_next_sampled_step_on(record: Record) -> None:
    model = Model()
    run = record(model, every=2)
    backend = Backend()
    model.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(StatsBridgeWarning, match="after compiling it"):
        for _ in range(4):
            model(torch.randn(8, 6)).sum().backward()
            optimizer.step()
            run.step()
    run.finish()
    assert backend.graphs == 1
    data = statsbridge.load(run.path)
    assert [event["step"] for event in events(data, "compiled_not_recorded")] == [0]
    assert {r["step"] for r in rows(data, site="activation", status=None)} == {2}


@pytest.mark.parametrize("how", ["model.compile()", "torch.compile, init(compiled)", "blocks"])
def test_two_runs_at_once_that_end_one_inside_the_other(how: str, record: Record) -> None:
    torch.manual_seed(0)
    backend = Backend()
    given, called = MODELS[how](Model(), backend)
    before = {id(module): module._compiled_call_impl for module in given.modules()}
    one = record(given, every=1)
    two = record(given, every=2)
    x = torch.randn(8, 6)
    for number in range(4):
        called(x).sum().backward()
        one.step()
        if number == 1:
            one.finish()
        two.step()
    two.finish()
    assert {id(module): module._compiled_call_impl for module in given.modules()} == before
    assert not runs_eagerly()
    called(x)
    assert backend.calls > 0
    for run, steps in ((one, {0, 1}), (two, {0, 2})):
        found = rows(statsbridge.load(run.path), site="activation", type="ReLU", status=None)
        assert {r["step"] for r in found} == steps
        assert len(found) == 2 * len(steps)


def test_a_compiled_model_copies_and_pickles_inside_a_sampled_step(record: Record) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    model.compile(backend="eager")
    run = record(model)
    assert vars(model)["_compiled_call_impl"] is not None
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._compiled_call_impl is None
        other(torch.ones(3, 6))
    torch.save(model, io.BytesIO())

    class OwnState(Model):
        def __getstate__(self) -> dict[str, Any]:
            return vars(self).copy()

    own = OwnState()
    own.first = torch.compile(own.first, backend="eager")  # type: ignore[assignment]
    other_run = record(own)
    assert copy.deepcopy(own)._compiled_call_impl is None
    other_run.finish()
    model(torch.ones(4, 6)).sum().backward()
    run.step()
    run.finish()
    (found,) = rows(statsbridge.load(run.path), module="1", site="activation")
    assert found["count"] == 4 * 6


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("place", [compiled_wrapper, compiled_in_place])
def test_a_compiled_block_inside_a_checkpoint(place: Any, reentrant: bool, record: Record) -> None:
    """The recompute, which runs in the backward pass, has to run as the forward pass did."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Checkpointed()
    plain = copy.deepcopy(model.inner)
    backend = Backend()
    model.inner = place(model.inner, backend)[1]
    run = record(model, every=2)
    for number in range(3):
        x = torch.randn(8, 6, requires_grad=True)
        before = backend.calls
        model(x).pow(2).sum().backward()
        assert (backend.calls > before) == (number == 1)
        run.step()
        if number == 0:
            first = x
    run.finish()
    hidden = plain[0](first)
    (expected,) = torch.autograd.grad(plain[2](hidden.relu()).pow(2).sum(), hidden)
    found = rows(statsbridge.load(run.path), module="inner.0", site="activation_grad", step=0)
    assert [r["status"] for r in found] == [None]
    assert found[0]["l2"] == pytest.approx(expected.norm().item(), rel=1e-5)


def test_learning_rates_of_compiled_steps_are_right_or_missing(record: Record) -> None:
    for sampling in (True, False):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0) if not sampling else 1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        run = record(model, every=4, optimizer=optimizer, alerts=False)
        rates = {}

        def step(x: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        compiled = torch.compile(step, backend="eager")
        for number in range(6):
            rates[number] = float(optimizer.param_groups[0]["lr"])
            if sampling or number % 4 == 0:
                with run.sampling():
                    compiled(torch.randn(3, 4))
            else:
                compiled(torch.randn(3, 4))
            scheduler.step()
            run.step()
        run.finish()
        found = scalars(statsbridge.load(run.path).scalars, "lr/0")
        assert found.items() <= {k: pytest.approx(v) for k, v in rates.items()}.items() or sampling
        assert {step: found[step] for step in found} == {step: pytest.approx(rates[step]) for step in found}
        assert set(found) == (set(range(6)) if sampling else {0, 4})


def test_hand_logged_tensors_inside_compiled_code(record: Record) -> None:
    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            run.log_tensor("inside", y)
            return y.relu()

    backend = Backend()
    model = Logging()
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    run = record(compiled, every=3)
    for _ in range(7):
        compiled(torch.randn(5, 4)).sum().backward()
        run.step()
    run.finish()
    compiled(torch.randn(5, 4)).sum().backward()
    assert backend.graphs == 1
    assert [r["step"] for r in rows(statsbridge.load(run.path), site="tensor", tensor="inside")] == [0, 3, 6]


def test_a_compiled_optimizer_step(record: Record) -> None:
    """Our hooks on optimizers stay for the whole run: compiled code has no graph more for them."""

    def train(run: statsbridge.Run | None, model: nn.Module) -> Backend:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backend = Backend()
        compiled = torch.compile(optimizer.step, backend=backend)
        for _ in range(4):
            optimizer.zero_grad()
            with nullcontext() if run is None else run.sampling():
                model(torch.randn(3, 4)).sum().backward()
                compiled()
            if run is not None:
                run.step()
        return backend

    plain = train(None, nn.Linear(4, 2))
    torch._dynamo.reset()
    model = nn.Linear(4, 2)
    run = record(model, every=2)
    backend = train(run, model)
    run.finish()
    assert (backend.graphs, 2 * backend.calls) == (plain.graphs, plain.calls)
    data = statsbridge.load(run.path)
    assert {r["step"] for r in rows(data, site="update", status=None)} == {0, 2}


@pytest.mark.parametrize("how", list(MODELS))
def test_whole_graphs_stay_whole(how: str, record: Record) -> None:
    """With `fullgraph=True` torch raises where anything breaks the graph, and where a call compiled nothing."""
    backend = Backend()
    given, called = MODELS[how](Model(), backend)
    torch._dynamo.reset()
    real = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda *args, **options: real(*args, fullgraph=True, **options))
        given, called = MODELS[how](Model(), backend)
    run = record(given, every=2)
    for _ in range(4):
        called(torch.randn(8, 6)).sum().backward()
        run.step()
        called.eval()
        called(torch.randn(8, 6))
        called.train()
    run.finish()
    assert {r["step"] for r in rows(statsbridge.load(run.path), type="ReLU", site="activation")} == {0, 2}


def test_what_torch_says_about_global_hooks_is_not_heard(record: Record) -> None:
    kept = list(warnings.filters)
    model, compiled = compiled_outside(Model(), "eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = record(model)
        for _ in range(3):
            compiled(torch.randn(8, 6)).sum().backward()
            run.step()
        run.finish()
    assert list(warnings.filters) == kept
    blocks, called = compiled_blocks(Model(), "eager")
    run = record(blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # set inside the sampled step: comes before anything set earlier
        called(torch.randn(8, 6)).sum().backward()
    run.step()
    run.finish()
    assert list(warnings.filters) == kept


def test_warnings_said_once_are_said_once(record: Record) -> None:
    """A change by `warnings.filterwarnings` would bring each of them back at every sampled step."""
    _, compiled = compiled_outside(Model(), "eager")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        run = record(compiled)
        for _ in range(3):
            compiled(torch.randn(8, 6)).sum().backward()
            warnings.warn("of the user", UserWarning, stacklevel=1)
            run.step()
        run.finish()
    assert [str(warning.message) for warning in heard] == ["of the user"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch.compile, init(compiled)", "model.compile()"])
def test_a_sampled_step_of_inductor_is_the_eager_step_to_the_bit(how: str, record: Record) -> None:
    torch.manual_seed(2)
    given, called = MODELS[how](Model(), "inductor")
    plain = Model()
    run = record(given, every=2)
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
    plain.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in given.state_dict().items()})
    for number in range(4):
        x = torch.randn(64, 6)
        expected = plain(x).pow(2).mean()
        loss = called(x).pow(2).mean()
        if number % 2 == 0:
            assert torch.equal(loss, expected)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        plain.zero_grad()
        expected.backward()
        for ours, theirs in zip(given.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            if number % 2 == 0:
                assert torch.equal(ours.grad, theirs.grad)
            torch.testing.assert_close(ours.grad, theirs.grad)
        optimizer.step()
        run.step(loss=loss)
        plain.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in given.state_dict().items()})
    run.finish()
    assert {r["step"] for r in rows(statsbridge.load(run.path), status=None)} == {0, 2}

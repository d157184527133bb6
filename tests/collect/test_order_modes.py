"""The stack of torch function modes, and failures of our own: other people see nothing of either."""

from typing import Any

import pytest
import torch
from collect.models import (
    Plain,
    Traced,
    depths,
    first_calls,
    linear,
    rows,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from statsbridge.collect.modules import ModuleIndex
from statsbridge.collect.order import DepthTracer


class Foreign(TorchFunctionMode):
    """Somebody else's mode; counts what it sees."""

    def __init__(self) -> None:
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def stack() -> list[Any]:
    return [torch._C._get_function_stack_at(n) for n in range(torch._C._len_torch_function_stack())]


class Interrupted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def empty_stack() -> Any:
    assert stack() == []
    yield
    assert stack() == []


def chain(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), *more)


def test_a_mode_around_the_model_sees_what_it_would_without_us() -> None:
    model = chain()
    with Foreign() as alone:
        model(rows())
    index = ModuleIndex(model)
    with Foreign() as around, Traced(model, index) as traced:
        model(rows())
        assert stack() == [around]
    assert traced.depth["1", 0] == 2
    assert around.seen == alone.seen


def test_a_mode_inside_the_model_stays_where_it_is() -> None:
    inside = Foreign()

    def run(m: Any, x: Tensor) -> Tensor:
        with inside:
            x = m.a(x)
        inside.__enter__()
        return m.b(x)

    model = Plain(run, **linear("a", "b"))
    with Traced(model) as traced:
        model(rows())
    assert stack() == [inside]
    inside.__exit__(None, None, None)
    assert first_calls(traced.depth) == {"a": 1, "b": 2, "": 2}


def test_an_interrupt_skips_the_hooks_and_stop_clears_what_is_left() -> None:
    model = chain(Interrupted())
    with Traced(model) as traced:
        with pytest.raises(KeyboardInterrupt), Foreign():
            model(rows())
        assert [type(mode).__name__ for mode in stack()] == ["_TaggingMode"]
        with Foreign() as above:
            traced.tracer.stop()
            assert stack() == [above]
        traced.tracer.stop()


def test_an_interrupt_that_the_model_catches() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        try:
            m.broken(x)
        except KeyboardInterrupt:
            x = m.a(x)
        return m.b(x)

    model = Plain(run, broken=chain(Interrupted()), **linear("a", "b"))
    depth = depths(model, rows())
    assert (depth["a", 0], depth["b", 0], depth["", 0]) == (1, 2, 2)


def test_the_default_device_stays_at_the_bottom() -> None:
    torch.set_default_device("cpu")
    try:
        bottom = stack()
        with Traced(model := chain(Interrupted())), pytest.raises(KeyboardInterrupt):
            model(rows())
        assert stack() == bottom
        tracer = DepthTracer()
        tracer.start()
        torch.set_default_device(None)
        tracer.stop()
    finally:
        torch.set_default_device(None)


def test_start_and_stop_may_be_called_again() -> None:
    tracer = DepthTracer()
    tracer.start()
    tracer.start()
    assert len(stack()) == 1
    tracer.stop()
    tracer.stop()


class Trap(dict[str, Any]):
    """An output that cannot be read."""

    def items(self) -> Any:
        raise OSError("do not touch")


def test_our_own_failure_is_kept_from_the_model() -> None:
    model = Plain(lambda m, x: m.b(m.inner(x)["y"]), inner=Plain(lambda m, x: Trap(y=2 * x)), **linear("b"))
    x = rows()
    with Traced(model) as traced:
        output = model(x)
    assert torch.equal(output, model.b(2 * x))
    assert isinstance(traced.tracer.failed, OSError)
    assert traced.tracer.failed.__traceback__ is None
    assert "do not touch" in traced.tracer.failed.__notes__[0] or "items" in traced.tracer.failed.__notes__[0]

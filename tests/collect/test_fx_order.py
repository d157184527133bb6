"""Order and depth by torch.fx, against the running model."""

from typing import Any

import pytest
import torch
from collect.models import (
    Branches,
    One,
    ResNet,
    Traced,
    UNet,
    linear,
    rows,
)
from torch import Tensor, nn

from statsbridge import ConfigError
from statsbridge.collect.fx_order import fx_order
from statsbridge.collect.modules import ModuleIndex


def traceable() -> dict[str, tuple[nn.Module, Tensor]]:
    return {
        "unet": (UNet(), torch.randn(2, 1, 8, 8)),
        "resnet": (ResNet(), torch.randn(2, 1, 8, 8)),
        "reuse": (One(lambda m, x: m.a(m.b(m.a(x))) + m.b(x), **linear("a", "b")), rows()),
        "optional argument": (
            One(lambda m, x: m.b(m.a(x)), **linear("a", "b")),
            rows(),
        ),
        "in place": (
            One(lambda m, x: m.b(x) + m.a(x).add_(m.b(m.a(x))) + m.end(x), **linear("a", "b", "end")),
            rows(),
        ),
        "in place, then read": (One(added_in_place, **linear("a", "b", "end")), rows()),
        "in-place module": (
            One(lambda m, x: m.end(x) if m.relu(x) is not None else x, relu=nn.ReLU(True), **linear("end")),
            rows(),
        ),
        "shapes": (
            One(lambda m, x: m.b(x.view(m.a(x).size(0), -1) + torch.zeros_like(m.a(x))), **linear("a", "b")),
            rows(),
        ),
        "attention": (
            One(
                lambda m, x: m.end(m.attention(x, m.a(x), x, need_weights=False)[0] + x),
                attention=nn.MultiheadAttention(3, 1, batch_first=True),
                **linear("a", "end"),
            ),
            torch.randn(2, 4, 3),
        ),
        "tuples": (
            One(lambda m, x: m.end(m.lstm(m.a(x))[1][0]), lstm=nn.LSTM(3, 3), **linear("a", "end")),
            torch.randn(2, 4, 3),
        ),
        "dictionary": (
            One(
                lambda m, x: m.end(m.inner(x)["deep"][0]),
                inner=One(lambda m, x: {"deep": [m.b(m.a(x))], "flat": x}, **linear("a", "b")),
                **linear("end"),
            ),
            rows(),
        ),
        "identity in a chain": (
            nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Dropout(0.0), nn.Tanh()),
            rows(),
        ),
    }


def added_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.add_(m.b(m.a(x)))
    return m.end(y)


@pytest.mark.parametrize("name", traceable())
def test_the_running_model_and_fx_agree_on_every_call(name: str) -> None:
    model, x = traceable()[name]
    index = ModuleIndex(model)
    static = fx_order(model, index)
    with Traced(model, index) as traced:
        model(x)
    names = {(index.entries[at].name, call): place for (at, call), place in static.items()}
    assert names == {key: (traced.order[key], traced.depth[key]) for key in traced.order}


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (Branches(), "the root (Branches)"),
        (nn.Sequential(nn.Linear(3, 3), Branches()), "1 (Branches)"),
    ],
)
def test_what_fx_cannot_trace_is_named_with_the_way_out(model: nn.Module, where: str) -> None:
    with pytest.raises(ConfigError, match='order="auto"') as caught:
        fx_order(model, ModuleIndex(model))
    assert where in str(caught.value)


def test_fx_leaves_nothing_on_the_model() -> None:
    def remember(m: Any, x: Tensor) -> Tensor:
        m.last = m.a(x)
        return m.last

    model = One(remember, **linear("a"))
    fx_order(model, ModuleIndex(model))
    assert not hasattr(model, "last")


def test_fx_takes_a_compiled_wrapper_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    found = fx_order(torch.compile(model), ModuleIndex(model))
    assert found == {(1, 0): (0, 1), (2, 0): (1, 2), (0, 0): (2, 2)}

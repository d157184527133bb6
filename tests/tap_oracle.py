"""An independent oracle: what every module puts out and the gradient that comes back, by a tap on a second model.

A tap is an autograd function that copies. After it an in-place operation changes the copy, and no output is a view,
so the value and the gradient are those of what the module returned, whatever happens to it later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

Taps = dict[tuple[str, int, str], "Tapped"]


@dataclasses.dataclass
class Tapped:
    """One output of one call: all values that were put out, and all gradients that came back."""

    values: list[torch.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[torch.Tensor] = dataclasses.field(default_factory=list)


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tapped: Tapped) -> torch.Tensor:
        ctx.tapped = tapped
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        ctx.tapped.gradients.append(gradient.detach().clone())
        return gradient, None


def tap(model: nn.Module) -> Taps:
    """Tap every module of a model; the dict fills as the model runs.

    Keys: module path, call within one forward of the root, path of the output (`""` for a single tensor). A model
    that goes on using a tensor it has put out, or a view of one, is another model with taps: not for this oracle.
    """
    taps: Taps = {}
    calls: dict[str, int] = {}

    def start(_module: nn.Module, _args: Any) -> None:
        calls.clear()

    def after(name: str) -> Callable[..., Any]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            call = calls.get(name, 0)
            calls[name] = call + 1
            return _replace(output, "", lambda path, x: _tapped(x, taps.setdefault((name, call, path), Tapped())))

        return hook

    model.register_forward_pre_hook(start)
    for name, module in model.named_modules():
        module.register_forward_hook(after(name))
    return taps


def _tapped(x: torch.Tensor, tapped: Tapped) -> torch.Tensor:
    tapped.values.append(x.detach().clone())
    return _Tap.apply(x, tapped) if x.requires_grad else x  # type: ignore[no-any-return]


def _replace(value: Any, path: str, make: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    def child(key: object, inner: Any) -> Any:
        return _replace(inner, f"{path}.{key}" if path else str(key), make)

    if isinstance(value, torch.Tensor):
        return make(path, value)
    if isinstance(value, Mapping):
        changed = {key: child(key, inner) for key, inner in value.items()}
        return type(value)(**changed) if dataclasses.is_dataclass(value) else type(value)(changed)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names = ["data"] if isinstance(value, PackedSequence) else value._fields
        return value._replace(**{name: child(name, getattr(value, name)) for name in names})  # type: ignore[attr-defined]
    if isinstance(value, (tuple, list)):
        return type(value)(child(key, inner) for key, inner in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: child(name, getattr(value, name)) for name in names})
    return value


def expected_rows(taps: Taps) -> Iterator[tuple[str, int, str, str, list[torch.Tensor]]]:
    """Module, call, path, site, and the tensors whose elements together are what the row is about."""
    for (module, call, path), tapped in taps.items():
        yield module, call, path, "activation", tapped.values
        if tapped.values[0].is_floating_point():
            yield module, call, path, "activation_grad", tapped.gradients


def check_numbers(row: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
    """Mean, spread, norm, extremes and count of a row against float64 numpy over the finite elements."""
    flat = np.concatenate([t.detach().to(torch.float64).to_dense().numpy().ravel() for t in tensors])
    x = flat[np.isfinite(flat)]
    assert row["status"] is None, (row["module"], row["call"], row["site"], row["tensor"], row["status"])
    assert row["count"] == flat.size
    assert row["nan_count"] == np.isnan(flat).sum()
    assert row["inf_count"] == np.isinf(flat).sum()
    scale = max(x.std(), abs(x.mean()), 1e-30)
    assert row["mean"] == pytest.approx(x.mean(), abs=2e-5 * scale)
    assert row["std"] == pytest.approx(x.std(), abs=2e-5 * scale)
    assert row["l2"] == pytest.approx(np.linalg.norm(x), rel=2e-5)
    assert row["min"] == pytest.approx(x.min(), rel=1e-6)
    assert row["max"] == pytest.approx(x.max(), rel=1e-6)
    assert row["zero_fraction"] == pytest.approx((x == 0).mean(), abs=1e-9)

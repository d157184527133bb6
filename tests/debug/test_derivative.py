"""One derivative judged: closed forms, kinks, rounding, jumps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from statsbridge.debug.derivative import compare

SMOOTH: dict[str, tuple[Callable[[float], float], float]] = {
    "sine": (lambda x: math.sin(1 + x), math.cos(1)),
    "exponential": (lambda x: math.exp(3 * x), 3.0),
    "cube": (lambda x: (2 + x) ** 3, 12.0),
    "logarithm": (lambda x: -math.log(0.3 + x), -1 / 0.3),
    "constant": (lambda x: 5.0, 0.0),
    "beside something large": (lambda x: 1e4 + math.sin(x), 1.0),
    "steep": (lambda x: 1e8 * math.tanh(x), 1e8),
    "gentle": (lambda x: 1e-8 * math.tanh(x), 1e-8),
    "kink far away": (lambda x: max(0.0, x + 0.5) * 2, 2.0),
}


@pytest.mark.parametrize("kind", SMOOTH)
def test_the_right_derivative_is_right(kind: str) -> None:
    function, derivative = SMOOTH[kind]
    found = compare(derivative, function, function(0.0), 1.0)
    assert found.verdict == "right"
    assert found.difference is not None
    assert found.difference < 1e-5
    assert found.numeric == pytest.approx(derivative, rel=1e-5)


@pytest.mark.parametrize("factor", [-1.0, 0.0, 0.5, 0.99, 1.01, 2.0, 1e6])
@pytest.mark.parametrize("kind", [kind for kind in SMOOTH if kind != "constant"])
def test_a_wrong_derivative_is_wrong(kind: str, factor: float) -> None:
    function, derivative = SMOOTH[kind]
    found = compare(factor * derivative, function, function(0.0), 1.0)
    assert found.verdict == "wrong"
    assert found.numeric == pytest.approx(derivative, rel=1e-4)
    largest = max(abs(derivative), abs(factor * derivative))
    assert found.difference == pytest.approx(abs(1 - factor) * abs(derivative) / largest, rel=1e-2)


def test_a_derivative_of_what_does_not_change_is_wrong() -> None:
    assert compare(0.1, lambda x: 5.0, 5.0, 1.0).verdict == "wrong"


@pytest.mark.parametrize(
    ("reason", "function", "autograd"),
    [
        ("kink", lambda x: max(0.0, x), 0.0),
        ("kink", lambda x: max(0.0, x), 1.0),
        ("kink", lambda x: 1 + abs(x) + x, 0.0),
        ("rounding", lambda x: 1e8 + 1e-9 * x, 1e-9),
        ("flat", lambda x: round(1 + x, 1), 1.0),
        ("flat", lambda x: float(np.float16(1 + x)) if abs(x) < 1e-4 or abs(x) > 0.5 else 1.0, 1.0),
        ("small", lambda x: 1 + 2 * x, 2.0005),
        ("unstable", lambda x: float(np.float32(math.sin(1 + x))), math.cos(1) * 1.001),
        ("not finite", lambda x: math.log(x) if x > 0 else math.nan, 1.0),
        ("not finite", lambda x: math.inf, 1.0),
    ],
)
def test_what_cannot_be_told_is_left_undecided(
    reason: str, function: Callable[[float], float], autograd: float
) -> None:
    found = compare(autograd, function, function(0.0) if reason != "not finite" else 0.0, 1.0)
    assert (found.verdict, found.reason) == ("undecided", reason)


@pytest.mark.parametrize("place", [1e-4, 1e-5, 1e-6, 1e-8])
def test_a_kink_nearby_is_no_fault(place: float) -> None:
    """Steps small enough stay on one side of it."""

    def function(x: float) -> float:
        return 3 * max(0.0, x + place) + math.sin(x)

    assert compare(4.0, function, function(0.0), 1.0).verdict != "wrong"


def test_the_unit_scales_the_steps() -> None:
    seen: list[float] = []

    def function(x: float) -> float:
        seen.append(x)
        return x

    compare(5.0, function, 0.0, 100.0)
    assert sorted({abs(step) for step in seen if step}) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1])


@pytest.mark.parametrize("autograd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [math.sin, lambda x: math.sqrt(x) if x >= 0 else math.nan], ids=["smooth", "sqrt"])
def test_what_is_not_finite_is_the_derivative_of_nothing(autograd: float, at: Callable[[float], float]) -> None:
    found = compare(autograd, at, at(0.0), 1.0)
    assert found.verdict == "wrong"
    assert found.difference == 1.0

import math

import pytest

from statsbridge.analyze.marks import Thresholds, gradient_ratio_mark, marks


def labels(site: str, type: str = "Linear", **numbers: float) -> list[str]:
    return [mark.rule.label for mark in marks(site, type, numbers)]


def above(limit: float) -> float:
    return math.nextafter(limit, math.inf)


def below(limit: float) -> float:
    return math.nextafter(limit, -math.inf)


@pytest.mark.parametrize(
    ("site", "type", "statistic", "limit", "side", "label", "otherwise"),
    [
        ("activation", "ReLU", "zero_fraction", 0.5, above, "! zeros", None),
        ("activation", "ReLU", "zero_fraction", 0.8, above, "!! dead", "! zeros"),
        ("activation", "Linear", "mean", 10.0, above, "!! large", None),
        ("activation_grad", "Linear", "abs_mean", 1e-7, below, "!! vanishing", None),
        ("activation_grad", "Linear", "abs_mean", 100.0, above, "!! exploding", None),
        ("parameter_grad", "Linear", "abs_mean", 1e-7, below, "!! vanishing", None),
        ("parameter_grad", "Linear", "abs_mean", 100.0, above, "!! exploding", None),
        ("update", "Linear", "update_ratio", 0.1, above, "! large step", None),
        ("update", "Linear", "update_ratio", 1.0, above, "!! diverging", "! large step"),
    ],
)
def test_each_side_of_a_threshold(
    *, site: str, type: str, statistic: str, limit: float, side: object, label: str, otherwise: str | None
) -> None:
    assert callable(side)
    assert labels(site, type, **{statistic: side(limit)}) == [label]
    assert labels(site, type, **{statistic: limit}) == ([otherwise] if otherwise else [])


def test_the_mean_counts_by_magnitude() -> None:
    assert labels("activation", mean=-10.1) == ["!! large"]
    assert labels("activation", mean=-9.9) == []


def test_a_spread_collapses_only_where_there_are_several_elements() -> None:
    assert labels("activation", std=9.9e-7, count=2) == ["!! collapsed"]
    assert labels("activation", std=1e-6, count=2) == []
    assert labels("activation", std=0.0, count=1) == []


@pytest.mark.parametrize(
    ("type", "least", "expected"),
    [
        ("ReLU", 0.0, ["!! dead"]),
        ("ResidualBlock", 0.0, ["!! dead"]),
        ("ResidualBlock", -0.1, []),
        ("Dropout", 0.0, []),
        ("Softmax", 0.0, []),
        ("MultiheadAttention", 0.0, []),
    ],
)
def test_zeros_are_suspicious_only_in_an_output_like_a_relu(type: str, least: float, expected: list[str]) -> None:
    assert labels("activation", type, zero_fraction=0.9, min=least, max=1.0) == expected


def test_an_output_of_zeros_alone_is_collapsed_but_a_dead_relu_only_if_it_is_one() -> None:
    zeros = {"zero_fraction": 1.0, "min": 0.0, "max": 0.0, "std": 0.0, "count": 9.0}
    assert labels("activation", "Conv2d", **zeros) == ["!! collapsed"]
    assert labels("activation", "ReLU", **zeros) == ["!! dead", "!! collapsed"]


@pytest.mark.parametrize("site", ["activation", "parameter", "update", "tensor", "optimizer_state"])
def test_nonfinite_elements_are_critical_everywhere(site: str) -> None:
    assert labels(site, nan_count=1, inf_count=1) == ["!! nan", "!! inf"]
    assert labels(site, nan_count=0, inf_count=0) == []


def test_rules_of_one_site_do_not_reach_another() -> None:
    assert labels("parameter", mean=1e6, std=0.0, zero_fraction=1.0, abs_mean=0.0, count=9, min=0.0) == []


def test_missing_numbers_mark_nothing() -> None:
    assert marks("activation", "ReLU", {"mean": None, "std": None, "zero_fraction": None}) == ()


def test_the_critical_ones_come_first() -> None:
    assert labels("activation", "ReLU", zero_fraction=0.6, std=0.0, count=4) == ["!! collapsed", "! zeros"]


def test_thresholds_are_keywords() -> None:
    (mark,) = marks("update", "Linear", {"update_ratio": 0.01}, Thresholds(update_ratio=0.005))
    assert (mark.rule.name, mark.value, mark.rule.threshold) == ("large step", 0.01, 0.005)
    assert str(mark.rule) == "! large step: update_ratio > 0.005, near 1e-3 is usual"


@pytest.mark.parametrize(
    ("ratio", "label"),
    [
        (1.0, None),
        (100.0, None),
        (above(100.0), "!! exploding"),
        (1 / 100, None),
        (below(1 / 100), "! shrinking"),
        (1 / 1000, "! shrinking"),
        (below(1 / 1000), "!! vanishing"),
    ],
)
def test_gradient_ratio(ratio: float, label: str | None) -> None:
    mark = gradient_ratio_mark(ratio)
    assert (mark and mark.rule.label) == label

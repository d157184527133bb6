"""When a number of one module at one step is suspicious, and what that means. The limits are in `thresholds`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .thresholds import Thresholds

__all__ = ["GRADIENT_SITES", "Mark", "Rule", "Thresholds", "gradient_ratio_mark", "marks"]

Severity = Literal["warning", "critical"]

GRADIENT_SITES = frozenset({"activation_grad", "parameter_grad"})
RELU_LIKE = frozenset({"ReLU", "ReLU6", "Threshold", "Hardswish", "Hardsigmoid", "Hardshrink", "Softshrink"})
# Their exact zeros are meant: dropped units, masked weights.
ZEROS_BY_DESIGN = frozenset(
    {
        "AlphaDropout",
        "Dropout",
        "Dropout1d",
        "Dropout2d",
        "Dropout3d",
        "FeatureAlphaDropout",
        "MultiheadAttention",
        "Softmax",
        "Softmax2d",
    }
)


@dataclass(frozen=True, slots=True)
class Rule:
    """A limit of one statistic: |value| `>` or `<` the threshold is suspicious, and what it means."""

    name: str
    severity: Severity
    statistic: str
    comparison: Literal[">", "<"]
    threshold: float
    meaning: str

    @property
    def label(self) -> str:
        """`! name` for a warning, `!! name` for what is critical."""
        return f"{'!!' if self.severity == 'critical' else '!'} {self.name}"

    def __str__(self) -> str:
        statistic = "|mean|" if self.statistic == "mean" else self.statistic
        return f"{self.label}: {statistic} {self.comparison} {self.threshold:g}, {self.meaning}"

    def holds(self, value: float | None) -> bool:
        if value is None:
            return False
        return abs(value) > self.threshold if self.comparison == ">" else abs(value) < self.threshold


@dataclass(frozen=True, slots=True)
class Mark:
    """One number that broke one rule."""

    rule: Rule
    value: float


def marks(
    site: str, type: str, numbers: Mapping[str, float | None], thresholds: Thresholds | None = None
) -> tuple[Mark, ...]:
    """The marks of one row, the critical ones first.

    Args:
        site: the row's site.
        type: the class name of the row's module.
        numbers: the row's statistics by column name; a missing one marks nothing.
        thresholds: the limits; None for the usual ones.
    """
    limits = thresholds or Thresholds()
    groups = [
        [Rule("nan", "critical", "nan_count", ">", 0, "some elements are NaN")],
        [Rule("inf", "critical", "inf_count", ">", 0, "some elements are infinite")],
    ]
    if site == "activation":
        groups += _activation_rules(type, numbers, limits)
    elif site in GRADIENT_SITES:
        groups += _gradient_rules(limits)
    elif site == "update":
        groups += _update_rules(limits)
    found = [mark for group in groups if (mark := _first_broken(group, numbers)) is not None]
    return tuple(sorted(found, key=lambda mark: mark.rule.severity != "critical"))


def gradient_ratio_mark(ratio: float, thresholds: Thresholds | None = None) -> Mark | None:
    """The mark of the first layer's mean |gradient| over the last layer's; None where it is usual."""
    limits = thresholds or Thresholds()
    name = "gradient ratio"
    rules = [
        Rule("exploding", "critical", name, ">", limits.gradient_ratio_large, "growing towards the input"),
        Rule("vanishing", "critical", name, "<", limits.gradient_ratio_critical, "lost towards the input"),
        Rule("shrinking", "warning", name, "<", limits.gradient_ratio, "shrinking towards the input"),
    ]
    return _first_broken(rules, {name: ratio})


def _first_broken(rules: list[Rule], numbers: Mapping[str, float | None]) -> Mark | None:
    for rule in rules:
        value = numbers.get(rule.statistic)
        if value is not None and rule.holds(value):
            return Mark(rule, value)
    return None


def _activation_rules(type: str, numbers: Mapping[str, float | None], limits: Thresholds) -> list[list[Rule]]:
    large = Rule("large", "critical", "mean", ">", limits.activation_mean, "activations explode")
    collapsed = Rule("collapsed", "critical", "std", "<", limits.activation_std, "all activations are alike")
    dead = Rule("dead", "critical", "zero_fraction", ">", limits.zero_fraction_critical, "most ReLU units are dead")
    zeros = Rule("zeros", "warning", "zero_fraction", ">", limits.zero_fraction, "ReLU units may be dead")
    groups = [[large]]
    # A functional ReLU shows in its container's output only: no negative value, and exact zeros.
    positive = numbers.get("min") == 0 and (numbers.get("max") or 0) > 0
    if type in RELU_LIKE or (positive and type not in ZEROS_BY_DESIGN):
        groups.append([dead, zeros])
    # A single element (a loss computed by a module) has no spread to lose.
    if (numbers.get("count") or 0) > 1:
        groups.append([collapsed])
    return groups


def _gradient_rules(limits: Thresholds) -> list[list[Rule]]:
    return [
        [
            Rule("exploding", "critical", "abs_mean", ">", limits.gradient_large, "the gradient explodes"),
            Rule("vanishing", "critical", "abs_mean", "<", limits.gradient_small, "the gradient vanishes"),
        ]
    ]


def _update_rules(limits: Thresholds) -> list[list[Rule]]:
    outgrown = "the step outgrows the parameter"
    return [
        [
            Rule("diverging", "critical", "update_ratio", ">", limits.update_ratio_critical, outgrown),
            Rule("large step", "warning", "update_ratio", ">", limits.update_ratio, "near 1e-3 is usual"),
        ]
    ]

"""The questions that lead from a symptom to its cause, in the order in which they are worth asking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..findings import Finding


class Question(NamedTuple):
    """`kinds`: the findings that answer it with no. `command`: how to look closer."""

    text: str
    kinds: tuple[str, ...]
    command: str


QUESTIONS: tuple[Question, ...] = (
    Question(
        "Is every number finite?",
        (
            "nonfinite_parameter",
            "nonfinite_activation",
            "nonfinite_loss_outside",
            "nonfinite_loss",
            "nonfinite_gradient",
            "nonfinite_update",
            "skipped_steps",
            "underflow",
        ),
        "statsbridge show RUN --step STEP",
    ),
    Question(
        "Does the whole model take part, in training mode?",
        (
            "eval_mode",
            "module_eval",
            "parameter_replaced",
            "no_optimizer",
            "never_stepped",
            "no_gradient",
            "unused_module",
            "zero_gradient",
            "running_statistics_unchanged",
            "stale_outputs",
        ),
        "statsbridge show RUN --site parameter_grad",
    ),
    Question(
        "Is each step of the right size?",
        ("update_zero", "update_rounded_away", "update_too_small", "update_too_large", "gradient_accumulating"),
        "statsbridge show RUN --site update",
    ),
    Question(
        "Do activations keep their scale, and their differences?",
        ("exploding_activation", "collapsed_activation", "dead_units", "saturated", "identical_outputs"),
        "statsbridge show RUN --site activation",
    ),
    Question(
        "Does the gradient reach the first layers, neither lost nor blown up?",
        ("vanishing_gradient", "exploding_gradient"),
        "statsbridge show RUN --site activation_grad",
    ),
    Question(
        "Does the loss start where it should, and fall?",
        ("initial_loss", "loss_flat", "loss_not_decreasing", "loss_oscillating", "loss_spike"),
        "statsbridge curves RUN",
    ),
    Question("Is it like the good run?", ("outside_baseline",), "statsbridge compare GOOD RUN"),
)


def answers(findings: Sequence[Finding]) -> list[tuple[Question, list[Finding]]]:
    """Each question with the findings that answer it with no; the good run's is left out where nothing says no."""
    found = [(one, [finding for finding in findings if finding.kind in one.kinds]) for one in QUESTIONS]
    return [(one, those) for one, those in found if those or one.kinds != ("outside_baseline",)]

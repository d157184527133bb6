"""What the user gives while a training runs, as it is recorded: what is wrong with it is said, and raises nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

from ..collect.sampling import StepLabels
from ..collect.scalars import as_scalar
from ..collect.shards import Part, Scalar
from ..reporting import Reporter
from ..wording import shown

#: How a logged number was made, where the user says so: a dashboard's "loss" can be any of the three.
KINDS = ("batch", "epoch_mean", "recomputed")

FINISH_SECONDS = 60.0


def numbers(given: Mapping[str, object], step: int, reporter: Reporter) -> dict[str, Scalar | Part]:
    """Those of the values that are single numbers; of the others it is said that they are not recorded."""
    values: dict[str, Scalar | Part] = {}
    for name, value in given.items():
        scalar = as_scalar(value)
        if scalar is None:
            reporter.problem(
                "bad_scalar",
                f"{name}={shown(value)} is no single number: give a float or a one-element tensor (of a DTensor its "
                "full_tensor()); not recorded",
                cause=f"bad_scalar {name}",
                step=step,
            )
        else:
            values[str(name)] = scalar
    return values


def label(step: object, labels: StepLabels, reporter: Reporter) -> int:
    """The label that something is logged at: the last closed step's where None is given, or what is no label."""
    if step is None:
        return labels.current
    found, wrong = StepLabels(labels.current).next(step)
    if wrong:
        reporter.problem("bad_step_label", f"run.log: {wrong}; recorded at step {found}", step=found)
    return found


def kind(given: str | None, step: int, reporter: Reporter) -> str | None:
    """One of `KINDS`, or None."""
    if given is None or given in KINDS:
        return given
    reporter.problem("bad_kind", f"kind={shown(given)} is none of {', '.join(KINDS)}; recorded without", step=step)
    return None


def epoch(given: object, step: int, reporter: Reporter) -> float | None:
    """A number of epochs, or None."""
    number = as_scalar(given)
    if isinstance(number, float):
        return number
    if given is not None:
        reporter.problem("bad_epoch", f"epoch={shown(given)} is no number; recorded without", step=step)
    return None


def patience(timeout: object) -> float:
    """Seconds to wait at the end of a training, where nothing is refused any more: what is no number is the usual."""
    seconds = as_scalar(timeout)
    if not isinstance(seconds, float) or math.isnan(seconds):
        return FINISH_SECONDS
    return min(seconds, threading.TIMEOUT_MAX)

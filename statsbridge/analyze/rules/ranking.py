"""Which of several findings is the cause: the order in which they are read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..findings import SEVERITIES, Finding

# Within one step, in the order in which a training step runs into them. Unnamed kinds come last.
_ORDER = (
    "eval_mode",
    "module_eval",
    "parameter_replaced",
    "no_optimizer",
    "never_stepped",
    "initial_loss",
    "nonfinite_parameter",
    "nonfinite_activation",
    "nonfinite_loss_outside",
    "nonfinite_loss",
    "nonfinite_gradient",
    "nonfinite_update",
    "stale_outputs",
    "gradient_accumulating",
    "update_zero",
    "update_rounded_away",
    "update_too_small",
    "update_too_large",
    "exploding_activation",
    "collapsed_activation",
    "dead_units",
    "saturated",
    "no_gradient",
    "zero_gradient",
    "exploding_gradient",
    "underflow",
    "vanishing_gradient",
    "identical_outputs",
    "skipped_steps",
    "loss_spike",
    "loss_flat",
    "loss_oscillating",
    "loss_not_decreasing",
)
# What a forward pass shows layer by layer: the shallower one comes first, whichever it is.
_BY_DEPTH = ("exploding_activation", "collapsed_activation", "dead_units", "saturated")
_PLACE = {kind: place for place, kind in enumerate(_ORDER)}
_PLACE |= dict.fromkeys(_BY_DEPTH, _PLACE[_BY_DEPTH[0]])

_NONFINITE = tuple(kind for kind in _ORDER if kind.startswith("nonfinite"))
_COURSE = ("loss_spike", "loss_not_decreasing", "loss_flat", "loss_oscillating")
_NO_SIGNAL = (
    "zero_gradient",
    "vanishing_gradient",
    "no_gradient",
    "update_too_small",
    "update_zero",
    "identical_outputs",
)
_TOO_MUCH = ("update_too_large", "exploding_gradient", "exploding_activation", "saturated", "dead_units")

# What becomes of a network that finds nothing to learn: it ends as a constant.
_SPENT = (
    "dead_units",
    "saturated",
    "collapsed_activation",
    "identical_outputs",
    "zero_gradient",
    "vanishing_gradient",
    "update_too_small",
)
#: Steps that a loss must have stood still before for such a thing to be its effect, and not its cause.
_LONG = 20

#: Kind → kinds that follow from it where they begin no earlier.
EXPLAINS: dict[str, tuple[str, ...]] = {
    **{kind: (*(one for one in _NONFINITE if one != kind), *_TOO_MUCH, *_NO_SIGNAL, *_COURSE) for kind in _NONFINITE},
    "gradient_accumulating": (*_NONFINITE, *_TOO_MUCH, *_NO_SIGNAL, *_COURSE),
    "update_too_large": (*_NONFINITE, *_TOO_MUCH, *_NO_SIGNAL, *_COURSE, "collapsed_activation"),
    "exploding_activation": (*_NONFINITE, *_TOO_MUCH, *_NO_SIGNAL, *_COURSE, "initial_loss", "skipped_steps"),
    "exploding_gradient": (*_NONFINITE, *_TOO_MUCH, *_NO_SIGNAL, *_COURSE, "skipped_steps"),
    "saturated": (*_NO_SIGNAL, *_COURSE),
    "dead_units": (*_NO_SIGNAL, *_COURSE, "collapsed_activation"),
    "collapsed_activation": (*_NO_SIGNAL, *_COURSE, "dead_units"),
    "underflow": (*_NO_SIGNAL, *_COURSE, "update_rounded_away"),
    "vanishing_gradient": (*_COURSE, "update_too_small", "update_rounded_away"),
    "zero_gradient": (*_COURSE, "vanishing_gradient", "update_too_small"),
    "parameter_replaced": ("no_optimizer", "no_gradient", "update_zero", *_COURSE),
    "no_optimizer": ("no_gradient", *_COURSE),
    "never_stepped": _COURSE,
    "no_gradient": (*_COURSE, "zero_gradient"),
    "update_zero": (*_COURSE, "stale_outputs"),
    "update_rounded_away": (*_COURSE, "update_too_small", "update_zero"),
    "update_too_small": _COURSE,
    "stale_outputs": _COURSE,
    "identical_outputs": (*_NO_SIGNAL, *_COURSE),
    "loss_oscillating": ("loss_not_decreasing",),
    "loss_flat": ("loss_not_decreasing",),
    "running_statistics_unchanged": _COURSE,
    "eval_mode": _COURSE,
    "skipped_steps": _COURSE,
}


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, first cause first.

    What follows from another finding that began no later comes after what does not; then the worse severity, the
    earlier step, and within one step the order of a training step: parameters, forward by depth, loss, backward.
    """
    given = list(findings)
    return sorted(given, key=lambda finding: (_follows(finding, given), *_rank(finding)))


def _rank(finding: Finding) -> tuple[int, int, int, float, int]:
    place = _PLACE.get(finding.kind, len(_ORDER))
    depth = finding.depth if finding.kind in _BY_DEPTH and finding.depth is not None else math.inf
    last = _ORDER.index(finding.kind) if finding.kind in _ORDER else len(_ORDER)
    return (SEVERITIES.index(finding.severity), finding.step, place, depth, last)


def _follows(finding: Finding, given: Sequence[Finding]) -> bool:
    return any(_explains(other, finding) for other in given if other is not finding)


def _explains(cause: Finding, effect: Finding) -> bool:
    if cause.kind == "loss_not_decreasing" and effect.kind in _SPENT:
        return cause.step + _LONG < effect.step
    if effect.kind == "loss_not_decreasing" and cause.kind in _SPENT and effect.step + _LONG < cause.step:
        return False
    if effect.kind not in EXPLAINS.get(cause.kind, ()):
        return False
    if cause.kind in EXPLAINS.get(effect.kind, ()):  # either may be the cause of the other: the first one is
        return _rank(cause)[1:] < _rank(effect)[1:]
    # That a loss does not fall is judged from its start on, whenever that what holds it began.
    return cause.step <= effect.step or effect.kind == "loss_not_decreasing"

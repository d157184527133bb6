"""What a rule found: one thing that is wrong, where it began, why probably, and what to try."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]

#: The worst first.
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with a training.

    `kind`: which rule found it, such as `"exploding_gradient"`. `step`: the first step where it shows; `last_step`
    the last one so far. `module`, `site`, `tensor`: where it shows first, in the order in which it arises (forward: by
    depth, backward: by depth reversed); `module` is None for what concerns the training as a whole, such as its loss,
    and `""` is the root. `following`: how many further modules show it too. `value` against `threshold`: what was
    measured, and the limit; None where there is no such number. `causes` and `suggestions`: the likeliest first.
    """

    kind: str
    severity: Severity
    step: int
    message: str
    module: str | None = None
    site: str | None = None
    tensor: str | None = None
    value: float | None = None
    threshold: float | None = None
    causes: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    type: str = ""
    call: int = 0
    depth: int | None = None
    last_step: int | None = None
    following: int = 0

    def to_json(self) -> dict[str, Any]:
        """As a dictionary that JSON can hold; an infinity or NaN becomes its name, which JSON has no number for."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "step": self.step,
            "last_step": self.last_step,
            "module": self.module,
            "type": self.type,
            "call": self.call,
            "depth": self.depth,
            "site": self.site,
            "tensor": self.tensor,
            "value": _number(self.value),
            "threshold": _number(self.threshold),
            "message": self.message,
            "following": self.following,
            "causes": list(self.causes),
            "suggestions": list(self.suggestions),
        }


def _number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"

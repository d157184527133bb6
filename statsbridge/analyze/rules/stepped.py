"""Whether anything trains the parameters at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...wording import counted
from ..thresholds import Thresholds
from .activations import unchanged
from .memory import Memory
from .step import Alarm, Step, match

#: Samples that it takes, in `persistence`: some optimizers step only each n-th time that a gradient is there.
_PATIENCE = 4


class NeverStepped:
    """Gradients arrive, no optimizer has been seen stepping, and every parameter stays what it was, bit for bit.

    Parameters that anything else changes, such as a loop of the user's own, are trained. Once an optimizer has stepped
    or a parameter has moved nothing is said any more: a learning rate of 0 is `update_zero`'s, and one that is left
    out `no_optimizer`'s.
    """

    _STATISTICS = ("mean", "std", "l2", "min", "max", "abs_mean")

    def __init__(self, limits: Thresholds) -> None:
        self._needed = _PATIENCE * limits.persistence
        self._parameters = {name: Memory(np.nan) for name in self._STATISTICS}
        self._samples = 0
        self._since = 0
        self._trained = False

    def look(self, step: Step) -> Iterator[Alarm]:
        # What an optimizer sees is known of each step.
        self._trained = self._trained or "grad_norm_applied" in step.scalars
        if self._trained or step.rows is None:
            return
        parameters = step.site("parameter")
        parameters = parameters.where(parameters.measured)
        if len(step.site("update")) or not unchanged(parameters, self._parameters, fresh=True).all():
            self._trained = True
            return
        gradients = step.site("parameter_grad")
        gradients = gradients.where(gradients.measured & (gradients["l2"] > 0) & ~gradients.nonfinite)
        known = step.known
        if not len(gradients) or (match(known.parameters(gradients.ids), known.parameters(parameters.ids)) < 0).any():
            return
        self._since = self._since if self._samples else step.step
        self._samples += 1
        if self._samples < self._needed:
            return
        norm = float(np.sqrt(np.sum(gradients["l2"] ** 2)))
        yield Alarm(
            "never_stepped",
            "warning",
            self._since,
            f"{counted(len(gradients), 'parameter')} had gradients (l2 norm {norm:.3g}) in {self._samples} sampled "
            "steps, no optimizer has been seen stepping, and not one parameter has changed",
        )

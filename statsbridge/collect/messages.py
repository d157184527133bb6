"""What is told: where it goes, and what a window that saw less than it should have says to the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Submit(Protocol):
    """Queues work for the background thread; False where it is refused."""

    def __call__(self, work: Callable[[], Mapping[str, Any]], *, urgent: bool = False) -> bool: ...


class Reporter(Protocol):
    """Takes what could not be done; never raises."""

    def problem(self, kind: str, message: str, *, severity: str = "warning", cause: str | None = None) -> None: ...
    def event(self, kind: str, message: str, *, severity: str = "warning") -> None: ...
    def trouble(
        self,
        where: str,
        module: str,
        error: BaseException,
        site: str | None = None,
        tensor: str | None = None,
    ) -> None: ...


_RUN_EAGERLY = "run it inside `with run.sampling():`"

STEP_SKIPPED = "the GradScaler skipped the optimizer's step: its gradients overflowed"

OPTIMIZER_NOT_STEPPED = (
    "run.step() was called in a sampled step in which no optimizer of the model had stepped; the step stays open "
    "until one has: call run.step() once for each optimizer step, after it, and where torch.compile has compiled "
    f"that step, {_RUN_EAGERLY}"
)

COMPILED_NOT_RECORDED = (
    "no forward pass of the model was seen in the sampled step, and torch.compile has compiled code in this process, "
    "where no hook runs: give init() the model that you call, after compiling it; where a loss or a whole step is "
    f"compiled, {_RUN_EAGERLY}"
)

EVAL_MODE = (
    "the optimizer stepped, but every forward pass with gradients was in eval mode, so no activation was recorded: "
    "call model.train(), or init(…, eval=True) if eval mode is what you want"
)

NO_FORWARD = (
    "the optimizer stepped, but no forward pass of the model was seen in the sampled step, so no activation was "
    "recorded: call the model itself, model(x), not model.forward(x)"
)

STRANGERS_TRAINED = (
    "in three sampled steps in a row other modules ran, but no forward pass of the model with gradients and no step of "
    "an optimizer of its parameters was seen: give init() the very model that is trained, not one that it was copied "
    "from or to"
)

"""What the collector has seen that statistics cannot show, and how often the optimizer's step was skipped."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ..thresholds import Thresholds
from .step import Alarm, Fact, Step, shown

_WINDOW = 50  # steps that skipped ones are counted over


class Facts:
    """One finding for each kind of fact."""

    def __init__(self, limits: Thresholds) -> None:
        self._trainable: set[str] = set()

    def look(self, step: Step) -> Iterator[Alarm]:
        if step.rows is not None and len(self._trainable) < len(step.known.modules.names):
            gradients = step.site("parameter_grad")
            names = step.known.modules.names
            self._trainable.update(names[module] for module in set(step.known.module[gradients.ids].tolist()))
        for fact in step.facts:
            if fact.kind == "optimizer_step_skipped":
                continue
            severity = "warning" if fact.kind != "module_eval" or self._learns(fact.module) else "info"
            yield Alarm(
                fact.kind,
                severity,  # type: ignore[arg-type]
                step.step,
                _sentence(fact),
                value=fact.value,
                threshold=fact.threshold,
                module=fact.module,
                site=fact.site,
                tensor=fact.tensor,
            )

    def _learns(self, module: str | None) -> bool:
        """Whether a module, or a sibling of it, is trained: frozen parts belong in eval mode."""
        if not module:
            return True
        parent = module.rpartition(".")[0]
        inside = f"{parent}." if parent else ""
        return any(name == parent or name.startswith(inside) for name in self._trainable)


def _sentence(fact: Fact) -> str:
    where = shown(fact.module or "")
    value = "" if fact.value is None else f" ({fact.value:.2g})"
    return {
        "module_eval": f"{where} is in eval mode while the model trains",
        "no_optimizer": f"parameter {fact.tensor} of {where} has a gradient and no optimizer holds it",
        "parameter_replaced": f"parameter {fact.tensor} of {where} is another tensor than the one the optimizer holds",
        "running_statistics_unchanged": f"the running mean and variance of {where} do not change in training",
        "identical_outputs": f"{where} puts out the same for every sample of a batch{value}",
    }.get(fact.kind, fact.message)


class SkippedSteps:
    """Optimizer steps that a GradScaler skips: a few at the start are how it finds its scale, many are not."""

    def __init__(self, limits: Thresholds) -> None:
        self._limit = limits.skipped_steps
        self._skipped: deque[int] = deque(maxlen=max(limits.skipped_steps, 1))

    def look(self, step: Step) -> Iterator[Alarm]:
        if not any(fact.kind == "optimizer_step_skipped" for fact in step.facts):
            return
        self._skipped.append(step.step)
        first = self._skipped[0]
        if len(self._skipped) == self._skipped.maxlen and step.step - first < _WINDOW:
            yield Alarm(
                "skipped_steps",
                "warning",
                first,
                f"{len(self._skipped)} of the last {step.step - first + 1} optimizer steps were skipped, because "
                f"gradients overflowed (limit: {self._limit} in {_WINDOW})",
                value=float(len(self._skipped)),
                threshold=float(self._limit),
            )

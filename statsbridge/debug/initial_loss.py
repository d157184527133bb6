"""Is the loss before the first step what it has to be? A classifier that knows nothing has ln C."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from ..errors import ConfigError
from .batches import Loss, call_model, checked_loader, device_of, fresh, is_criterion, loss_value, pair, without_dropout
from .preserving import preserved
from .progress import progress
from .result import Number, Result

if TYPE_CHECKING:
    import plotly.graph_objects as go

_NAME = "initial_loss_check"
_MOST_BATCHES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialLossResult(Result):
    """Whether the loss at the start is the expected one. `table`: `batch` and `loss`."""

    band: tuple[float, float] | None = None

    def figure(self) -> go.Figure:
        """The loss of each batch beside the expected one. Raises ConfigError where plotly is not installed."""
        from ..view.figures_debug import expected_figure, title_of_test

        table: Any = self.table
        expected: Any = self.numbers["expected"]
        return expected_figure(title_of_test(self.name, self.passed), table["loss"], expected, self.band)


def initial_loss_check(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    classes: int | None = None,
    expected: float | None = None,
    tolerance: float = 0.25,
) -> InitialLossResult:
    """Compare the loss of an untrained model with the one that no knowledge gives.

    That is ln C for a cross-entropy of C classes, in nats, averaged over samples. The model is in training mode, its
    dropout modules in evaluation mode, without gradients.

    Args:
        model: the model; afterwards it is as it was, to the bit.
        loss: a callable `loss(model, batch)`, or a criterion for batches of two, as in `overfit_one_batch`.
        batch: tensors in any structure; or a DataLoader, of which the first 10 batches are taken.
        classes: how many classes there are. Where `loss` is torch's cross-entropy or binary cross-entropy as a
            criterion, it is read from the model's output.
        expected: the expected loss itself, for any other loss.
        tolerance: how far the mean loss may be from it, as a share of it.

    Raises ConfigError where an argument is wrong. What model and loss raise passes through; all is put back first.
    """
    _check(model, classes, expected, tolerance)
    batches: Iterable[Any] = checked_loader(batch) if isinstance(batch, DataLoader) else [batch]
    losses: list[float] = []
    outputs: Any = None
    with preserved(model, also=[loss, batch]), without_dropout(model), torch.no_grad():
        device = device_of(model)
        for one in progress(itertools.islice(batches, _MOST_BATCHES), _NAME, None):
            losses.append(float(loss_value(model, loss, fresh(one, device))))
            if is_criterion(loss) and len(losses) == 1:
                outputs = call_model(model, fresh(pair(one)[0], device))
    if not losses:
        raise ConfigError(
            "the loader gives no batch: its data set is empty, or smaller than a batch with drop_last=True"
        )
    if classes is None and expected is None:
        classes = classes_of(loss, outputs)
    if expected is None and classes is not None:
        expected = math.log(classes)
    return _judged(losses, classes, expected, tolerance, _are_probabilities(loss, outputs))


def _check(model: object, classes: int | None, expected: float | None, tolerance: float) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    if classes is not None and expected is not None:
        raise ConfigError("classes and expected are both given: expected is ln(classes), give one of them")
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int) or classes < 2):
        raise ConfigError(f"classes={classes}: give how many there are, at least 2")
    if expected is not None and not (math.isfinite(expected) and expected != 0):
        raise ConfigError(f"expected={expected}: give a finite loss that is not 0")
    if not 0 < tolerance < math.inf:
        raise ConfigError(f"tolerance={tolerance}: give a share above 0, such as 0.25")


def classes_of(loss: Loss, outputs: Any) -> int | None:
    """How many classes a criterion of torch tells apart, from the output that it is given; None for any other loss.

    Cross-entropy: the length of dimension 1 (of 0 where there is one dimension). Binary cross-entropy: 2.
    """
    if isinstance(loss, (nn.BCEWithLogitsLoss, nn.BCELoss)) or loss in (
        functional.binary_cross_entropy_with_logits,
        functional.binary_cross_entropy,
    ):
        return 2
    if not _is_cross_entropy(loss) or not isinstance(outputs, torch.Tensor) or outputs.dim() == 0:
        return None
    count = outputs.shape[1] if outputs.dim() > 1 else outputs.shape[0]
    return count if count > 1 else None


def _is_cross_entropy(loss: Loss) -> bool:
    return isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or loss in (
        functional.cross_entropy,
        functional.nll_loss,
    )


def _are_probabilities(loss: Loss, outputs: Any) -> bool:
    """Whether a cross-entropy that takes logits is given probabilities: the softmax is applied twice."""
    takes_logits = isinstance(loss, nn.CrossEntropyLoss) or loss is functional.cross_entropy
    if not takes_logits or not isinstance(outputs, torch.Tensor) or outputs.dim() < 2 or not outputs.numel():
        return False
    sums = outputs.double().sum(dim=1)
    return bool((outputs >= 0).all()) and bool(torch.isclose(sums, torch.ones_like(sums), atol=1e-3).all())


def _judged(
    losses: list[float], classes: int | None, expected: float | None, tolerance: float, probabilities: bool
) -> InitialLossResult:
    mean = statistics.fmean(losses)
    band = None if expected is None else (expected - tolerance * abs(expected), expected + tolerance * abs(expected))
    numbers: dict[str, Number] = {
        "loss": mean,
        "expected": expected,
        "classes": classes,
        "batches": len(losses),
        "lowest_batch": min(losses) if all(map(math.isfinite, losses)) else None,
        "highest_batch": max(losses) if all(map(math.isfinite, losses)) else None,
    }
    passed, explanation = _verdict(mean, band, _named(classes, expected), probabilities)
    return InitialLossResult(
        name=_NAME,
        passed=passed,
        numbers=numbers,
        explanation=explanation,
        table={"batch": list(range(len(losses))), "loss": list(losses)},
        band=band,
    )


def _verdict(mean: float, band: tuple[float, float] | None, name: str, probabilities: bool) -> tuple[bool | None, str]:
    if not math.isfinite(mean):
        return False, f"The loss is {mean} before the first step. Look for NaN or extreme values in the data."
    if probabilities:
        return False, (
            "The model puts out probabilities (each row adds up to 1), and the criterion applies the softmax itself: "
            "it is applied twice, which slows training down. Give it the logits."
        )
    if band is None:
        return None, (
            f"The loss at the start is {mean:.4g}. What it should be is not known: give classes= for a cross-entropy, "
            "or expected= for any other loss."
        )
    if mean > band[1]:
        return False, (
            f"The loss at the start is {mean:.4g}, above the expected {name}: the model is sure of something it cannot "
            "know. Look at the scale of the last layer's weights and of the inputs, at a sum where a mean is meant, "
            "and at labels that do not fit the outputs."
        )
    if mean < band[0]:
        return False, (
            f"The loss at the start is {mean:.4g}, below the expected {name}. Is the model trained already, does the "
            "input hold the answer, is the loss divided once too often, or are most targets ignored?"
        )
    return True, f"The loss at the start is {mean:.4g}, as expected ({name})."


def _named(classes: int | None, expected: float | None) -> str:
    if expected is None:
        return ""
    return f"{expected:.4g}" if classes is None else f"ln {classes} = {expected:.4g}"

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
from .batches import (
    Loss,
    call_model,
    checked_loader,
    device_of,
    fresh,
    is_criterion,
    loss_value,
    pair,
    with_gradients,
    without_dropout,
)
from .preserving import preserved
from .progress import progress
from .result import Number, Result, named

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

    That is ln C for a cross-entropy of C classes, in nats, averaged over samples; for a torch binary cross-entropy with
    weights (`pos_weight`) what it gives for outputs that all say one half. The model is in training mode, its
    dropout modules in evaluation mode.

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
    undecided: list[float] = []
    outputs: Any = None
    with preserved(model, also=[loss, batch]), without_dropout(model), with_gradients():
        device = device_of(model)
        for one in progress(itertools.islice(batches, _MOST_BATCHES), _NAME, None):
            losses.append(float(loss_value(model, loss, fresh(one, device)).detach()))
            if _is_weighted(loss):
                undecided.append(_undecided(loss, pair(fresh(one, device))[1]))
            if is_criterion(loss) and len(losses) == 1:
                outputs = call_model(model, fresh(pair(one)[0], device))
    if not losses:
        raise ConfigError(
            "the loader gives no batch: its data set is empty, or smaller than a batch with drop_last=True"
        )
    if classes is None and expected is None:
        classes = classes_of(loss, outputs)
    if expected is None and undecided and all(map(math.isfinite, undecided)):
        expected = statistics.fmean(undecided)
    elif expected is None and classes is not None:
        expected = math.log(classes)
    broken = [] if all(map(math.isfinite, losses)) else _broken(model)
    return _judged(losses, classes, expected, tolerance, _are_probabilities(loss, outputs), broken)


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


def _is_weighted(loss: Loss) -> bool:
    """Whether a binary cross-entropy weighs its terms, so that a model that knows nothing has no ln 2."""
    if not isinstance(loss, (nn.BCEWithLogitsLoss, nn.BCELoss)) or loss.reduction != "mean":
        return False
    return loss.weight is not None or getattr(loss, "pos_weight", None) is not None


def _undecided(loss: Loss, targets: torch.Tensor) -> float:
    """A binary cross-entropy of these targets where every output says one half."""
    return float(loss(torch.full_like(targets, 0.0 if isinstance(loss, nn.BCEWithLogitsLoss) else 0.5), targets))


def _broken(model: nn.Module) -> list[str]:
    """The names of parameters that hold a NaN or an infinity, and of buffers with a NaN: a mask holds infinities."""
    found = [name for name, one in model.named_parameters() if not bool(_local(one).isfinite().all())]
    return found + [name for name, one in model.named_buffers() if bool(_local(one).isnan().any())]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor the shard of this process: to ask about all of it, all processes have to."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _are_probabilities(loss: Loss, outputs: Any) -> bool:
    """Whether a cross-entropy that takes logits is given probabilities: the softmax is applied twice."""
    takes_logits = isinstance(loss, nn.CrossEntropyLoss) or loss is functional.cross_entropy
    if not takes_logits or not isinstance(outputs, torch.Tensor) or outputs.dim() < 2 or not outputs.numel():
        return False
    sums = outputs.double().sum(dim=1)
    return bool((outputs >= 0).all()) and bool(torch.isclose(sums, torch.ones_like(sums), atol=1e-3).all())


def _judged(
    losses: list[float],
    classes: int | None,
    expected: float | None,
    tolerance: float,
    probabilities: bool,
    broken: list[str],
) -> InitialLossResult:
    # Of +inf and -inf the library's mean raises.
    mean = statistics.fmean(losses) if all(map(math.isfinite, losses)) else sum(losses)
    band = None if expected is None else (expected - tolerance * abs(expected), expected + tolerance * abs(expected))
    numbers: dict[str, Number] = {
        "loss": mean,
        "expected": expected,
        "classes": classes,
        "batches": len(losses),
        "lowest_batch": min(losses) if all(map(math.isfinite, losses)) else None,
        "highest_batch": max(losses) if all(map(math.isfinite, losses)) else None,
    }
    passed, explanation = _verdict(mean, band, _named(classes, expected), probabilities, broken)
    return InitialLossResult(
        name=_NAME,
        passed=passed,
        numbers=numbers,
        explanation=explanation,
        table={"batch": list(range(len(losses))), "loss": list(losses)},
        band=band,
    )


def _verdict(
    mean: float, band: tuple[float, float] | None, name: str, probabilities: bool, broken: list[str]
) -> tuple[bool | None, str]:
    if not math.isfinite(mean):
        return False, _nonfinite(mean, broken)
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


def _nonfinite(mean: float, broken: list[str]) -> str:
    if not broken:
        return f"The loss is {mean} before the first step. Look for NaN or extreme values in the data."
    return (
        f"The loss is {mean} before the first step, and {named(broken)} {'is' if len(broken) == 1 else 'are'} not "
        "finite: look at the initialisation, or at the checkpoint that was loaded."
    )


def _named(classes: int | None, expected: float | None) -> str:
    if expected is None:
        return ""
    if classes is not None and expected != math.log(classes):
        return f"{expected:.4g}, one half for every output, with the weights of the loss"
    return f"{expected:.4g}" if classes is None else f"ln {classes} = {expected:.4g}"

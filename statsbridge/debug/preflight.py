"""The checklist before a long run, in order, until something fails."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..errors import ConfigError, StatsBridgeError
from ..wording import counted
from .batches import Loss, checked_loader, first_batch
from .data import DataResult, check_data, check_numbers, data_result, finding_lines
from .data_finding import wrapped
from .data_parts import Part
from .dead_units import find_dead_units
from .gradients import gradient_check
from .initial_loss import initial_loss_check
from .optimizers import OptimizerChoice
from .overfit import overfit_one_batch
from .ranks import shared
from .rate_range import learning_rate_range_test
from .result import Number, Result, shown

if TYPE_CHECKING:
    from ..run import Run

#: The tests in the order in which they run.
TESTS = (
    "check_data",
    "initial_loss_check",
    "find_dead_units",
    "gradient_check",
    "overfit_one_batch",
    "learning_rate_range_test",
)
# Enough to see a unit fire, and read in a minute.
_MOST_SAMPLES = 10_000
_LINES_SHOWN = 14
_WARNINGS_SHOWN = 6
_MARKS = {True: "✓", False: "✗", None: "–"}
_WORDS = {True: "passed", False: "failed", None: "undecided"}
_NAME_WIDTH = max(map(len, TESTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult(Result):
    """The checklist. `parts`: the results of the tests that ran, in order; the last one is the one that failed."""

    parts: tuple[Result, ...]

    def __str__(self) -> str:
        """One screen: a line for each test, and below them why the one that failed did."""
        outcome = "failed" if self.passed is False else "passed"
        lines = [f"{_MARKS[self.passed]} preflight: {outcome}"]
        done = {part.name: part for part in self.parts}
        for name in TESTS:
            part = done.get(name)
            mark = "–" if part is None else _MARKS[part.passed]
            said = "not run" if part is None else headline(part)
            lines.append(f"  {mark} {name.replace('_', ' '):<{_NAME_WIDTH}}  {said}".rstrip())
        return "\n".join([*lines, "", *wrapped(self.explanation)])

    def log_to(self, run: Run) -> None:
        """Record what every test measured, and its figure, in a run."""
        for part in self.parts:
            part.log_to(run)
        Result.log_to(self, run)


def preflight(
    model: nn.Module,
    loss: Loss,
    loader: Any,
    *,
    validation: Any = None,
    test: Any = None,
    classes: int | None = None,
    inputs: Part = None,
    targets: Part = None,
    optimizer: OptimizerChoice = None,
    expected_loss: float | None = None,
    overfit_loss: float = 0.1,
    limit: int | None = None,
) -> PreflightResult:
    """Run the checklist: data, initial loss, dead units, gradients, one batch by heart, learning rate.

    It stops at the first test that fails, since the later ones would only show the same: what names a cause comes
    before what it would break. A test that cannot tell is no
    failure. An error that the model, the loss or the data raise is one.

    Args:
        model: the model, ready to train; afterwards it is as it was, to the bit.
        loss: a callable `loss(model, batch)` that returns one number; or a criterion, for batches of inputs and
            targets: an `nn.Module` or a function of `torch.nn.functional`.
        loader: the training data: a DataLoader or another re-iterable of batches.
        validation: a loader or data set, which `check_data` compares with the training data.
        test: the same of the test data.
        classes: how many classes there are: the loss is to begin near ln C, and the labels to be 0 to C − 1.
        inputs: which part of a batch is input, for `check_data`.
        targets: which part is the target, for `check_data`.
        optimizer: the one to train with, or a callable that makes one from a list of parameters; Adam where None.
        expected_loss: what the loss is to begin near, where it is not that of C classes.
        overfit_loss: the loss that one batch is to come below.
        limit: how many samples of each split to read, all where None. Dead units are looked for in 10,000 at most.

    Raises ConfigError where an argument is wrong.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    checked_loader(loader)
    if not callable(loss):
        raise ConfigError(f"loss is a {type(loss).__name__}: give a callable loss(model, batch), or a criterion")
    check_numbers(classes, limit)
    expected = {"expected": expected_loss} if expected_loss is not None else {"classes": classes}

    def on_a_batch(test: Callable[..., Result], **keywords: Any) -> Result:
        # A list of batches would be taken for one of them.
        batch = loader if isinstance(loader, DataLoader) else first_batch(loader)
        return test(model, loss, batch, **keywords)

    tests: Mapping[str, Callable[[], Result]] = {
        "check_data": partial(
            _data, model, loader, validation=validation, test=test, inputs=inputs, targets=targets, classes=classes,
            limit=limit,
        ),
        "initial_loss_check": partial(on_a_batch, initial_loss_check, **expected),
        "gradient_check": partial(on_a_batch, gradient_check),
        "overfit_one_batch": partial(on_a_batch, overfit_one_batch, optimizer=optimizer, threshold=overfit_loss),
        "learning_rate_range_test": partial(learning_rate_range_test, model, loss, loader, optimizer=optimizer),
        "find_dead_units": partial(
            find_dead_units, model, loss, loader, limit=min(limit or _MOST_SAMPLES, _MOST_SAMPLES)
        ),
    }  # fmt: skip
    parts: list[Result] = []
    for name in TESTS:
        part = _attempted(name, tests[name])
        failed = part.passed is False
        if shared(float(failed), model) > 0 and not failed:
            part = Result(
                name=name,
                passed=False,
                numbers=part.numbers,
                explanation="Here nothing is wrong, but another process failed this test: see what it printed.",
            )
        parts.append(part)
        if part.passed is False:
            break
    return _judged(parts)


def _attempted(name: str, test: Callable[[], Result]) -> Result:
    """The result of a test; a failure where the user's model, loss or data raise an error."""
    try:
        return test()
    except StatsBridgeError:
        raise
    except Exception as error:  # whatever it is, the training would stop at it
        said = str(error).strip() or "no message"
        return Result(
            name=name,
            passed=False,
            numbers={"error": type(error).__name__},
            explanation=f"{type(error).__name__}: {said}{_place(error)}",
        )


def _place(error: Exception) -> str:
    """The last line of the user's own code on the way to an error."""
    packages = (Path(torch.__file__).parent, Path(__file__).parents[1])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(package) for package in packages)
    ]
    return f"\nraised in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""


def _data(model: nn.Module, loader: Any, **keywords: Any) -> DataResult:
    result = check_data(loader, **keywords)
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return result
    # With this model it is more than a warning.
    findings = [
        dataclasses.replace(finding, severity="critical") if finding.kind == "small_last_batch" else finding
        for finding in result.findings
    ]
    return data_result(result.splits, findings)


def _judged(parts: list[Result]) -> PreflightResult:
    last = parts[-1]
    passed = last.passed is not False
    outcomes = {part.name: _WORDS[part.passed] for part in parts}
    return PreflightResult(
        name="preflight",
        passed=passed,
        numbers={name: outcomes.get(name, "not run") for name in TESTS},
        explanation=_ready(parts) if passed else why(last),
        table={
            "test": list(TESTS),
            "outcome": [outcomes.get(name, "not run") for name in TESTS],
            "found": [headline(part) for part in parts] + [None] * (len(TESTS) - len(parts)),
        },
        parts=tuple(parts),
    )


def _ready(parts: list[Result]) -> str:
    undecided = [part.name.replace("_", " ") for part in parts if part.passed is None]
    said = "Ready to train." + (f" Could not tell: {', '.join(undecided)}." if undecided else "")
    data = parts[0]
    warnings = [one for one in data.findings if one.severity == "warning"] if isinstance(data, DataResult) else []
    lines = [f"! {finding.split}: {finding.message}" for finding in warnings]
    more = [f"and {counted(len(lines) - _WARNINGS_SHOWN, 'more warning')}"] if len(lines) > _WARNINGS_SHOWN else []
    return "\n".join([said, *lines[:_WARNINGS_SHOWN], *more])


def why(part: Result) -> str:
    """Why a test failed, in few lines."""
    if isinstance(part, DataResult):
        lines = [line for finding in part.findings for line in finding_lines(finding)]
    else:
        lines = part.explanation.splitlines()
    if len(lines) <= _LINES_SHOWN:
        return "\n".join(lines)
    return "\n".join(
        [*lines[:_LINES_SHOWN], f"and {counted(len(lines) - _LINES_SHOWN, 'more line')} in the result of {part.name}"]
    )


def headline(part: Result) -> str:
    """What a test measured, in half a line."""
    if "error" in part.numbers:
        return str(part.numbers["error"])
    return _HEADLINES[part.name](part.numbers)


def _data_line(numbers: Mapping[str, Number]) -> str:
    counts = [(numbers["critical_findings"], "fault"), (numbers["warning_findings"], "warning")]
    told = [counted(count, noun) for count, noun in counts if isinstance(count, int) and count]
    return ", ".join([f"{shown(numbers['training_samples'])} samples", *told])


def _rate_line(numbers: Mapping[str, Number]) -> str:
    rate = numbers["suggested_by_minimum"] or numbers["suggested_by_steepest"]
    return "no rate to suggest" if rate is None else f"begin with {shown(rate)} ({numbers['optimizer']})"


_HEADLINES: Mapping[str, Callable[[Mapping[str, Number]], str]] = {
    "check_data": _data_line,
    "initial_loss_check": lambda numbers: f"loss {shown(numbers['loss'])}, expected {shown(numbers['expected'])}",
    "gradient_check": lambda numbers: f"{numbers.get('right', 0)} of {numbers['checks']} derivatives agree",
    "overfit_one_batch": lambda numbers: (
        f"loss {shown(numbers['first_loss'])} to {shown(numbers['last_loss'])} in {numbers['steps']} steps"
    ),
    "learning_rate_range_test": _rate_line,
    "find_dead_units": lambda numbers: f"{numbers['dead_units']} of {numbers['units']} units never fired",
}

"""One of a thing is told as one: over all that the command line says of a run in which there is one of everything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner
from zoo_helpers import record, sgd, supervised

from statsbridge.cli import app
from statsbridge.wording import counted

#: Not "1 loss" and the like, nor "1 is".
_MANY = re.compile(
    r"(?<![\d.,/=-])\b1 (?:more |sampled |validation |training )?(?!loss|class|process|is\b|was\b|has\b)[a-z]+s\b"
)
COMMANDS = (
    ("ls",),
    ("show", "one"),
    ("show", "one", "--site", "update"),
    ("curves", "one"),
    ("curves", "one", "--format", "markdown"),
    ("diagnose", "one"),
    ("diagnose", "one", "--format", "markdown"),
    ("compare", "one", "one"),
    ("query", "one", "SELECT * FROM scalars LIMIT 1"),
    ("check", "one"),
    ("compact", "one"),
    ("sample", "one", "--every", "1", "--for", "1"),
    ("doctor",),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plurals")
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    batch = (torch.randn(1, 1), torch.randn(1, 1))
    record(supervised(model, [batch], loss=nn.functional.mse_loss, optimizer=sgd(model)), folder, steps=1, name="one")
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_one_is_no_plural(command: tuple[str, ...], runs: Path) -> None:
    result = CliRunner().invoke(app, [*command, "--dir", str(runs)])
    said = result.output
    assert said.strip()
    assert result.exception is None or isinstance(result.exception, SystemExit), said
    assert _MANY.findall(said) == []


def test_the_pattern_finds_what_it_is_for() -> None:
    assert [
        bool(_MANY.search(text)) for text in ("run a  1 points", "the last 1 training points", "1 of 1 spikes")
    ] == [True] * 3
    assert not any(
        _MANY.search(text) for text in ("1 point", "11 points", "2.1 steps", "1 loss", "1 is", "1 of 2 parts")
    )


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "point", "0 points"),
        (1, "class", "1 class"),
        (2, "class", "2 classes"),
        (2, "batch", "2 batches"),
        (3, "reply", "3 replies"),
        (3, "day", "3 days"),
        (1_500, "more row", "1,500 more rows"),
    ],
)
def test_counting(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text

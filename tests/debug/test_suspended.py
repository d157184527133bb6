"""A run that is open while the toolkit tries things with its model records the training alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from recording import Small, scalars
from torch import nn

import statsbridge
from statsbridge.collect.suspended import is_suspended, suspended
from statsbridge.debug import (
    gradient_check,
    initial_loss_check,
    learning_rate_range_test,
    overfit_one_batch,
    preserved,
)

BATCH = (torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2]))


class Logging(Small):
    """A model that logs a tensor of its own from inside its forward pass."""

    run: statsbridge.Run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.relu(self.first(x))
        self.run.log_tensor("hidden", hidden, grad=True)
        return self.second(hidden)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def try_everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    overfit_one_batch(model, loss_of, BATCH, steps=2)
    overfit_one_batch(model, loss_of, BATCH, steps=2, optimizer=optimizer)
    learning_rate_range_test(model, loss_of, [BATCH], steps=20, optimizer=optimizer)
    gradient_check(model, loss_of, BATCH, coordinates=1, directions=0)
    initial_loss_check(model, loss_of, BATCH, classes=3)


def train(folder: Path, between: Callable[[nn.Module, torch.optim.Optimizer], None] | None) -> statsbridge.RunData:
    """Four recorded steps; `between` is called inside the second one's window, before and after its forward pass."""
    torch.manual_seed(0)
    model = Logging()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with statsbridge.init(model, dir=folder, every=1) as run:
        model.run = run
        for step in range(4):
            if between is not None and step == 1:
                between(model, optimizer)
            optimizer.zero_grad()
            loss = loss_of(model, BATCH)
            loss.backward()
            if between is not None and step == 1:
                between(model, optimizer)
            optimizer.step()
            run.step(loss=loss)
    assert run.path is not None
    return statsbridge.load(run.path)


def without_time(table: pa.Table) -> list[dict[str, Any]]:
    return table.drop_columns([name for name in ("time",) if name in table.column_names]).to_pylist()


def test_the_record_is_the_same_as_without_the_toolkit(tmp_path: Path) -> None:
    alone, together = train(tmp_path / "alone", None), train(tmp_path / "together", try_everything)
    assert without_time(together.stats) == without_time(alone.stats)
    assert without_time(together.modules) == without_time(alone.modules)
    assert without_time(together.events) == without_time(alone.events)
    names = {"loss", "lr/0", "grad_norm", "param_norm", "update_ratio"}
    assert names <= set(alone.scalars["name"].to_pylist())
    for name in names:
        assert scalars(together.scalars, name) == scalars(alone.scalars, name)
    assert {row["tensor"] for row in together.stats.to_pylist() if row["site"] == "tensor"} == {"hidden"}


def test_what_is_not_suspended_would_be_recorded(tmp_path: Path) -> None:
    def unprotected(model: nn.Module, _: torch.optim.Optimizer) -> None:
        loss_of(model, BATCH)

    counts = [
        row["count"]
        for between in (None, unprotected)
        for row in train(tmp_path / str(between is None), between).stats.to_pylist()
        if row["step"] == 1 and row["module"] == "first" and row["site"] == "activation"
    ]
    assert counts == [6 * 16, 3 * 6 * 16]


def test_only_this_thread_is_suspended() -> None:
    seen: list[bool] = []
    with suspended(), suspended():
        thread = threading.Thread(target=lambda: seen.append(is_suspended()))
        thread.start()
        thread.join()
        assert is_suspended()
    assert seen == [False]
    assert not is_suspended()


def test_it_ends_with_an_error() -> None:
    with pytest.raises(ValueError, match="planted"), preserved(Small()):
        assert is_suspended()
        raise ValueError("planted")
    assert not is_suspended()


@pytest.mark.slow
def test_a_compiled_model_too(tmp_path: Path) -> None:
    """The calls of a compiled model are announced before any of its hooks would run."""

    def count(between: bool) -> list[int]:
        torch.manual_seed(0)
        model = Small()
        model.compile(backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with statsbridge.init(model, dir=tmp_path / str(between), every=1) as run:
            for _ in range(2):
                if between:
                    overfit_one_batch(model, loss_of, BATCH, steps=2)
                loss = loss_of(model, BATCH)
                loss.backward()
                optimizer.step()
                run.step(loss=loss)
        assert run.path is not None
        return [row["count"] for row in statsbridge.load(run.path).stats.to_pylist() if row["module"] == "first"]

    assert count(True) == count(False)

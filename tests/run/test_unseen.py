"""What the model does where no hook of ours sees it is said, once, and nothing is said of a training that is seen."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from recording import Small, events
from torch import nn

import statsbridge
from statsbridge import StatsBridgeWarning
from statsbridge.collect import collector

Record = Callable[..., statsbridge.Run]


def test_a_copy_is_trained_instead(record: Record) -> None:
    model = Small()
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    run = record(model)
    with pytest.warns(StatsBridgeWarning, match="the very model that is trained") as warned:
        for _ in range(6):
            optimizer.zero_grad()
            trained(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            run.step()
    run.finish()
    assert len(warned) == 1
    assert [event["step"] for event in events(statsbridge.load(run.path), "no_forward")] == [2]


def test_forward_is_called_past_the_hooks(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "compiled_code_exists", lambda: False)  # as another test may have left it
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(model, optimizer=optimizer)
    model.forward = model.second.forward = lambda x: nn.functional.linear(x, model.first.weight)  # type: ignore[assignment,method-assign]
    with pytest.warns(StatsBridgeWarning, match=r"model\.forward") as warned:
        for _ in range(2):
            optimizer.zero_grad()
            model.forward(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            run.step()
    run.finish()
    assert len(warned) == 1
    assert [event["step"] for event in events(statsbridge.load(run.path), "no_forward")] == [0, 1]


@pytest.mark.parametrize("kind", ["by hand", "now and then", "nothing", "a metric"])
def test_loops_in_which_all_is_well(kind: str, record: Record) -> None:
    """Updates by hand, a model trained in each third step, no training at all, another model that is only used."""
    model, other, x = Small(), Small(), torch.randn(4, 8)
    run = record(model, alerts=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(9):
            if kind == "by hand" or (kind == "now and then" and number % 3 == 2):
                other(model(x)[:, :1].expand(4, 8)).sum().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.01 * parameter.grad
            elif kind == "now and then":
                other(x).sum().backward()
            elif kind == "a metric":
                with torch.no_grad():
                    other(x)
            run.step()
    run.finish()
    assert events(statsbridge.load(run.path), "no_forward") == []

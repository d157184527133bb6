"""A published table: the update ratio sees the divergence at step 2, the loss at step 8."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recording import scalars
from torch import nn

import statsbridge

TABLE = {  # lr: {step: (loss, gradient norm, parameter norm after the step, update ratio)}
    0.05: {
        15: ("0.9147", "2.16", "4.02", "2.72e-02"),
        30: ("0.09494", "0.261", "4.28", "3.06e-03"),
        45: ("0.06656", "0.149", "4.28", "1.74e-03"),
        60: ("0.05426", "0.108", "4.28", "1.27e-03"),
    },
    0.5: {
        2: ("3.62", "3.87", "4.25", "5.31e-01"),
        4: ("71.67", "67.2", "29.6", "5.92"),
        6: ("1.38e+08", "4.31e+06", "2.15e+06", "6.32e+03"),
        8: ("inf", "nan", "nan", "nan"),
    },
}


def printed_like(value: float, digits: str) -> str:
    """`value` with as many significant digits as `digits` shows."""
    if digits in ("inf", "nan"):
        return str(value)
    mantissa, _, exponent = digits.partition("e")
    places = len(mantissa.partition(".")[2])
    return f"{value:.{places}e}" if exponent else f"{value:.{places}f}"


@pytest.mark.parametrize("rate", sorted(TABLE))
def test_the_update_ratio_table_to_every_digit(rate: float, record: Callable[..., statsbridge.Run]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    x = torch.randn(256, 8)
    y = 2 * x[:, :1] - x[:, 1:2] + 0.1 * torch.randn(256, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    run = record(model, start_step=1)
    for _ in range(max(TABLE[rate])):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
    run.finish()
    recorded = statsbridge.load(run.path).scalars
    columns = [scalars(recorded, name) for name in ("loss", "grad_norm", "param_norm", "update_ratio")]
    for step, expected in TABLE[rate].items():
        values = [column[step] for column in columns]
        assert tuple(printed_like(v, digits) for v, digits in zip(values, expected, strict=True)) == expected
    assert set(scalars(recorded, "lr/0").values()) == {rate}

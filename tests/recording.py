"""Helpers for tests that look at the record of a real training."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import torch
from torch import nn

import statsbridge


def rows(data: statsbridge.RunData, **wanted: object) -> list[dict[str, Any]]:
    """The rows of `stats` with these values, as dicts."""
    return [row for row in data.stats.to_pylist() if all(row[name] == value for name, value in wanted.items())]


def row(data: statsbridge.RunData, **wanted: object) -> dict[str, Any]:
    """The one row of `stats` with these values."""
    found = rows(data, **wanted)
    assert len(found) == 1, f"{len(found)} rows with {wanted}"
    return found[0]


def scalars(table: pa.Table, name: str) -> dict[int, float]:
    """Step to value of one scalar."""
    return {r["step"]: r["value"] for r in table.to_pylist() if r["name"] == name}


def events(data: statsbridge.RunData, kind: str) -> list[dict[str, Any]]:
    return [event for event in data.events.to_pylist() if event["kind"] == kind]


class Small(nn.Module):
    """Two linear layers with a ReLU between, and a dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(self.relu(self.first(x))))

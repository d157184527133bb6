"""Runs made of rows whose every number is known, for the tests of figures, and what a figure shows of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from log_rows import new_run, scalar_rows, write_run

from statsbridge.analyze.run_data import RunData, load
from statsbridge.collect.histogram import histogram_of

STEPS = (0, 10, 20, 40)
# Not in the order of the data flow: (module, type, depth, order).
MODULES = (
    ("head", "Linear", 3, 2),
    ("stem", "Conv2d", 1, 0),
    ("norm", "GroupNorm", 2, 1),
    ("unused", "Linear", None, None),
)
IN_ORDER = ("stem", "norm", "head")


def number(module: str, step: int, site: str) -> float:
    """The `std`, `l2` and `update_ratio` of each row: different everywhere, positive."""
    return (1 + len(module)) * 1.37 ** (1 + step) * (1 + len(site)) * 1e-3 / 3


def rows(site: str, step: int, names: tuple[tuple[str, str, int | None, int | None], ...] = MODULES) -> dict[str, Any]:
    """One step of one site: `norm` has a NaN in it at step 20 and no finite element at step 40."""
    modules = [one[0] for one in names]
    values = [math.nan if one[2] is None else number(one[0], step, site) for one in names]
    broken = [one[0] == "norm" and step >= 20 for one in names]
    if step == 40:
        values = [math.nan if flag else value for value, flag in zip(values, broken, strict=True)]
    per_parameter = site in ("parameter", "parameter_grad", "update")
    return {
        "step": step,
        "iteration": step,
        "time": 1.7e9 + step,
        "module": modules,
        "type": [one[1] for one in names],
        "depth": [one[2] for one in names],
        "order": [one[3] for one in names],
        "call": 0,
        "site": site,
        "tensor": "weight" if per_parameter else "",
        "count": 10,
        "nan_count": [int(flag) for flag in broken],
        "inf_count": 0,
        "std": np.array(values),
        "l2": np.array(values) * 2,
        "mean": np.array([value * (-1) ** place for place, value in enumerate(values)]),
        "update_ratio": np.array(values) if site == "update" else math.nan,
        "status": ["not_called" if one[2] is None else None for one in names],
        "histogram": np.stack([magnitudes(step)] * len(names)) if site == "parameter_grad" else None,
    }


def values_counted(step: int) -> np.ndarray:
    """The elements behind every histogram of a step: zeros, both signs, very small and very large ones."""
    return np.array([0.0, 0.0, -1e-9, 2.0**-24, 0.5, -0.75, 1.0, 65536.0, 1e-30, 3.0 * (1 + step)])


def magnitudes(step: int) -> np.ndarray:
    return histogram_of(values_counted(step))


def small_run(folder: Path, name: str = "small") -> RunData:
    """Three modules in a row and one that is never called, four sampled steps, five sites, a loss with a NaN."""
    run = new_run(folder, name)
    works: list[dict[str, Any]] = [
        {"stats": rows(site, step)}
        for step in STEPS
        for site in ("activation", "activation_grad", "parameter", "parameter_grad", "update")
    ]
    for step in range(50):
        loss = math.nan if step == 30 else math.inf if step == 31 else 2.0 / (1 + step)
        works.append({"scalars": scalar_rows(step, loss=loss, grad_norm=1.0 / (1 + step), lr=0.1)})
    works.append(
        {
            "events": {
                "step": [20, 20, None],
                "time": 1.7e9,
                "kind": ["bad", "note", "resumed"],
                "severity": ["critical", "info", "info"],
                "module": ["norm", None, None],
                "message": ["NaN <here>", "half-way", "later"],
            }
        }
    )
    write_run(run, *works)
    return load(run)


def traces(figure: go.Figure, **wanted: Any) -> list[Any]:
    """The traces with these attributes."""
    return [trace for trace in figure.data if all(getattr(trace, name) == value for name, value in wanted.items())]


def trace(figure: go.Figure, **wanted: Any) -> Any:
    """The one trace with these attributes."""
    found = traces(figure, **wanted)
    assert len(found) == 1, f"{len(found)} traces with {wanted}: {[one.name for one in figure.data]}"
    return found[0]


def texts(value: object) -> list[str]:
    """Every text in a figure's dictionary."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for one in value.values() for text in texts(one)]
    if isinstance(value, list | tuple):
        return [text for one in value for text in texts(one)]
    return []

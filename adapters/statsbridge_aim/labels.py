"""How a curve is called in Aim: few names, and a context that says the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from statsbridge.mirror import Series

_ABSENT: dict[str, Any] = {
    "module": None,
    "type": "",
    "site": "",
    "depth": None,
    "tensor": "",
    "call": 0,
    "smoothing": None,
}
_SMOOTHED = "/smoothed"
_PARAMETER_SITES = frozenset({"parameter", "parameter_grad", "update", "optimizer_state"})


class Label(NamedTuple):
    """What Aim knows a sequence by."""

    name: str
    context: dict[str, Any]


def label(series: Series) -> Label:
    """Name and context of a curve, different for different curves.

    `activation/std` with module, type, site, depth and, where there are any, tensor and call; an aggregate is
    `by_type/activation/std` with type, site and tensor; a scalar keeps its own name, and so does its moving average,
    which has `smoothing`. A curve that these do not give back has all its fields, as JSON, in `context.series`.
    """
    name = f"{series.site}/{series.statistic}"
    if series.kind == "aggregate":
        name = f"by_type/{name}"
    elif series.kind == "scalar":
        name = series.name if series.smoothing is None else series.name.removesuffix(_SMOOTHED)
    context = {field: getattr(series, field) for field, absent in _ABSENT.items() if getattr(series, field) != absent}
    # Aim breaks at an empty name, and keeps for itself the names that begin with two underscores.
    unfit = not name or name.startswith("__")
    if unfit or _series(name, context) != series:
        context["series"] = json.dumps(asdict(series), sort_keys=True)
    return Label(f"({name})" if unfit else name, context)


def key(name: str, context: Mapping[str, Any]) -> str:
    """One text for a name and a context, different for different ones."""
    return json.dumps([name, context], sort_keys=True, ensure_ascii=False)


def _series(name: str, context: Mapping[str, Any]) -> Series:
    """The curve that a name and a context stand for by themselves."""
    fields = _ABSENT | dict(context)
    site, tensor, call = fields["site"], fields["tensor"], fields["call"]
    if not site:
        return Series(name if fields["smoothing"] is None else name + _SMOOTHED, "scalar", **fields)
    aggregate = name.startswith(f"by_type/{site}/")
    statistic = name.removeprefix("by_type/" if aggregate else "").removeprefix(f"{site}/")
    of = fields["type"] if aggregate else fields["module"] or ("" if site in {"tensor", "tensor_grad"} else "root")
    separator = "" if not (of and tensor) else "." if site in _PARAMETER_SITES else "/"
    told = f"{name}/{of}{separator}{tensor}{f':{call}' if call else ''}"
    return Series(told, "aggregate" if aggregate else "statistic", statistic, **fields)

"""The tables of a report: every module in data-flow order, events, and what runs were made with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..analyze.findings import SEVERITIES, Finding
from ..analyze.profiles import Matrix
from ..analyze.run_data import RunData
from .sparkline import sparkline

MOST_EVENTS = 300
_TREND_CELLS = 12
_ENDLESS = float("inf")
_IN_FULL = 1e12  # whole numbers below it


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a table: its text, and what to sort by."""

    text: str
    value: float | None

    @property
    def key(self) -> str:
        """The value as JavaScript reads it, empty where there is none."""
        return "" if self.value is None or math.isnan(self.value) else f"{self.value:.17g}".replace("inf", "Infinity")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One module call: `cells` are numbers and trends in the order of `HEADERS`."""

    depth: Number
    module: str
    call: int
    type: str
    cells: Sequence[Number]
    severity: str
    findings: int
    target: str


HEADERS = (
    ("parameters", "its own, without those of modules inside"),
    ("mean", "of the activation, at its last sampled step"),
    ("std", "of the activation, at its last sampled step"),
    ("std over steps", "of the activation, lowest ▁ to highest █; × where it held a NaN or an infinity"),
    ("zeros", "fraction of exact zeros in the activation"),
    ("gradient", "L2 norm of the gradient of the activation"),
    ("gradient over steps", "lowest ▁ to highest █; × where it held a NaN or an infinity"),
    ("∥∇θ∥ / ∥θ∥", "gradient of its own parameters relative to them"),
    ("∥Δθ∥ / ∥θ∥", "update of its own parameters relative to them; near 1e-3 is usual"),
)


def number(value: float | None) -> Number:
    """A number with three significant digits, a whole one in full; nothing where there is none."""
    if value is None:
        return Number("", None)
    if not math.isfinite(value):
        return Number("NaN" if math.isnan(value) else f"{value:+.0f}", value)
    return Number(str(int(value)) if value == int(value) and abs(value) < _IN_FULL else f"{value:.3g}", value)


def module_rows(data: RunData, findings: Sequence[Finding], targets: Mapping[str, str]) -> list[ModuleRow]:
    """All module calls in data-flow order, those never called last, each with what was measured there last.

    `targets`: module → the id of its picture.
    """
    sites = data.sites
    measured = [
        measured
        for site, statistics in (("activation", ("mean", "std", "zero_fraction")), ("activation_grad", ("l2",)))
        for measured in (map(_Measured, data.matrices(site, statistics)) if site in sites else [None] * len(statistics))
    ]
    relative = _relative_to_parameters(data, sites)
    severities = _severities(findings)
    rows = []
    for one in _latest_modules(data.modules):
        module, call = one["module"], one["call"]
        mean, std, zeros, gradient = (part.last(module, call) if part else None for part in measured)
        trends = [measured[place].trend(module, call) if measured[place] else "" for place in (1, 3)]  # type: ignore[union-attr]
        to_gradient, to_update = relative.get(module, (None, None)) if call == 0 else (None, None)
        found = severities.get(module, [])
        rows.append(
            ModuleRow(
                depth=number(one["depth"]),
                module=module,
                call=call,
                type=one["type"] or "",
                cells=(
                    number(one["parameters"] if call == 0 else None),
                    number(mean),
                    number(std),
                    Number(trends[0], None),
                    number(zeros),
                    number(gradient),
                    Number(trends[1], None),
                    number(to_gradient),
                    number(to_update),
                ),
                severity=found[0] if found else "",
                findings=len(found),
                target=targets.get(module, ""),
            )
        )
    return rows


class _Measured:
    """One statistic by (module, call): of several tensors of a call, the first."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        self._places: dict[tuple[str, int], int] = {}
        names = zip(matrix.rows["module"].to_pylist(), matrix.rows["call"].to_pylist(), strict=True)
        for place, name in enumerate(names):
            self._places.setdefault(name, place)

    def last(self, module: str, call: int) -> float | None:
        place = self._places.get((module, call))
        if place is None:
            return None
        there = np.flatnonzero(~np.isnan(self._matrix.values[place]))
        return float(self._matrix.values[place, there[-1]]) if len(there) else None

    def trend(self, module: str, call: int) -> str:
        place = self._places.get((module, call))
        if place is None:
            return ""
        values: npt.NDArray[np.float64] = self._matrix.values[place]
        broken = self._matrix.nonfinite[place]
        # The statistics are of the finite elements; a step with others among them is to be seen all the same.
        series = [
            math.inf if bad else (None if math.isnan(value) else value)
            for value, bad in zip(values.tolist(), broken.tolist(), strict=True)
        ]
        return sparkline(series, _TREND_CELLS)


def _relative_to_parameters(data: RunData, sites: Sequence[str]) -> dict[str, tuple[float | None, float | None]]:
    """Module → norm of gradient and of update, each over that of the parameters, all tensors of the module together."""
    if "parameter_grad" not in sites:
        return {}
    squares: dict[str, dict[str, list[float | None]]] = {}
    norms = ("gradient_norm", "parameter_norm", "update_norm")
    for row in data.gradient_flow().to_pylist():
        own = squares.setdefault(row["module"], {name: [] for name in norms})
        for name in norms:
            own[name].append(row[name])

    def over_parameters(own: Mapping[str, Sequence[float | None]], name: str) -> float | None:
        pairs = list(zip(own[name], own["parameter_norm"], strict=True))
        if any(top is None or bottom is None for top, bottom in pairs):
            return None
        top, bottom = math.hypot(*(pair[0] or 0.0 for pair in pairs)), math.hypot(*(pair[1] or 0.0 for pair in pairs))
        return top / bottom if bottom else None

    return {
        module: (over_parameters(own, "gradient_norm"), over_parameters(own, "update_norm"))
        for module, own in squares.items()
    }


def _latest_modules(modules: pa.Table) -> list[dict[str, Any]]:
    """The last trace of each module call, of the lowest rank that has it, in data-flow order."""
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    columns = ["module", "call", "type", "depth", "order", "parameters", "rank", "attempt", "seq"]
    for row in modules.select(columns).to_pylist():
        key = (row["module"], row["call"])
        known = latest.get(key)
        if known is None or row["rank"] == known["rank"]:
            latest[key] = row

    def place(row: Mapping[str, Any]) -> tuple[float, float, int]:
        depth, order = (_ENDLESS if row[name] is None else row[name] for name in ("depth", "order"))
        return depth, order, row["call"]

    return sorted(latest.values(), key=place)


def _severities(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """Module → the severities of its findings, the worst first."""
    by_module: dict[str, list[str]] = {}
    for finding in findings:
        if finding.module is not None:
            by_module.setdefault(finding.module, []).append(finding.severity)
    return {module: sorted(found, key=SEVERITIES.index) for module, found in by_module.items()}


def event_rows(data: RunData) -> tuple[list[dict[str, Any]], int]:
    """The events to show, warnings and critical ones before all others where there are many, and how many more."""
    rows = data.events.select(["step", "kind", "severity", "module", "site", "tensor", "message", "rank"]).to_pylist()
    rows.sort(key=lambda row: SEVERITIES.index(row["severity"]) if row["severity"] in SEVERITIES else len(SEVERITIES))
    shown = rows[:MOST_EVENTS]
    shown.sort(key=lambda row: -1 if row["step"] is None else row["step"])
    for row in shown:
        row["where"] = " ".join(str(row[name]) for name in ("module", "site", "tensor") if row[name])
    return shown, len(rows) - len(shown)


def last_scalar(data: RunData, name: str) -> float | None:
    """The value of a scalar at its last step, of the lowest rank that has it; None where it has none."""
    rows = data.merged("scalars")
    rows = rows.filter(pa.compute.equal(rows["name"].cast(pa.string()), name))
    if rows.num_rows == 0:
        return None
    ranks = rows["rank"].to_numpy()
    rows = rows.filter(pa.array(ranks == ranks.min())).sort_by("step")
    values = rows["value"].drop_null()
    return float(values[-1].as_py()) if len(values) else None


def flat(config: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """A nested config as one level: `optimizer.lr` → its value as text."""
    entries: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            entries |= flat(value, f"{before}{key}.")
        else:
            entries[f"{before}{key}"] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return entries


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """The entries in which the configs differ, each with its value in every one, None where it has none."""
    entries = [flat(config) for config in configs]
    names = dict.fromkeys(name for entry in entries for name in entry)
    values = {name: [entry.get(name) for entry in entries] for name in names}
    return [(name, row) for name, row in values.items() if len(set(row)) > 1]

"""Where one is in the page: all of it is in the address, so that a link shows the same to whoever opens it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from urllib.parse import parse_qs, urlencode

TABS: tuple[tuple[str, str], ...] = (
    ("overview", "Overview"),
    ("module", "Module"),
    ("depth", "Depth"),
    ("heat", "Heat map"),
    ("types", "Types"),
    ("grid", "Grid"),
    ("gradients", "Gradient flow"),
    ("updates", "Updates"),
    ("histograms", "Histograms"),
    ("scalars", "Scalars"),
    ("events", "Events"),
    ("compare", "Compare"),
)
SMOOTHEST = 0.99


@dataclass(frozen=True, slots=True)
class State:
    """One place in the page.

    `run`: a run's id, "" for the list of runs. `module`: a path (`""` is the root), None for none chosen. `step`: a
    step label, None for the last one sampled. `site` and `statistic`: what is drawn; `backward_…`: what is drawn below
    it in the depth profile; `series`: of a single module, "" for the usual one of each site. `modules`: a glob.
    `names`: scalars. `runs`: further runs to compare with. `scalar`: what is compared.
    """

    run: str = ""
    tab: str = "overview"
    module: str | None = None
    site: str = "activation"
    statistic: str = "std"
    backward_site: str = "activation_grad"
    backward_statistic: str = "l2"
    series: str = ""
    call: int = 0
    step: int | None = None
    smoothing: float = 0.9
    modules: str = "*"
    by: str = "depth"
    kind: str = "heat"
    names: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    scalar: str = "loss"
    severity: str = "all"

    def address(self) -> str:
        """The query of the address, `?…`; what is as by default is left out."""
        default = State()
        pairs: list[tuple[str, object]] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != getattr(default, field.name):
                pairs += [(field.name, item) for item in (value if isinstance(value, tuple) else (value,))]
        return f"?{urlencode(pairs)}"

    def at(self, **changes: object) -> State:
        """The same place with some of it changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def parse(query: str) -> tuple[State, list[str]]:
    """The place that the query of an address means, and what of it was not understood, in words."""
    given = parse_qs(query.removeprefix("?"), keep_blank_values=True)
    problems: list[str] = []
    values: dict[str, object] = {}
    for field in fields(State):
        if field.name not in given:
            continue
        texts = given[field.name]
        if field.name in {"names", "runs"}:
            values[field.name] = tuple(dict.fromkeys(texts))
        elif field.name in {"step", "call"}:
            values[field.name] = _whole(field.name, texts[-1], getattr(State(), field.name), problems)
        elif field.name == "smoothing":
            values["smoothing"] = _share(texts[-1], problems)
        else:
            values[field.name] = texts[-1]
    state = State(**values)  # type: ignore[arg-type]
    for name, choices in _CHOICES.items():
        if getattr(state, name) not in choices:
            problems.append(f"{name} {getattr(state, name)!r} is none of {', '.join(choices)}")
            state = state.at(**{name: getattr(State(), name)})
    return state, problems


_CHOICES: dict[str, Sequence[str]] = {
    "tab": [name for name, _ in TABS],
    "by": ["depth", "type"],
    "kind": ["heat", "ridge"],
    "severity": ["all", "warning", "critical"],
}


def _whole(name: str, text: str, fallback: int | None, problems: list[str]) -> int | None:
    try:
        return int(text)
    except ValueError:
        problems.append(f"{name} {text!r} is no whole number")
        return fallback


def _share(text: str, problems: list[str]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= SMOOTHEST:
        problems.append(f"smoothing {text!r} is no number from 0 to {SMOOTHEST}")
        return State().smoothing
    return value

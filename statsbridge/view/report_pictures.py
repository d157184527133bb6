"""Which pictures a report shows of a run, each as the JSON that a page draws, light and dark."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from ..analyze.findings import Finding
from ..analyze.run_data import RunData
from ..errors import ConfigError, LogError
from ..log.figures import stored_figures

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_MODULES = 12
"""So many modules with findings get a picture of their own."""
MOST_BYTES = 3_600_000
"""Of all pictures together, about: what would take more is drawn as for fewer pixels, extremes kept."""

_BRIEF = "heat-activation"
_LEAST_BYTES = 60_000  # of one picture
_WIDTH, _NARROWEST = 1200, 200  # pixels
_MOST_LOGGED = 20  # figures that the user logged
_MOST_HISTOGRAMS = 4
_USUAL_HEIGHT = 450  # Plotly's own
_MOST_SHARED = 8  # scalars that several runs have in common and are laid over each other
_FIRST_SHARED = ("loss", "grad_norm", "update_ratio")
# Every step has them, and they tell nothing about learning.
_DULL = ("step_time", "samples", "samples_per_second")
_OF_TRAINING = {"lr", "grad_norm", "grad_norm_applied", "param_norm", "update_ratio", "shard", *_DULL}

_TELLING = {
    "activation": ("std", "abs_mean", "l2", "mean"),
    "activation_grad": ("l2", "abs_mean", "std"),
    "parameter_grad": ("l2", "abs_mean", "std"),
    "update": ("update_ratio", "l2"),
}
_HEAT_MAPS = {
    "activation": "A row that fades or flares up is where a signal dies or explodes.",
    "activation_grad": "Gradients run upwards: a break is where they vanish or explode.",
    "parameter_grad": "A row that fades learns no more.",
    "update": "Bright is a parameter that moves far in a step.",
}

Change = tuple[Sequence[str | int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure in a page. `id` is its place in the page, `title` what links call it, `hint` what to look for in it.

    `figure`: the light one as JSON. `dark`: what to change in it, each a path and a value. `height`: in pixels.
    """

    id: str
    title: str
    hint: str
    figure: Mapping[str, Any]
    dark: Sequence[Change]
    height: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """A picture to draw. `name`: ends its place in the page."""

    name: str
    title: str
    hint: str
    make: Callable[..., go.Figure]


@dataclass(frozen=True, slots=True)
class Missing:
    """A picture that could not be drawn, and why."""

    title: str
    reason: str


def pictures(
    data: RunData, findings: Sequence[Finding], prefix: str, *, brief: bool, share: float = 1.0
) -> list[Picture | Missing]:
    """The pictures of one run: its training, the modules with findings, then all modules along the data flow.

    `prefix`: begins the `id` of each. `brief`: of the last only the heat map of the activations. `share`: how much of
    `MOST_BYTES` they may take.
    """
    from . import figures

    hint = "Loss, learning rate and gradient norm at every step; events are marked."
    planned = [_Plan("training", "Training", hint, partial(figures.training, data))]
    if own := [name for name in _scalars(data) if not _is_of_training(name)]:
        planned.append(
            _Plan("scalars", "Scalars", "What else was logged.", partial(figures.scalars, data, list(map(escape, own))))
        )
    of_user = len(planned)
    for number, module in enumerate(modules_with_findings(findings)):
        title = f"Module {module or '(model)'}"
        hint = "A finding names it: every raw value over the steps, smoothed ones beside it, forward and backward."
        planned.append(_Plan(f"module-{number}", title, hint, partial(figures.module_series, data, module)))
    planned += _histograms(data, findings)
    planned += [one for one in _of_all_modules(data) if not brief or one.name == _BRIEF]
    most = max(_LEAST_BYTES, int(share * MOST_BYTES / len(planned)))
    drawn = [draw(f"{prefix}-{one.name}", one.title, one.hint, one.make, most) for one in planned]
    return [*drawn[:of_user], *_logged(data, prefix), *drawn[of_user:]]


def _histograms(data: RunData, findings: Sequence[Finding]) -> Iterator[_Plan]:
    """The magnitudes of what findings name, where histograms were recorded."""
    from . import figures

    named = dict.fromkeys((one.module, one.site, one.tensor) for one in findings if one.module is not None and one.site)
    drawn = 0
    for module, site, tensor in named:
        rows = data.select(modules=escape(module), sites=site, columns=["histogram"])
        if rows["histogram"].null_count == rows.num_rows:
            continue
        title = f"Magnitudes of {site} in {module or '(model)'}"
        hint = "How many elements are how large, over the steps, and what float16, bfloat16 and float8 can hold."
        make = partial(figures.histograms, data, module, site, tensor=tensor)
        yield _Plan(f"histogram-{drawn}", title, hint, make)
        drawn += 1
        if drawn == _MOST_HISTOGRAMS:
            break


def _logged(data: RunData, prefix: str) -> Iterator[Picture | Missing]:
    """The figures that the user logged, of each name the last one."""
    latest = {figure.name: figure for figure in stored_figures(data.path, data.events)}
    for number, figure in enumerate(list(latest.values())[-_MOST_LOGGED:]):
        try:
            content = figure.read()
        except LogError as error:
            yield Missing(figure.name, str(error))
            continue
        layout = content.get("layout") or {}
        yield Picture(
            id=f"{prefix}-figure-{number}",
            title=figure.name,
            hint=f"{figure.name}: logged by the training" + ("" if figure.step is None else f" at step {figure.step}"),
            figure={"data": content.get("data") or [], "layout": layout},
            dark=(),
            height=int(layout.get("height") or _USUAL_HEIGHT),
        )


def _of_all_modules(data: RunData) -> Iterator[_Plan]:
    """Each picture that the recorded sites allow."""
    from . import figures

    chosen = {
        site: statistic for site in data.sites if site in _HEAT_MAPS and (statistic := telling_statistic(data, site))
    }
    forward, backward = (chosen.get(site) for site in ("activation", "activation_grad"))
    if forward and backward:
        make = partial(
            figures.depth_profile, data, forward=("activation", forward), backward=("activation_grad", backward)
        )
        hint = "Forward above, backward below, from the input to the output; the band is the range over all steps."
        yield _Plan("depth", "Along the depth", hint, make)
    for site, statistic in chosen.items():
        hint = f"Modules from the input (top) to the output, over the steps. {_HEAT_MAPS[site]}"
        yield _Plan(f"heat-{site}", f"{site}: {statistic}", hint, partial(figures.heat_map, data, site, statistic))
    if "parameter_grad" in chosen:
        hint = "Gradients and updates relative to their parameters, along the depth: a slope loses or blows them up."
        yield _Plan("flow", "Gradient flow", hint, partial(figures.gradient_flow, data))
        yield _Plan("flow-type", "Gradient flow by type", hint, partial(figures.gradient_flow, data, by="type"))
    if chosen.get("update") == "update_ratio":
        hint = "Update over parameter, ‖Δθ‖/‖θ‖: near 1e-3 is usual, above 0.1 suspicious, above 1 diverging."
        yield _Plan("ratio", "Update ratio", hint, partial(figures.update_ratio, data))
    if forward:
        hint = "Modules of one type together."
        yield _Plan("types", "By type of module", hint, partial(figures.types, data, "activation", forward))
        hint = "Each module over the steps."
        yield _Plan("grid", "Every module", hint, partial(figures.grid, data, "activation", forward))


def telling_statistic(data: RunData, site: str) -> str | None:
    """Of the statistics that say most about `site` the first one that has a number; None where none has."""
    for statistic in _TELLING.get(site, ("std", "abs_mean", "l2", "mean")):
        if np.isfinite(data.matrix(site, statistic).values).any():
            return statistic
    return None


def shared_pictures(runs: Mapping[str, RunData]) -> list[Picture | Missing]:
    """Scalars of several runs, laid over each other. `runs`: by the name to show."""
    from . import figures

    hint = "The same scalar of every run that has it."
    return [
        draw(f"shared-{number}", name, hint, partial(figures.overlay, runs, name), MOST_BYTES // _MOST_SHARED)
        for number, name in enumerate(_shared_scalars(list(runs.values())))
    ]


def draw(id: str, title: str, hint: str, make: Callable[..., go.Figure], most_bytes: int) -> Picture | Missing:
    """The picture that `make(dark=…, width_pixels=…)` draws; Missing where the run has not what it takes."""
    width = _WIDTH
    try:
        text = make(dark=False, width_pixels=width).to_json()
        if len(text) > most_bytes:
            width = max(_NARROWEST, width * most_bytes // len(text))
            text = make(dark=False, width_pixels=width).to_json()
        light, dark = json.loads(text), json.loads(make(dark=True, width_pixels=width).to_json())
    except (ConfigError, LogError) as error:
        return Missing(title, str(error))
    height = int(light["layout"].get("height") or _USUAL_HEIGHT)
    return Picture(id=id, title=title, hint=hint, figure=light, dark=list(changes(light, dark)), height=height)


def changes(old: Any, new: Any, path: tuple[str | int, ...] = ()) -> list[Change]:
    """What makes the JSON value `new` of `old`: the places that differ, each with its value in `new`."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return [change for key in old for change in changes(old[key], new[key], (*path, key))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        if old == new:
            return []
        return [change for place in range(len(old)) for change in changes(old[place], new[place], (*path, place))]
    return [] if old == new and type(old) is type(new) else [(path, new)]


def modules_with_findings(findings: Sequence[Finding]) -> list[str]:
    """The modules that findings name, in their order, as many as get a picture of their own."""
    named = dict.fromkeys(finding.module for finding in findings if finding.module is not None)
    return list(named)[:MOST_MODULES]


def _shared_scalars(runs: Sequence[RunData]) -> list[str]:
    """The scalars that at least two runs have, the telling ones first."""
    counts = Counter(name for run in runs for name in _scalars(run))
    shared = [name for name, count in counts.items() if count > 1 and name not in _DULL]
    shared.sort(key=lambda name: (_FIRST_SHARED.index(name) if name in _FIRST_SHARED else len(_FIRST_SHARED), name))
    return shared[:_MOST_SHARED]


def _scalars(data: RunData) -> list[str]:
    names: list[str] = data.scalars["name"].unique().to_pylist()
    return names


def _is_of_training(name: str) -> bool:
    """Whether the picture of the training shows it, or it tells nothing of its own."""
    return "loss" in name.lower() or name.partition("/")[0] in _OF_TRAINING

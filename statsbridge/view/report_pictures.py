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
from ..log.schema import SITES

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_MODULES = 12
"""So many modules with findings get a picture of their own."""

_BRIEF = "heat-activation"
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
class Missing:
    """A picture that could not be drawn, and why."""

    title: str
    reason: str


def pictures(data: RunData, findings: Sequence[Finding], prefix: str, *, brief: bool) -> list[Picture | Missing]:
    """The pictures of one run: its training, the modules with findings, then all modules along the data flow.

    `prefix`: begins the `id` of each. `brief`: of the last only the heat map of the activations.
    """
    from . import figures

    drawn = [
        draw(
            f"{prefix}-training",
            "Training",
            "Loss, learning rate and gradient norm at every step; events are marked.",
            partial(figures.training, data),
        )
    ]
    if own := [name for name in _scalars(data) if not _is_of_training(name)]:
        hint = "What else was logged."
        drawn.append(draw(f"{prefix}-scalars", "Scalars", hint, partial(figures.scalars, data, list(map(escape, own)))))
    drawn += _logged(data, prefix)
    sites = recorded_sites(data)
    for number, module in enumerate(modules_with_findings(findings)):
        title = f"Module {module or '(model)'}"
        hint = "A finding names it: every raw value over the steps, smoothed ones beside it, forward and backward."
        drawn.append(draw(f"{prefix}-module-{number}", title, hint, partial(figures.module_series, data, module)))
    drawn += _histograms(data, findings, prefix)
    for name, title, hint, make in _of_all_modules(data, sites):
        if brief and name != _BRIEF:
            continue
        drawn.append(draw(f"{prefix}-{name}", title, hint, make))
    return drawn


def _histograms(data: RunData, findings: Sequence[Finding], prefix: str) -> Iterator[Picture | Missing]:
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
        yield draw(f"{prefix}-histogram-{drawn}", title, hint, make)
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


def _of_all_modules(data: RunData, sites: Sequence[str]) -> Iterator[tuple[str, str, str, Callable[..., go.Figure]]]:
    """Name, title, hint and maker of each picture that the recorded sites allow."""
    from . import figures

    chosen = {site: statistic for site in sites if (statistic := telling_statistic(data, site))}
    forward, backward = (chosen.get(site) for site in ("activation", "activation_grad"))
    if forward and backward:
        make = partial(
            figures.depth_profile, data, forward=("activation", forward), backward=("activation_grad", backward)
        )
        hint = "Forward above, backward below, from the input to the output; the band is the range over all steps."
        yield "depth", "Along the depth", hint, make
    for site, statistic in chosen.items():
        if site in _HEAT_MAPS:
            hint = f"Modules from the input (top) to the output, over the steps. {_HEAT_MAPS[site]}"
            yield f"heat-{site}", f"{site}: {statistic}", hint, partial(figures.heat_map, data, site, statistic)
    if "parameter_grad" in chosen:
        hint = "Gradients and updates relative to their parameters, along the depth: a slope loses or blows them up."
        yield "flow", "Gradient flow", hint, partial(figures.gradient_flow, data)
        yield "flow-type", "Gradient flow by type", hint, partial(figures.gradient_flow, data, by="type")
    if chosen.get("update") == "update_ratio":
        hint = "Update over parameter, ‖Δθ‖/‖θ‖: near 1e-3 is usual, above 0.1 suspicious, above 1 diverging."
        yield "ratio", "Update ratio", hint, partial(figures.update_ratio, data)
    if forward:
        hint = "Modules of one type together."
        yield "types", "By type of module", hint, partial(figures.types, data, "activation", forward)
        hint = "Each module over the steps."
        yield "grid", "Every module", hint, partial(figures.grid, data, "activation", forward)


def recorded_sites(data: RunData) -> list[str]:
    """The sites that were sampled, in the order of `SITES`."""
    there = set(data.select(columns=["site"])["site"].unique().to_pylist())
    return [site for site in SITES if site in there]


def telling_statistic(data: RunData, site: str) -> str | None:
    """Of the statistics that say most about `site` the first one that has a number; None where none has."""
    for statistic in _TELLING.get(site, ("std", "abs_mean", "l2", "mean")):
        if np.isfinite(data.matrix(site, statistic).values).any():
            return statistic
    return None


def shared_pictures(runs: Mapping[str, RunData]) -> list[Picture | Missing]:
    """Scalars of several runs, laid over each other. `runs`: by the name to show."""
    from . import figures

    return [
        draw(
            f"shared-{number}", name, "The same scalar of every run that has it.", partial(figures.overlay, runs, name)
        )
        for number, name in enumerate(_shared_scalars(list(runs.values())))
    ]


def draw(id: str, title: str, hint: str, make: Callable[..., go.Figure]) -> Picture | Missing:
    """The picture that `make(dark=…)` draws; Missing where the run has not what it takes."""
    try:
        light, dark = (json.loads(make(dark=theme).to_json()) for theme in (False, True))
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

"""What each tab shows: pictures of `view.figures`, and lists. Every text from a run is given to Dash as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from ...analyze.comparison import Comparison, compare
from ...analyze.run_data import RunData
from ...errors import ConfigError, StatsBridgeError
from .. import figures
from . import lists
from .diagnoses import Diagnosis
from .facts import Facts
from .library import rows_of
from .state import State

_COMPARED_AT_MOST = 30
_LINED_UP = 500_000
"""Rows of `stats` up to which runs are lined up module by module in a click."""
_LEGEND = 300  # pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that a tab is drawn from. `others`: the further runs that are compared. `width`: of the page, in pixels."""

    data: RunData
    facts: Facts
    state: State
    diagnosis: Diagnosis
    others: Sequence[RunData]
    dark: bool
    width: int

    @property
    def look(self) -> dict[str, Any]:
        """The keywords that every figure takes."""
        return {"dark": self.dark, "width_pixels": self.width}

    @property
    def beside_legend(self) -> dict[str, Any]:
        """The same for the figures whose legend stands beside them: points beyond their pixels cost time alone."""
        return {"dark": self.dark, "width_pixels": max(300, self.width - _LEGEND)}


def draw(view: View) -> list[Any]:
    """The contents of the tab that the state is at. What cannot be drawn is said in its place."""
    return _TABS[view.state.tab](view)


def picture(state: State, name: str, make: Callable[[], Any]) -> Any:
    """A figure, or the reason why there is none. `name` tells the figures of a tab apart."""
    from dash import dcc, html

    try:
        figure = make()
    except StatsBridgeError as error:
        return lists.message(str(error), name=f"no-{name}")
    height = int(figure.layout.height or 440)
    # What is zoomed and hidden stays so while the run goes on, and at another step; another subject begins anew.
    figure.layout.uirevision = f"{name} {state.at(step=None, smoothing=State().smoothing).address()}"
    return html.Div(
        dcc.Graph(
            id={"kind": "figure", "name": name},
            figure=figure,
            responsive=True,
            config={"displaylogo": False, "displayModeBar": "hover", "plotlyServerURL": ""},
            style={"height": f"{height}px"},
        ),
        className="picture",
    )


def _smoothing(state: State) -> float | None:
    return state.smoothing or None


def _overview(view: View) -> list[Any]:
    return [
        lists.findings(view.diagnosis, view.state),
        picture(view.state, "training", lambda: figures.training(view.data, **view.beside_legend)),
        lists.run_facts(view.data.info),
    ]


def _module(view: View) -> list[Any]:
    state = view.state
    if state.module is None:
        return [lists.message("Choose a module in the tree on the left: its series, forward and backward, come here.")]
    known = view.facts.modules.get(state.module)
    if known is None:
        return [lists.message(f"There is no module {state.module!r} in this run.")]
    here = [one for one in view.diagnosis.findings if one.module == state.module]
    return [
        lists.module_heading(known),
        *([lists.findings(Diagnosis(tuple(here)), state, of_module=True)] if here else []),
        picture(
            view.state,
            "module",
            lambda: figures.module_series(
                view.data,
                known.path,
                statistic=state.series or None,
                call=state.call,
                smoothing=_smoothing(state),
                **view.beside_legend,
            ),
        ),
    ]


def _depth(view: View) -> list[Any]:
    state = view.state
    step = view.facts.nearest_step(state.step)
    return [
        picture(
            view.state,
            "depth",
            lambda: figures.depth_profile(
                view.data,
                step=step,
                forward=(state.site, state.statistic),
                backward=(state.backward_site, state.backward_statistic),
                modules=state.modules or "*",
                **view.look,
            ),
        )
    ]


def _heat(view: View) -> list[Any]:
    state = view.state
    return [
        picture(
            view.state,
            "heat",
            lambda: figures.heat_map(view.data, state.site, state.statistic, modules=state.modules or "*", **view.look),
        )
    ]


def _types(view: View) -> list[Any]:
    state = view.state
    step = view.facts.nearest_step(state.step)
    return [
        picture(
            view.state, "types", lambda: figures.types(view.data, state.site, state.statistic, step=step, **view.look)
        )
    ]


def _grid(view: View) -> list[Any]:
    state = view.state
    return [
        picture(
            view.state,
            "grid",
            lambda: figures.grid(
                view.data,
                state.site,
                state.statistic,
                modules=state.modules or "*",
                columns=max(2, view.width // 260),
                **view.look,
            ),
        )
    ]


def _gradients(view: View) -> list[Any]:
    step = view.facts.nearest_step(view.state.step)
    by = cast(Literal["depth", "type"], view.state.by)
    return [picture(view.state, "gradients", lambda: figures.gradient_flow(view.data, step=step, by=by, **view.look))]


def _updates(view: View) -> list[Any]:
    step = view.facts.nearest_step(view.state.step)
    return [picture(view.state, "updates", lambda: figures.update_ratio(view.data, step=step, **view.look))]


def _histograms(view: View) -> list[Any]:
    state = view.state
    if state.module is None:
        return [lists.message("Choose a module in the tree on the left.")]
    tensors = view.facts.tensors(state.module, state.site)
    if not tensors:
        return [lists.message(f"Module {state.module!r} has no rows of site {state.site}.")]

    drawn = partial(
        figures.histograms,
        view.data,
        state.module,
        state.site,
        call=state.call,
        kind=cast(Literal["heat", "ridge"], state.kind),
        **view.look,
    )
    return [
        picture(view.state, f"histogram-{number}", partial(drawn, tensor=tensor))
        for number, tensor in enumerate(tensors)
    ]


def _scalars(view: View) -> list[Any]:
    names = view.state.names or tuple(view.facts.scalars[:8])
    if not names:
        return [lists.message("No scalars in this run yet.")]
    return [
        picture(
            view.state,
            "scalars",
            lambda: figures.scalars(view.data, names, smoothing=_smoothing(view.state), **view.beside_legend),
        )
    ]


def _events(view: View) -> list[Any]:
    return [lists.events(view.data.events, view.state)]


def _compare(view: View) -> list[Any]:
    runs = [view.data, *view.others]
    if len(runs) > _COMPARED_AT_MOST:
        raise ConfigError(f"{len(runs)} runs are too many for one picture: choose at most {_COMPARED_AT_MOST}")
    state = view.state
    return [
        picture(
            view.state,
            "compare",
            lambda: figures.overlay(runs, state.scalar, smoothing=_smoothing(state), **view.beside_legend),
        ),
        lists.compared([run.info for run in runs], _comparisons(runs)),
    ]


def _comparisons(runs: Sequence[RunData]) -> list[Comparison] | None:
    """Where the runs part from the first of them; None where there is too much to look through."""
    if sum(rows_of(run.path) for run in runs) > _LINED_UP:
        return None
    return compare(runs[0], *runs[1:]) if len(runs) > 1 else []


_TABS: Mapping[str, Callable[[View], list[Any]]] = {
    "overview": _overview,
    "module": _module,
    "depth": _depth,
    "heat": _heat,
    "types": _types,
    "grid": _grid,
    "gradients": _gradients,
    "updates": _updates,
    "histograms": _histograms,
    "scalars": _scalars,
    "events": _events,
    "compare": _compare,
}

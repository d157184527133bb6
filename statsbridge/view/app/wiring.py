"""Which change of the page asks what. The address is where all state lives; see `assets/page.js`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .layout import CONTROLS

if TYPE_CHECKING:
    from .page import Page


def connect(app: Any, page: Page) -> None:
    """Let the Dash application `app` answer with the methods of `page`."""
    from dash import ALL, ClientsideFunction, Input, Output
    from dash import State as Held

    app.clientside_callback(
        ClientsideFunction("page", "sync"),
        [
            Output("url", "search"),
            Output("place", "data"),
            Output("run", "data"),
            Output("link", "value"),
            Output("warm", "children"),
        ],
        [Input("url", "search"), *(Input(control.id, control.prop) for control in CONTROLS)],
        [
            *(Held(name, "data") for name in ("fields", "token", "last", "branches", "place", "run")),
            Held("theme", "forceColorScheme"),
        ],
    )
    app.clientside_callback(
        ClientsideFunction("page", "say"),
        [Output("said-step", "children"), Output("said-smoothing", "children")],
        [Input("at-step", "value"), Input("at-smoothing", "value"), Input("last", "data")],
    )
    new = [Input("run", "data"), Input("fresh", "data")]

    def answer(outputs: list[Any], inputs: list[Any], method: Any) -> None:
        app.callback(outputs, inputs, prevent_initial_call=True)(method)

    app.clientside_callback(
        ClientsideFunction("contents", "draw"),
        [
            Output("content", "children"),
            Output("content", "data-place"),
            Output("drawn", "data"),
            Output("at-call", "data"),
            Output("at-call", "disabled"),
        ],
        [Input("place", "data"), Input("fresh", "data")],
        [Held("drawn", "data"), Held("at-call", "data")],
        prevent_initial_call=True,
    )
    answer(
        [Output("fresh", "data")],
        [Input("tick", "n_intervals"), Held("drawn", "data"), Held("grown", "data")],
        lambda ticks, drawn, grown: [page.look(ticks, drawn, grown)],
    )
    answer(
        [
            Output("at-run", "data"),
            Output("at-runs", "data"),
            Output("badge", "children"),
            Output("at-site", "data"),
            Output("at-backward_site", "data"),
            Output("at-series", "data"),
            Output("at-names", "data"),
            Output("at-scalar", "data"),
        ],
        new,
        page.describe,
    )
    answer(
        [
            Output("last", "data"),
            Output("at-step", "max"),
            Output("at-step", "min"),
            Output("at-step", "value", allow_duplicate=True),
        ],
        [*new, Held("place", "data")],
        page.steps,
    )
    app.callback(
        [Output("at-statistic", "data"), Output("at-backward_statistic", "data")],
        [Input("at-site", "value"), Input("at-backward_site", "value")],
    )(page.statistics)
    answer(
        [
            Output("at-module", "data"),
            Output("at-module", "expanded", allow_duplicate=True),
            Output("branches", "data"),
            Output("tree-note", "children"),
            Output("grown", "data"),
        ],
        [*new, Input("at-find", "value"), Input("at-order", "value"), Held("url", "search"), Held("branches", "data")],
        page.tree,
    )
    app.clientside_callback(
        ClientsideFunction("contents", "point"),
        Output("point", "data"),
        Input({"kind": "figure", "name": ALL}, "clickData"),
        prevent_initial_call=True,
    )
    answer(
        [Output("url", "search", allow_duplicate=True)],
        [Input("point", "data"), Held("place", "data")],
        lambda point, place: [page.open_module(point, place)],
    )

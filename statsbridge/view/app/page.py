"""The page put together: Dash, the guard before it, and its answers to what the browser asks."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from ...errors import ConfigError, StatsBridgeError
from . import first_picture, lists, tabs
from .diagnoses import Diagnoses
from .facts import Facts, StepsOfParts, statistics_of
from .layout import layout
from .library import Library, Recent
from .security import HOST, Guard
from .state import State, parse
from .tree import grow
from .wiring import connect

_KEPT_DRAWINGS = 16
_KEPT_FACTS = 32
_NOT_KEPT = {"Cache-Control": "no-store"}
_LATER = 1.0
"""Seconds until what a click needs is made ready: the first picture needs the processor first."""
_PATIENCE = 5.0
"""What took a while to draw is drawn again, while the run goes on, only after so many times that while."""


class Page:
    """One page over the runs of a folder. `server`: the WSGI application. `guard`: holds the token of its address.

    Raises ConfigError, with the extra to install, where Dash or its Mantine components are missing.
    """

    def __init__(self, folder: Path, guard: Guard | None = None) -> None:
        try:
            import dash
            import dash_mantine_components  # noqa: F401 - its scripts are served once it was imported
            from flask import Flask
        except ImportError as error:
            raise ConfigError(f"{error.name} is not installed: pip install 'statsbridge[view]'") from error
        self.library = Library(folder)
        self.guard = guard or Guard()
        self.diagnoses = Diagnoses()
        self._facts: Recent[tuple[str, str], Facts] = Recent(_KEPT_FACTS)
        self._steps = StepsOfParts()
        self._drawings: Recent[tuple[Any, ...], list[Any]] = Recent(_KEPT_DRAWINGS)
        self.server = Flask("statsbridge")
        self.guard.install(self.server)
        app: Any = dash.Dash(
            "statsbridge",
            server=self.server,  # type: ignore[arg-type]
            assets_folder=str(Path(__file__).parent / "assets"),
            assets_external_path="",
            serve_locally=True,
            title="statsbridge",
            update_title="",
            enable_mcp=False,
            index_string=_INDEX,
        )
        app.layout = layout(self.guard.token)
        index = app.interpolate_index
        app.interpolate_index = lambda **parts: index(**parts).replace("<body>", f"<body>{self.first_element()}", 1)
        connect(app, self)
        self.server.add_url_rule("/contents", view_func=self.answer, methods=["POST"])
        self.server.add_url_rule(first_picture.PATH, view_func=self.first_image)
        self.guard.scripts = tuple(app.csp_hashes())
        # At its first request Dash looks for the page's own script and style; one that came meanwhile would do without.
        self.guard.let_in(self.server.test_client()).get("/", base_url=f"http://{HOST}")

    def prepare(self, run: str) -> None:
        """Begin, in the background, with what the first answers need: the browser takes a second to ask.

        `run`: the one that is shown first, "" for the list of runs.
        """
        threading.Thread(target=self._prepare, args=(run,), daemon=True, name="prepare").start()

    def _prepare(self, run: str) -> None:
        self.contents(State(run=run).address(), dark=False, width=first_picture.WIDTH)
        facts = _unless_refused(lambda: self.open(run)[2] if run else None, None)
        if facts is not None:
            for known in ("modules", "scalars", "sites", "steps"):
                _unless_refused(partial(getattr, facts, known), None)
            # The first series of a large run takes twice as long as any other: its files are looked through.
            time.sleep(_LATER)
            for module in _unless_refused(lambda: list(facts.modules)[:1], []):
                self.contents(
                    State(run=run, tab="module", module=module).address(), dark=False, width=first_picture.WIDTH
                )

    def open(self, run: str) -> tuple[Any, str, Facts]:
        """A run, its version, and its choices, as it is now. Raises LogError where it is none of those listed."""
        data, version = self.library.open(run)
        facts = self._facts.get((run, version))
        if facts is None:
            facts = Facts(data, self._steps)
            self._facts.put((run, version), facts)
        return data, version, facts

    def version(self, run: str) -> str:
        """A text that changes whenever there is something new to show of the run; of the list of runs for ""."""
        if not run:
            return "|".join(f"{one}:{self.library.version(one)}" for one in self.library.ids())
        return f"{self.library.version(run)}/{self.diagnoses.serial}"

    def contents(self, query: str, *, dark: bool, width: int) -> list[Any]:
        """What the page shows at an address, without its frame. What cannot be shown is said."""
        state, problems = parse(query)
        notes = [lists.message(said, name=f"problem-{number}", colour="orange") for number, said in enumerate(problems)]
        try:
            if not state.run:
                return notes + lists.runs(self.library.listing(), str(self.library.folder))
            return notes + self._tab(state, dark, width)
        except StatsBridgeError as error:
            return [*notes, lists.message(str(error), name="refused", colour="red")]
        except Exception as error:  # a page that says what is wrong is worth more than one that does nothing
            traceback.print_exc(file=sys.stderr)
            return [*notes, lists.message(f"an error of the page's own: {error!r}", name="broken", colour="red")]

    def _tab(self, state: State, dark: bool, width: int) -> list[Any]:
        data, version, facts = self.open(state.run)
        diagnosis = self.diagnoses.of(data, version)
        wanted = [run for run in state.runs if run != state.run] if state.tab == "compare" else []
        others = [self.library.open(run) for run in wanted]
        key = (version, diagnosis, state, dark, width, *(known for _, known in others))
        view = tabs.View(
            data=data,
            facts=facts,
            state=state,
            diagnosis=diagnosis,
            others=[other for other, _ in others],
            dark=dark,
            width=width,
        )
        return self._drawings.made(key, lambda: tabs.draw(view))

    # The answers to the browser: one for each entry in `wiring.connect`.

    def answer(self) -> Any:
        """The contents of the place that the request in progress asks for, and when to look for something new."""
        from flask import Response, request
        from plotly.io.json import to_json_plotly

        place: Any = request.get_json(silent=True)
        try:
            query, dark, width = str(place["query"]), bool(place["dark"]), int(place["width"])
        except (TypeError, KeyError, ValueError, OverflowError):
            return "statsbridge: this is no place of the page\n", 400, {"Content-Type": "text/plain; charset=utf-8"}
        began = time.monotonic()
        state = parse(query)[0]
        version = _unless_refused(lambda: self.version(state.run), None)
        contents = self.contents(query, dark=dark, width=width)
        now = time.monotonic()
        told = {"run": state.run, "version": version, "next": now + _PATIENCE * (now - began)}
        found = {"contents": contents, "drawn": told, "calls": self._calls(state)}
        return Response(to_json_plotly(found), mimetype="application/json")

    def _calls(self, state: State) -> list[str]:
        """The calls of the module that is chosen, as the control offers them."""
        facts = _unless_refused(lambda: self.open(state.run)[2] if state.run else None, None)
        chosen = facts.modules.get(state.module) if facts is not None and state.module is not None else None
        return [str(call) for call in range(1 if chosen is None else chosen.calls)]

    def first_element(self) -> str:
        """What the page that is asked for shows before its scripts run."""
        from flask import request

        return first_picture.element(parse(request.query_string.decode())[0], request.args.get("theme"))

    def first_image(self) -> Any:
        """The picture of the place that is asked for, as an SVG; nothing where there is none."""
        from flask import Response, request

        query, dark = request.query_string.decode(), request.args.get("dark") == "1"
        drawn = None
        if first_picture.has_one(parse(query)[0]):
            drawn = first_picture.image(self.contents(query, dark=dark, width=first_picture.WIDTH), dark=dark)
        return ("", 204) if drawn is None else Response(drawn, mimetype="image/svg+xml", headers=_NOT_KEPT)

    def look(self, ticks: int, drawn: dict[str, Any] | None, grown: str | None) -> Any:
        """The version of what is shown, where it is another than that of contents or tree."""
        from dash import no_update

        if drawn is None or time.monotonic() < drawn["next"]:
            return no_update
        version = _unless_refused(lambda: self.version(drawn["run"]), None)
        seen = version == drawn["version"] and (grown == version or not drawn["run"])
        return no_update if version is None or seen else version

    def describe(self, run: str, fresh: str | None) -> Any:
        """The choices of the controls: runs, other runs, state of the run, sites, statistics of a series, scalars."""
        named = [(one, self.library.name(one)) for one in self.library.ids()]
        choices = [{"value": one, "label": f"{name} · {one}"} for one, name in named]
        # Short, where many stand beside each other: the end of an id is random.
        others = [{"value": one, "label": f"{name} · {one[-8:]}"} for one, name in named if one != run]
        series = [{"value": "", "label": "usual of each site"}]
        series += [{"value": name, "label": name} for name in statistics_of("activation")]
        opened = _unless_refused(lambda: self.open(run) if run else None, None)
        if opened is None:
            return choices, others, [], [], [], series, [], []
        data, _, facts = opened
        backward = [site for site in facts.sites if site != "activation"]
        badge = [lists.state_badge(self.library.state(run))]
        badge += [lists.restricted_badge()] if data.info.get("restricted") else []
        return choices, others, badge, facts.sites, backward, series, facts.scalars, facts.scalars

    def steps(self, run: str, fresh: str | None, place: dict[str, Any] | None) -> Any:
        """The ends of the slider of steps; its value too, where that is to be the last step."""
        from dash import no_update

        facts = _unless_refused(lambda: self.open(run)[2] if run else None, None)
        if facts is None or len(facts.steps) == 0:
            return None, 1, 0, no_update
        first, last = int(facts.steps[0]), int(facts.steps[-1])
        followed = place is None or parse(place["query"])[0].step is None
        return last, max(last, first + 1), first, last if followed else no_update

    def statistics(self, site: str | None, backward: str | None) -> Any:
        """The statistics of the two sites."""
        return list(statistics_of(site or "")), list(statistics_of(backward or ""))

    def tree(
        self,
        run: str,
        fresh: str | None,
        search: str | None,
        order: str,
        address: str | None,
        branches: list[str] | None,
    ) -> Any:
        """The module tree, what of it is open, what is open by default, a note below it, the version that it is of."""
        from dash import ctx, no_update

        opened = _unless_refused(lambda: self.open(run) if run else None, None)
        if opened is None:
            return [], [], [], "", None
        seen = self.version(run)
        data, version, facts = opened
        asked = parse_qs((address or "").removeprefix("?"), keep_blank_values=True)
        shown = asked.get("module", [None])[-1]
        marks = self.diagnoses.of(data, version).worst()
        tree = grow(facts.modules, order=order, search=search or "", marks=marks, shown=shown)
        expanded: Any = tree.expanded
        # Not of a search, or a run, that the reader has just left.
        if "open" in asked and asked.get("run") == [run] and asked.get("find", [""])[-1] == (search or ""):
            expanded = [branch for branch in asked["open"] if branch]
        total = len(facts.modules)
        note = f"{len(tree.matching)} of {total} modules" if search else f"{total} modules"
        # What the reader opened stays open while the run goes on.
        goes_on = branches and [one["prop_id"] for one in ctx.triggered] == ["fresh.data"]
        opened_now = (no_update, no_update) if goes_on else (expanded, tree.expanded)
        return tree.nodes, *opened_now, note if total else "no modules yet", seen

    def open_module(self, clicked: dict[str, Any] | None, place: dict[str, Any] | None) -> Any:
        """The address of the module that a click on a picture was at."""
        from dash import no_update

        if not clicked or not clicked.get("points") or place is None:
            return no_update
        state = parse(place["query"])[0]
        facts = _unless_refused(lambda: self.open(state.run)[2], None)
        point = clicked["points"][0]
        data = point.get("customdata")
        for text in (data[0] if isinstance(data, list) and data else data, point.get("hovertext"), point.get("y")):
            module = facts.module_in(text) if isinstance(text, str) and facts is not None else None
            if module is not None:
                return state.at(tab="module", module=module, call=0).address()
        return no_update


def _unless_refused(ask: Callable[[], Any], otherwise: Any) -> Any:
    """What `ask` gives; `otherwise` where the run is not there or cannot be read, which the contents say."""
    try:
        return ask()
    except StatsBridgeError:
        return otherwise


_INDEX = """<!doctype html>
<html lang="en">
<head>
{%metas%}
<link rel="preload" as="script" href="/_dash-component-suites/plotly/package_data/plotly.min.js">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{%title%}</title>
<link rel="icon" href="data:,">
{%css%}
</head>
<body>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>
"""

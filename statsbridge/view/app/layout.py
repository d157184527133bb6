"""What stands on the page and stays there: header, module tree, tabs and controls. Only their contents change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..style import DARK
from .state import SMOOTHEST, TABS, State

POLL_MILLISECONDS = 1500
# Twenty runs chosen must not push the picture off the screen.
_FEW_LINES = {"pillsList": {"maxHeight": 80, "overflowY": "auto"}}

# From text to what lies behind the page; the eighth, between them, is the paper of the figures.
_DARK_SHADES = ("#e3e6ea", "#b4b9c0", "#9aa4b1", "#5c6570", "#3d434c", "#2c323a", "#1c2127", "#101317", "#0b0d10")


@dataclass(frozen=True, slots=True)
class Control:
    """A control that writes into the address.

    `name`: the word in the address. `prop`: the property that holds its value. `fallback`: the value that the address
    leaves out. `kind`: how the two are put into each other. `part_of`: the control whose component it belongs to.
    """

    name: str
    prop: str
    fallback: Any
    kind: Literal["text", "number", "list", "node", "branches"] = "text"
    part_of: str | None = None

    @property
    def id(self) -> str:
        """The id of its component."""
        return f"at-{self.part_of or self.name}"

    def to_json(self) -> dict[str, Any]:
        """As the script of the page reads it."""
        return {
            "id": f"{self.id}.{self.prop}",
            "name": self.name,
            "kind": self.kind,
            "fallback": self.fallback,
        }


_START = State()
CONTROLS: tuple[Control, ...] = (
    Control("run", "value", ""),
    Control("tab", "value", _START.tab),
    Control("module", "selected", [], "node"),
    Control("open", "expanded", [], "branches", part_of="module"),
    Control("find", "value", ""),
    Control("order", "value", "depth"),
    Control("theme", "value", "auto"),
    Control("site", "value", _START.site),
    Control("statistic", "value", _START.statistic),
    Control("backward_site", "value", _START.backward_site),
    Control("backward_statistic", "value", _START.backward_statistic),
    Control("series", "value", _START.series),
    Control("call", "value", str(_START.call)),
    Control("step", "value", None, "number"),
    Control("smoothing", "value", _START.smoothing, "number"),
    Control("modules", "value", _START.modules),
    Control("by", "value", _START.by),
    Control("kind", "value", _START.kind),
    Control("names", "value", [], "list"),
    Control("runs", "value", [], "list"),
    Control("scalar", "value", _START.scalar),
    Control("severity", "value", _START.severity),
)


def layout(token: str) -> Any:
    """The whole page, empty. `token`: of the guard, for the link to send."""
    import dash_mantine_components as dmc
    from dash import dcc, html

    return dmc.MantineProvider(
        id="theme",
        # Dark as the figures are, or they would stand in boxes.
        theme={
            "colors": {
                "dark": [*_DARK_SHADES[:7], DARK.paper, *_DARK_SHADES[7:]],
            },
            "fontFamily": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif",
            "fontFamilyMonospace": "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace",
            "primaryColor": "blue",
        },
        children=[
            dcc.Location(id="url", refresh=False),
            dcc.Interval(id="tick", interval=POLL_MILLISECONDS),
            dcc.Store(id="fields", data=[control.to_json() for control in CONTROLS]),
            dcc.Store(id="token", data=token),
            *(dcc.Store(id=name) for name in ("place", "run", "last", "branches", "drawn", "grown", "fresh", "point")),
            # Takes a graph once the first picture was asked for: Plotly is then evaluated while that is worked out.
            html.Div(id="warm", style={"display": "none"}),
            dmc.AppShell(
                [
                    dmc.AppShellHeader(_header(), px="md"),
                    dmc.AppShellNavbar(_navbar(), p="sm"),
                    dmc.AppShellMain(
                        [_tabs(), html.Div(_controls(), id="controls"), html.Div(id="content")],
                    ),
                ],
                header={"height": 54},
                navbar={"width": 310, "breakpoint": "sm", "collapsed": {"mobile": True}},
                padding="md",
            ),
        ],
    )


def _header() -> Any:
    import dash_mantine_components as dmc
    from dash import dcc, html

    schemes = [{"value": name, "label": name.capitalize()} for name in ("auto", "light", "dark")]
    return dmc.Group(
        [
            dcc.Link("statsbridge", href="?", refresh=False, className="brand", title="the list of runs"),
            dmc.Select(
                id="at-run",
                data=[],
                searchable=True,
                allowDeselect=False,
                placeholder="choose a run",
                nothingFoundMessage="no such run",
                w=400,
                size="sm",
                comboboxProps={"width": 520, "position": "bottom-start"},
            ),
            html.Div(id="badge"),
            dmc.Space(style={"flex": 1}),
            dmc.CopyButton(
                "Copy link", id="link", value="", copiedChildren="Copied", size="xs", variant="default", color="blue"
            ),
            dmc.SegmentedControl(id="at-theme", data=schemes, value="auto", size="xs"),
        ],
        h="100%",
        gap="sm",
        wrap="nowrap",
    )


def _navbar() -> Any:
    import dash_mantine_components as dmc
    from dash import html

    return [
        dmc.Group(
            [
                dmc.TextInput(
                    id="at-find", placeholder="search modules: path, type or glob", debounce=250, size="xs", flex=1
                ),
                dmc.SegmentedControl(
                    id="at-order",
                    data=[{"value": "depth", "label": "Depth"}, {"value": "name", "label": "Name"}],
                    value="depth",
                    size="xs",
                ),
            ],
            gap="xs",
            wrap="nowrap",
        ),
        dmc.ScrollArea(
            dmc.Tree(
                id="at-module",
                data=[],
                selected=[],
                expanded=[],
                selectOnClick=True,
                expandOnClick=False,
                levelOffset=14,
                renderNode={"function": "moduleNode"},
            ),
            type="auto",
            mt="xs",
            style={"flex": 1},
        ),
        html.Div(id="tree-note", className="note"),
    ]


def _tabs() -> Any:
    import dash_mantine_components as dmc

    tabs = [dmc.TabsTab(label, value=name) for name, label in TABS]
    return dmc.Tabs(dmc.TabsList(tabs), id="at-tab", value="overview", keepMounted=False)


def _controls() -> list[Any]:
    import dash_mantine_components as dmc
    from dash import html

    def on(tabs: str, *children: Any, grow: bool = False) -> Any:
        """A control that is there on these tabs."""
        classes = ["control", *(f"on-{tab}" for tab in tabs.split()), *(["grow"] if grow else [])]
        return html.Div(list(children), className=" ".join(classes))

    def select(name: str, label: str, width: int, choices: Sequence[tuple[str, str]] = (), **more: Any) -> Any:
        data = [{"value": value, "label": text} for value, text in choices]
        options = {"allowDeselect": False, "size": "xs", "w": width, "searchable": True, **more}
        return dmc.Select(id=f"at-{name}", label=label, data=data, **options)

    def slider(name: str, said: str, **options: Any) -> Any:
        bar = dmc.Slider(id=f"at-{name}", size="sm", mb=4, mt=6, **options)
        return [html.Label([said, html.Span(id=f"said-{name}", className="said")], className="slider-label"), bar]

    many = "depth heat types grid"
    return [
        on(f"{many} histograms", select("site", "Site", 170)),
        on(many, select("statistic", "Statistic", 170)),
        on("depth", select("backward_site", "Backward site", 170)),
        on("depth", select("backward_statistic", "Backward statistic", 170)),
        on("module", select("series", "Statistic", 200)),
        on("module histograms", select("call", "Call", 80)),
        on("gradients", select("by", "Along", 150, [("depth", "depth"), ("type", "type of module")], searchable=False)),
        on(
            "histograms", select("kind", "Drawn as", 130, [("heat", "heat map"), ("ridge", "ridges")], searchable=False)
        ),
        on(
            "heat depth grid",
            dmc.TextInput(id="at-modules", label="Modules (glob)", value="*", debounce=400, size="xs", w=180),
        ),
        on(
            "scalars",
            dmc.MultiSelect(
                id="at-names",
                label="Scalars",
                data=[],
                searchable=True,
                clearable=True,
                size="xs",
                debounce=400,
                placeholder="loss and what else there is",
                maw=560,
                miw=300,
                styles=_FEW_LINES,
            ),
            grow=True,
        ),
        on(
            "compare",
            dmc.MultiSelect(
                id="at-runs",
                label="With these runs",
                data=[],
                searchable=True,
                clearable=True,
                size="xs",
                placeholder="choose runs",
                maw=640,
                miw=360,
                styles=_FEW_LINES,
                debounce=400,
            ),
            grow=True,
        ),
        on("compare", select("scalar", "Scalar", 200)),
        on(
            "events",
            select(
                "severity",
                "Severity",
                170,
                [("all", "all"), ("warning", "warning and critical"), ("critical", "critical")],
                searchable=False,
            ),
        ),
        on(
            "depth types gradients updates",
            *slider("step", "Step", min=0, max=1, value=1, thumbLabel="step"),
            grow=True,
        ),
        on(
            "module scalars compare",
            *slider("smoothing", "Smoothing", min=0, max=SMOOTHEST, step=0.01, value=0.9, thumbLabel="smoothing"),
            grow=True,
        ),
    ]

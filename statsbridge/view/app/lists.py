"""The parts of the page that are no pictures: runs, findings, events, and what a run was given. All texts are text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ...analyze.comparison import Comparison
from ...analyze.findings import SEVERITIES, Finding
from .diagnoses import Diagnosis
from .facts import ROOT, ModuleFacts
from .library import Listed
from .state import State

_MOST_EVENTS = 300
_MOST_FINDINGS = 40
COLOURS: Mapping[str, str] = {"critical": "red", "warning": "orange", "info": "gray"}
_STATES: Mapping[str, str] = {
    "running": "green",
    "finished": "blue",
    "failed": "red",
    "crashed": "red",
    "unreadable": "red",
    "stopped": "orange",
    "created": "gray",
}


def table(head: Sequence[str], body: Sequence[Sequence[Any]], **options: Any) -> Any:
    """A table; each cell is a text or a component."""
    import dash_mantine_components as dmc

    rows = [dmc.TableTr([dmc.TableTd(cell) for cell in row]) for row in body]
    top = [dmc.TableThead(dmc.TableTr([dmc.TableTh(name) for name in head]))] if head else []
    return dmc.Table([*top, dmc.TableTbody(rows)], **options)


def message(text: str, *, name: str = "message", colour: str = "blue") -> Any:
    """A line in place of what is not there."""
    import dash_mantine_components as dmc

    return dmc.Alert(text, id=name, color=colour, variant="light", my="sm")


def state_badge(state: str) -> Any:
    """The state of a run."""
    import dash_mantine_components as dmc

    live = {"className": "live"} if state == "running" else {}
    return dmc.Badge(state, color=_STATES.get(state, "gray"), variant="light", **live)


def counts(findings: Mapping[str, int]) -> Any:
    """How many findings there are of each severity that asks for attention."""
    import dash_mantine_components as dmc

    there = [(severity, findings[severity]) for severity in SEVERITIES[:2] if findings.get(severity)]
    badges = [
        dmc.Badge(f"{count} {severity}", color=COLOURS[severity], variant="filled", size="sm")
        for severity, count in there
    ]
    return dmc.Group(badges or [dmc.Text("none", size="sm", c="dimmed")], gap=6, wrap="nowrap")


def runs(listed: Sequence[Listed], folder: str) -> list[Any]:
    """The list of runs, the newest first."""
    import dash_mantine_components as dmc
    from dash import dcc

    if not listed:
        return [message(f"No runs in {folder} yet: train with statsbridge.init(model), or try statsbridge demo.")]
    head = ["name", "state", "findings", "steps", "sampled", "size", "started (UTC)", "id"]
    body = [
        [
            dcc.Link(run.name, href=State(run=run.id).address(), refresh=False, className="run-link"),
            dmc.Group([state_badge(run.state), *([restricted_badge()] if run.restricted else [])], gap=6),
            counts(run.findings),
            f"{run.steps:,}",
            f"{run.sampled_steps:,}",
            size(run.bytes),
            run.created,
            dmc.Text(run.id, size="xs", ff="monospace", c="dimmed"),
        ]
        for run in listed
    ]
    return [
        dmc.Title(f"{len(listed)} run{'' if len(listed) == 1 else 's'} in {folder}", order=4, mb="sm"),
        dmc.TableScrollContainer(
            table(head, body, id="runs", highlightOnHover=True, verticalSpacing="xs"),
            minWidth=900,
            type="native",
        ),
    ]


def restricted_badge() -> Any:
    """The mark of a run that a policy keeps on its site."""
    import dash_mantine_components as dmc

    return dmc.Badge("restricted", color="grape", variant="outline", size="sm")


def findings(diagnosis: Diagnosis, state: State, *, of_module: bool = False) -> Any:
    """The findings, first cause first, each with its causes and what to try."""
    import dash_mantine_components as dmc
    from dash import html

    shown = diagnosis.findings[:_MOST_FINDINGS]
    parts: list[Any] = [] if of_module else [dmc.Title("Findings", order=4, mb=6)]
    if diagnosis.note:
        parts.append(dmc.Text(diagnosis.note, size="sm", c="dimmed", mb=6))
    if not shown and not diagnosis.note:
        parts.append(message("No rule found anything wrong.", name="healthy", colour="green"))
    parts += [_finding(one, state) for one in shown]
    if len(diagnosis.findings) > len(shown):
        parts.append(dmc.Text(f"and {len(diagnosis.findings) - len(shown)} more", size="sm", c="dimmed"))
    return html.Div(parts, id="findings", className="findings")


def _finding(finding: Finding, state: State) -> Any:
    import dash_mantine_components as dmc
    from dash import dcc, html

    place: list[Any] = []
    if finding.module is not None:
        there = state.at(tab="module", module=finding.module, call=finding.call, step=None)
        name = finding.module or ROOT
        place = [dcc.Link(name, href=there.address(), refresh=False, className="module-link")]
        if finding.type:
            place.append(dmc.Text(finding.type, size="sm", c="dimmed"))
        if finding.following:
            place.append(dmc.Text(f"and {finding.following} further", size="sm", c="dimmed"))
    last = finding.last_step
    steps = f"step {finding.step}" if last is None or last == finding.step else f"steps {finding.step} to {last}"
    head = [
        dmc.Badge(finding.severity, color=COLOURS[finding.severity], variant="filled"),
        dmc.Text(finding.kind.replace("_", " "), fw=600),
        dmc.Text(steps, size="sm", c="dimmed"),
        *place,
    ]
    advice = [
        html.Div([html.Strong(title), html.Ul([html.Li(text) for text in texts])])
        for title, texts in (("Likely causes", finding.causes), ("What to try", finding.suggestions))
        if texts
    ]
    body: list[Any] = [dmc.Group(head, gap=8), dmc.Text(finding.message, size="sm", mt=4)]
    if advice:
        body.append(html.Details([html.Summary("causes, and what to try"), *advice]))
    return html.Div(body, className=f"finding {finding.severity}")


def module_heading(module: ModuleFacts) -> Any:
    """What a module is, over its series."""
    import dash_mantine_components as dmc

    facts = [module.type]
    facts.append("never called" if module.order is None else f"depth {module.depth}, order {module.order}")
    if module.calls > 1:
        facts.append(f"{module.calls} calls a step")
    return dmc.Group(
        [
            dmc.Title(module.path or ROOT, order=4, id="module-name", className="module-name"),
            dmc.Text(" · ".join(facts), id="module-facts", c="dimmed", size="sm"),
        ],
        gap="sm",
        mb=4,
    )


def events(rows: pa.Table, state: State) -> Any:
    """The events, the newest first, those of the severities that are asked for."""
    import dash_mantine_components as dmc
    from dash import dcc, html

    wanted = {"critical": ["critical"], "warning": ["critical", "warning"]}.get(state.severity)
    if wanted is not None:
        rows = rows.filter(pc.is_in(rows["severity"].cast(pa.string()), value_set=pa.array(wanted)))
    if rows.num_rows == 0:
        return message("No such events." if wanted else "No events in this run.", name="no-events")
    shown = rows.slice(max(0, rows.num_rows - _MOST_EVENTS)).to_pylist()[::-1]
    body = []
    for row in shown:
        module = row["module"]
        there = state.at(tab="module", module=module).address()
        body.append(
            [
                "" if row["step"] is None else str(row["step"]),
                dmc.Badge(row["severity"] or "info", color=COLOURS.get(row["severity"], "gray"), size="sm"),
                row["kind"] or "",
                "" if module is None else dcc.Link(module or ROOT, href=there, refresh=False, className="module-link"),
                "" if row["value"] is None else f"{row['value']:.6g}",
                html.Span(row["message"] or "", className="event-message"),
            ]
        )
    left_out = rows.num_rows > len(shown)
    said = (
        f"the last {len(shown)} of {rows.num_rows:,} events"
        if left_out
        else f"{len(shown)} event{'' if len(shown) == 1 else 's'}"
    )
    head = ["step", "severity", "kind", "module", "value", "message"]
    return html.Div(
        [
            dmc.Text(said, size="sm", c="dimmed", mb=6),
            table(head, body, id="events", verticalSpacing=4, fz="sm"),
        ]
    )


def run_facts(info: Mapping[str, Any]) -> Any:
    """What the run was given, and with what it was recorded."""
    import dash_mantine_components as dmc
    from dash import html

    config = {str(name): _short(value) for name, value in (info.get("config") or {}).items()}
    versions = {str(name): _short(value) for name, value in (info.get("versions") or {}).items()}
    recorded = {name: _short(info[name]) for name in ("sampling", "sites", "restricted", "start_step") if name in info}
    tables = [
        html.Div([dmc.Title(title, order=6, mb=4), _pairs(pairs)], className="facts-table")
        for title, pairs in (("Config", config), ("Recorded", recorded), ("Versions", versions))
        if pairs
    ]
    return html.Div([html.Div(tables, className="facts")], id="facts")


def compared(infos: Sequence[Mapping[str, Any]], comparisons: Sequence[Comparison] | None) -> Any:
    """The runs that are compared, one a row: where each parts from the first, and what their configs differ in.

    `comparisons`: of all runs but the first; None where there was too much to look through.
    """
    import dash_mantine_components as dmc
    from dash import dcc, html

    configs = [{str(name): _short(value) for name, value in (info.get("config") or {}).items()} for info in infos]
    names = list(dict.fromkeys(name for config in configs for name in config))
    different = [name for name in names if len({config.get(name) for config in configs}) > 1]
    partings = [""] + [_parting(one) for one in comparisons or ()]
    body = [
        [
            dcc.Link(str(info["name"]), href=State(run=str(info["id"])).address(), refresh=False, className="run-link"),
            dmc.Text(str(info["id"]), size="xs", ff="monospace", c="dimmed"),
            *([parting] if comparisons else []),
            *(config.get(name, "") for name in different),
        ]
        for info, config, parting in zip(infos, configs, partings if comparisons else [""] * len(infos), strict=True)
    ]
    head = ["run", "id", *(["parts from the first run"] if comparisons else []), *different]
    notes = []
    if len(infos) > 1 and not different:
        notes.append("The configs of these runs do not differ.")
    if comparisons is None:
        notes.append("These runs are too large to be lined up here module by module: statsbridge compare does it.")
    said = [dmc.Text(note, size="sm", c="dimmed") for note in notes]
    return html.Div([table(head, body, id="compared", verticalSpacing=4, fz="sm"), *said])


def _parting(comparison: Comparison) -> Any:
    from dash import dcc, html

    first = comparison.first
    if first is None:
        return "nowhere" if comparison.steps else "no steps in common"
    there = State(run=comparison.other, tab="module", module=first.module, call=first.call)
    link = dcc.Link(first.module or ROOT, href=there.address(), refresh=False, className="module-link")
    numbers = "" if first.value is None else f" {first.value:.3g}"
    if first.value is not None and first.low is not None and first.high is not None:
        numbers += f", there {first.low:.3g} to {first.high:.3g}"
    return html.Span([f"step {first.step}, ", link, f": {first.site} {first.statistic} {first.kind}{numbers}"])


def _pairs(pairs: Mapping[str, str]) -> Any:
    return table((), list(pairs.items()), verticalSpacing=2, fz="sm")


def _short(value: object, longest: int = 160) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def size(count: int) -> str:
    """Bytes in the largest decimal unit that leaves a number of at least 1."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"

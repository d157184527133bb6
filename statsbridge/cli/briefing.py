"""A page on a run that a colleague, or a language model, can act on: what `diagnose --format markdown` writes."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from statsbridge.wording import counted

from .answers import markdown_code, markdown_table, markdown_text, text
from .diagnose import place, silence
from .facts import first_and_last
from .output import number

if TYPE_CHECKING:
    from statsbridge.analyze.findings import Finding
    from statsbridge.analyze.run_data import RunData

#: Modules of the model that are listed; of a larger one its beginning, its end, and where something was found.
MODULES_SHOWN = 40
NOTES_SHOWN = 50


def briefing(data: "RunData", findings: Sequence["Finding"], good: Sequence["RunData"] = ()) -> list[str]:
    """The lines of the page."""
    sections = (
        _header(data),
        _findings(data, findings),
        _tree(findings),
        _curves(data),
        _baseline(data, good),
        _notes(data),
        _model(data, findings),
        _settings(data),
    )
    return [line for section in sections for line in section]


def _header(data: "RunData") -> Iterator[str]:
    import pyarrow.compute as pc

    name = data.info["name"]
    yield f"# Briefing on run {markdown_text(str(name))}"
    yield ""
    steps = data.scalars["step"].drop_null()
    sampled = len(data.select(columns=("step",))["step"].unique())  # not `data.stats`: that is the whole table
    if len(steps):
        first, last = pc.min(steps).as_py(), pc.max(steps).as_py()
        yield f"Run {markdown_text(data.id)}, steps {first} to {last}, {sampled} of them sampled."
    else:
        yield f"Run {markdown_text(data.id)}: no step was recorded."
    yield ""


def _findings(data: "RunData", findings: Sequence["Finding"]) -> Iterator[str]:
    yield "## Findings, first cause first"
    yield ""
    if not findings:
        yield f"None: {silence(data)}."
        yield ""
    for position, finding in enumerate(findings, 1):
        yield f"### {position}. {markdown_text(finding.kind)} ({finding.severity}, from step {finding.step} on)"
        yield ""
        yield markdown_text(finding.message) + "."
        where = [f"first in: {markdown_text(place(finding))}"] if finding.module is not None else []
        where += [f"type {markdown_text(finding.type)}"] if finding.type else []
        where += [f"depth {finding.depth}"] if finding.depth is not None else []
        where += [f"further modules that show it: {finding.following}"] if finding.following else []
        where += [f"last seen at step {finding.last_step}"] if finding.last_step is not None else []
        yield ""
        yield from (f"- {line}" for line in (["; ".join(where)] if where else []))
        yield from (f"- perhaps: {markdown_text(cause)}" for cause in finding.causes)
        yield from (f"- try: {markdown_text(suggestion)}" for suggestion in finding.suggestions)
        yield ""


def _tree(findings: Sequence["Finding"]) -> Iterator[str]:
    from statsbridge.analyze.rules.tree import answers

    yield "## Decision tree followed"
    yield ""
    for position, (question, found) in enumerate(answers(findings), 1):
        kinds = ", ".join(markdown_text(finding.kind) for finding in found)
        answer = f"**no**: {kinds}. Look closer: `{question.command}`" if found else "nothing says no"
        yield f"{position}. {question.text} {answer}"
    yield ""


def _curves(data: "RunData") -> Iterator[str]:
    from statsbridge.analyze.curves import curves as judge
    from statsbridge.errors import ConfigError

    from .curves import markdown

    names = [str(name) for name in data.scalars["name"].unique().to_pylist()]
    if "loss" not in names:
        return
    validation = next((name for name in names if name in ("val_loss", "val/loss", "validation/loss", "loss/val")), None)
    yield "## Curves"
    yield ""
    try:
        yield from markdown(judge(data, validation=validation))
    except ConfigError as error:
        yield markdown_text(str(error))
    yield ""


def _baseline(data: "RunData", good: Sequence["RunData"]) -> Iterator[str]:
    if not good:
        return
    from statsbridge.analyze.comparison import compare

    from .compare import markdown

    yield "## Against the good run"
    yield ""
    for found in compare(list(good), data):
        yield from markdown(found)
    yield ""


def _notes(data: "RunData") -> Iterator[str]:
    notes = [event for event in data.events.to_pylist() if event["kind"] == "note"]
    if not notes:
        return
    yield "## What was tried"
    yield ""
    for note in notes[-NOTES_SHOWN:]:
        yield f"- step {note['step']}: {markdown_text(note['message'] or '')}"
    if len(notes) > NOTES_SHOWN:
        yield f"- and {counted(len(notes) - NOTES_SHOWN, 'note')} before these"
    yield ""


def _model(data: "RunData", findings: Sequence["Finding"]) -> Iterator[str]:
    rows = _last_trace(data)
    yield "## Model, in data-flow order"
    yield ""
    if not rows:
        yield "No module was recorded."
        yield ""
        return
    named = {finding.module for finding in findings}
    half = MODULES_SHOWN // 2
    kept = [
        row
        for position, row in enumerate(rows)
        if len(rows) <= MODULES_SHOWN
        or position < half
        or position >= len(rows) - half
        or (row["module"] in named and row["call"] == 0)
    ]
    cells = [
        [
            text(row["depth"]),
            row["module"] or "(model)",
            text(row["call"]),
            row["type"] or "",
            text(row["parameters"]),
            ", ".join(sorted({finding.kind for finding in findings if finding.module == row["module"]})),
        ]
        for row in kept
    ]
    yield from markdown_table(["depth", "module", "call", "type", "parameters", "findings"], cells)
    if len(kept) < len(rows):
        yield ""
        yield f"{len(rows) - len(kept)} of {len(rows)} module calls are left out."
    yield ""


def _last_trace(data: "RunData") -> list[dict[str, Any]]:
    """Each module call as it was last traced, by depth and order; what never ran comes last."""
    last: dict[tuple[str, int], dict[str, Any]] = {}
    for row in data.modules.to_pylist():
        last[row["module"], row["call"]] = row
    far = float("inf")
    return sorted(
        last.values(),
        key=lambda row: tuple(far if row[name] is None else row[name] for name in ("depth", "order")),
    )


def _settings(data: "RunData") -> Iterator[str]:
    yield "## Settings"
    yield ""
    for name in ("config", "versions", "sampling", "sites"):
        value = data.info.get(name)
        if value:
            yield f"- {name}: {markdown_code(json.dumps(value, ensure_ascii=False, default=str))}"
    for rate in sorted(str(name) for name in data.scalars["name"].unique().to_pylist()):
        values = first_and_last(data, rate) if rate.startswith("lr/") else None
        if values is not None:
            yield f"- {markdown_text(rate)}: first {number(values[0])}, last {number(values[-1])}"

"""`statsbridge show`: one step of a run, module by module in data-flow order."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from statsbridge.wording import counted

from .facts import alerts, csv_text, document, first_and_last, size_line
from .output import (
    FORMATS,
    Column,
    as_json,
    command,
    number,
    page,
    print_line,
    print_table,
    show_page,
)

if TYPE_CHECKING:
    from rich.console import Console

    from statsbridge.analyze.overview import Overview, Row, Trend
    from statsbridge.log import RunData

EVENTS_SHOWN = 10
SPARKLINE_CELLS = 8


def show(
    run: Annotated[str, typer.Argument(help="A run's folder, id, unique beginning of an id, or name.")] = "latest",
    *,
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = "statsbridge-runs",
    site: Annotated[
        str, typer.Option(help="What was measured: activation, activation_grad, parameter, …")
    ] = "activation",
    statistic: Annotated[str | None, typer.Option(help="Statistics, with commas between: std,zero_fraction.")] = None,
    step: Annotated[str | None, typer.Option(metavar="STEP", help="A sampled step; the last one if not given.")] = None,
    modules: Annotated[str, typer.Option(metavar="GLOB", help="Only modules whose path matches: 'blocks.*'.")] = "*",
    sort: Annotated[str, typer.Option(help="depth, value or change (of the first statistic).")] = "depth",
    output: Annotated[str, typer.Option("--format", help="table, json or csv.")] = "table",
) -> None:
    """Show the statistics of every module at one step, in the order of the data flow.

    ! and !! mark what is suspicious and what is critical; the lines below the table say by which rule.
    """
    with command():
        from statsbridge.analyze.choices import unknown_choice
        from statsbridge.analyze.overview import overview
        from statsbridge.log import load, resolve_run

        if output not in FORMATS:
            raise unknown_choice("format", output, FORMATS)
        data = load(resolve_run(run, directory))
        result = overview(
            data.merged(),
            site=site,
            statistics=None if statistic is None else [name.strip() for name in statistic.split(",")],
            step=None if step is None else _step(step),
            modules=modules,
            sort=sort,
        )
        if output == "json":
            sys.stdout.write(as_json(document(data, result)) + "\n")
        elif output == "csv":
            sys.stdout.write(csv_text(result, trends=statistic is not None))
        else:
            print_run(data, result, changes=statistic is not None or sort == "change")


def _step(text: str) -> int:
    from statsbridge.errors import ConfigError

    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"step {text} is not a whole number") from None


def print_run(data: "RunData", result: "Overview", *, changes: bool) -> None:
    """Print the header, the table of `result`, the rules that marked something, and the run's alerts."""
    console = page()
    _print_header(console, data, result)
    left_out = print_table(console, _columns(result, changes))
    print_line(console, "")
    for rule in dict.fromkeys(mark.rule for row in result.rows for mark in row.marks):
        print_line(console, str(rule), rule.severity)
    _print_gradient_ratio(console, result)
    if result.absent:
        print_line(console, f"recorded at other steps, not at step {result.step}: {result.absent}")
    if left_out:
        print_line(console, f"left out at this width: {', '.join(left_out)} (piped output has it all)")
    _print_events(console, data)
    show_page(console)


def _print_header(console: "Console", data: "RunData", result: "Overview") -> None:
    from statsbridge.log.runs import run_state
    from statsbridge.log.size import growth

    name = data.info["name"]
    called = "" if name == data.id else f"  name {name}"
    print_line(console, f"run {data.id}{called}  {run_state(data.path)}")
    for attempt in data.attempts:
        print_line(
            console, f"resumed as attempt {attempt.number} from step {attempt.first_step}, {attempt.started[:19]}"
        )
    steps = result.steps
    sampled = f"{len(steps)} sampled steps ({steps[0]} to {steps[-1]})" if len(steps) > 1 else "1 sampled step"
    loss = first_and_last(data, "loss")
    losses = f"  loss {number(loss[0])} → {number(loss[1])}" if loss else ""
    print_line(console, f"{result.site} at step {result.step}  {sampled}{losses}")
    print_line(console, size_line(growth(data)))
    print_line(console, "")


def _columns(result: "Overview", changes: bool) -> list[Column]:
    rows = result.rows
    columns = [
        Column("depth", [(number(row.depth), "") for row in rows], "right"),
        Column("module", [(row.module or "(model)", "") for row in rows], folds=True),
    ]
    if any(row.call for row in rows):
        columns.append(Column("call", [(str(row.call), "") for row in rows], "right"))
    if any(row.tensor for row in rows):
        columns.append(Column("tensor", [(row.tensor, "") for row in rows]))
    columns.append(Column("type", [(row.type, "") for row in rows], optional=1))
    for name in result.statistics:
        columns.append(Column(name, [_cell(row, name) for row in rows], "right"))
        if name in result.trends:
            trends = [row.trends[name] for row in rows]
            lines = [(_sparkline(trend), "") for trend in trends]
            columns.append(Column(f"{name} over steps", lines, optional=0 if changes else 2))
            if changes:
                columns.append(Column("change", [(_change(trend), "") for trend in trends], "right"))
    columns.append(Column("notes", [_notes(row) for row in rows], break_at=", "))
    return columns


def _cell(row: "Row", name: str) -> tuple[str, str]:
    severities = [mark.rule.severity for mark in row.marks if mark.rule.statistic == name]
    return number(row.values[name]), severities[0] if severities else ""


def _sparkline(trend: "Trend") -> str:
    from statsbridge.view.sparkline import sparkline

    # Where every element was NaN or infinite there is no statistic, and a gap would hide the worst steps.
    values = [
        float("nan") if value is None and broken else value
        for value, broken in zip(trend.values, trend.nonfinite, strict=True)
    ]
    return sparkline(values, SPARKLINE_CELLS)


def _change(trend: "Trend") -> str:
    change = trend.change
    if change is None:
        return ""
    return "from 0" if abs(change) == float("inf") else f"{100 * change:+.3g}%"


def _notes(row: "Row") -> tuple[str, str]:
    labels = [mark.rule.label for mark in row.marks]
    if row.status:
        labels.append(f"({row.status})")
    style = row.marks[0].rule.severity if row.marks else "missing"
    return ", ".join(labels), style


def _print_gradient_ratio(console: "Console", result: "Overview") -> None:
    ratio = result.gradient_ratio
    if ratio is None:
        return
    text = f"mean |gradient| of {ratio.first or '(model)'} / {ratio.last or '(model)'}: {number(ratio.value)}"
    if ratio.mark is None:
        print_line(console, text)
    else:
        print_line(console, f"{text}  {ratio.mark.rule}", ratio.mark.rule.severity)


def _print_events(console: "Console", data: "RunData") -> None:
    raised = alerts(data)
    if raised:
        print_line(console, "")
    for event in raised[:EVENTS_SHOWN]:
        symbol = "!!" if event["severity"] == "critical" else "!"
        where = f" {event['module']}" if event["module"] else ""
        when = "" if event["step"] is None else f" at step {event['step']}"
        text = f"{symbol} {event['kind']}{when}{where}: {event['message']}"
        print_line(console, text, event["severity"])
    if len(raised) > EVENTS_SHOWN:
        print_line(console, f"and {counted(len(raised) - EVENTS_SHOWN, 'more event')} of severity warning or critical")

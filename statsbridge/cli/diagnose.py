"""`statsbridge diagnose`: what is wrong with a run, first cause first."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from statsbridge.wording import counted

from .ls import DEFAULT_DIRECTORY
from .output import Column, as_json, command, number, page, print_line, print_table, show_page

if TYPE_CHECKING:
    from statsbridge.analyze.findings import Finding
    from statsbridge.analyze.run_data import RunData

FORMATS = ("table", "json", "markdown")
EXIT_CRITICAL = 1
#: Findings whose causes and suggestions are spelled out in a terminal.
EXPLAINED = 3
#: Sampled steps below which silence says little: what has to persist cannot have.
FEW_STEPS = 5


def diagnose(
    run: Annotated[str, typer.Argument(help="A run's folder, id, unique beginning of an id, or name.")] = "latest",
    *,
    threshold: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A limit of a rule, such as update_ratio=0.2; again for more."),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="A good run to judge by; again for more, such as other seeds."),
    ] = None,
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = DEFAULT_DIRECTORY,
    output: Annotated[str, typer.Option("--format", help="table, json, or markdown (a briefing).")] = "table",
) -> None:
    """Say what is wrong with a run, since which step, in which module, why probably, and what to try.

    First cause first. The exit status is 1 where something is critical. docs/rules.md lists the rules and their limits.
    """
    with command():
        from statsbridge.analyze.baseline import baseline as make_baseline
        from statsbridge.analyze.choices import unknown_choice
        from statsbridge.analyze.diagnosis import diagnose as find
        from statsbridge.analyze.run_data import load
        from statsbridge.log import resolve_run

        if output not in FORMATS:
            raise unknown_choice("format", output, FORMATS)
        limits = _thresholds(threshold or [])
        data = load(resolve_run(run, directory))
        good = [load(resolve_run(one, directory)) for one in baseline or []]
        findings = find(data, thresholds=limits, baseline=make_baseline(*good) if good else None)
        if output == "json":
            sys.stdout.write(as_json([finding.to_json() for finding in findings]) + "\n")
        elif output == "markdown":
            from .briefing import briefing

            sys.stdout.write("\n".join(briefing(data, findings, good)) + "\n")
        else:
            _print(data, findings)
        for one in good:
            _say_if_apart(one, data)
            _say_if_short(one, data)
        critical = any(finding.severity == "critical" for finding in findings)
    if critical:
        raise typer.Exit(EXIT_CRITICAL)


def _thresholds(given: Sequence[str]) -> dict[str, float]:
    from statsbridge.errors import ConfigError

    limits: dict[str, float] = {}
    for one in given:
        name, equals, value = one.partition("=")
        try:
            limits[name.strip()] = int(value) if value.strip().isdigit() else float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"--threshold {one}: give a name and a number, such as update_ratio=0.2")
    return limits


def silence(data: "RunData") -> str:
    """What no finding means: a rule is silent, too, where it has seen nothing."""
    steps = len(data.select(columns=("step",))["step"].unique())
    if not steps and not data.scalars.num_rows:
        return "nothing has been recorded, so nothing can be said"
    said = "nothing is wrong, as far as the rules can see"
    if steps < FEW_STEPS:
        said += f"; they have seen {counted(steps, 'sampled step')}, and most need {FEW_STEPS}"
    return said


def _say_if_apart(good: "RunData", data: "RunData") -> None:
    """On standard error, where nothing of a good run could be a measure: silence would look like agreement."""
    ours, theirs = ({str(name) for name in run.modules["module"].unique().to_pylist() if name} for run in (data, good))
    if ours and theirs and not ours & theirs:
        typer.echo(
            f"statsbridge: the good run {good.id} shares no module with this one, so nothing was judged by it", err=True
        )


def _say_if_short(good: "RunData", data: "RunData") -> None:
    """On standard error, where a good run ends long before the one that it judges."""
    import pyarrow.compute as pc

    ends, end = (pc.max(run.select(columns=("step",))["step"]).as_py() or 0 for run in (good, data))
    if 2 * ends < end:
        typer.echo(
            f"statsbridge: the good run {good.id} ends at step {ends}, this one at step {end}: what a training is like "
            "later is judged by its beginning",
            err=True,
        )


def _print(data: "RunData", findings: Sequence["Finding"]) -> None:
    console = page()
    name = data.info["name"]
    print_line(console, f"run {data.id}" + ("" if name == data.id else f"  name {name}"))
    if not findings:
        print_line(console, silence(data))
        show_page(console)
        return
    cells: dict[str, list[tuple[str, str]]] = {
        "severity": [(finding.severity, _style(finding)) for finding in findings],
        "step": [(str(finding.step), "") for finding in findings],
        "what": [(finding.kind, "") for finding in findings],
        "module": [(place(finding), "") for finding in findings],
        "more": [(str(finding.following or ""), "") for finding in findings],
        "value": [(number(finding.value), "") for finding in findings],
        "limit": [(number(finding.threshold), "") for finding in findings],
    }
    right = ("step", "more", "value", "limit")
    optional = {"more": 1, "limit": 2, "value": 3}
    columns = [
        Column(head, column, "right" if head in right else "left", optional.get(head, 0), folds=head == "module")
        for head, column in cells.items()
    ]
    print_table(console, columns)
    for finding in findings[:EXPLAINED]:
        print_line(console, "")
        print_line(console, f"{finding.kind}: {finding.message}", _style(finding))
        for cause in finding.causes:
            print_line(console, f"  perhaps: {cause}")
        for suggestion in finding.suggestions:
            print_line(console, f"  try: {suggestion}")
    if len(findings) > EXPLAINED:
        print_line(console, "")
        print_line(console, f"--format markdown explains the other {len(findings) - EXPLAINED} too")
    show_page(console)


def _style(finding: "Finding") -> str:
    return "" if finding.severity == "info" else finding.severity


def place(finding: "Finding") -> str:
    """Where a finding shows first, for a table."""
    if finding.module is None:
        return ""
    call = f" (call {finding.call})" if finding.call else ""
    tensor = f" {finding.tensor}" if finding.tensor else ""
    return f"{finding.module or '(model)'}{call}{tensor}"

"""`statsbridge compare`: where runs part from a good one, and what was set differently."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from statsbridge.wording import counted

from .answers import markdown_table, markdown_text, text
from .ls import DEFAULT_DIRECTORY
from .output import Column, as_json, command, number, page, print_line, print_table, show_page

if TYPE_CHECKING:
    from rich.console import Console

    from statsbridge.analyze.comparison import Comparison, Parting

FORMATS = ("table", "json", "markdown")
_HEADER = ("step", "module", "tensor", "site", "statistic", "value", "good range", "modules")
_NAMES_SHOWN = 8


def compare(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="The good run: path, id, name, or latest.")],
    others: Annotated[list[str], typer.Argument(metavar="OTHER...", help="The runs in question.")],
    *,
    also_good: Annotated[
        list[str] | None,
        typer.Option("--also-good", metavar="RUN", help="A further good run, such as another seed; again for more."),
    ] = None,
    factor: Annotated[
        float | None,
        typer.Option(help="How far outside of the good range a size may lie: 5, or 2.5 with several good."),
    ] = None,
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = DEFAULT_DIRECTORY,
    output: Annotated[str, typer.Option("--format", help="table, json or markdown.")] = "table",
) -> None:
    """Show at which step, and in which module, each run first parts from the good one, for each statistic.

    Runs are lined up by step and module. What differs in config and versions is listed beside the numbers.

    A number has parted where it stays outside of the good run's range, widened by the factor, for three sampled steps.
    """
    with command():
        from statsbridge.analyze.choices import unknown_choice
        from statsbridge.analyze.comparison import compare as compare_runs
        from statsbridge.analyze.run_data import load
        from statsbridge.log import resolve_run

        if output not in FORMATS:
            raise unknown_choice("format", output, FORMATS)
        goods = [load(resolve_run(run, directory)) for run in (good, *(also_good or []))]
        found = compare_runs(goods, *(load(resolve_run(run, directory)) for run in others), factor=factor)
        if output == "json":
            sys.stdout.write(as_json([one.to_json() for one in found]) + "\n")
        elif output == "markdown":
            sys.stdout.write("\n\n".join("\n".join(markdown(one)) for one in found) + "\n")
        else:
            console = page()
            for one in found:
                _print(console, one)
            show_page(console)


def headline(found: "Comparison") -> str:
    """One sentence on where the run parts."""
    first = found.first
    if found.steps is None and first is None:
        return "nothing to compare: the runs share no module, site and step"
    if first is None:
        assert found.steps is not None
        alone = len(found.only_good) + len(found.only_other)
        rest = f"; {counted(alone, 'module')} that only one side has could not be compared" if alone else ""
        return f"does not part from the good range from step {found.steps[0]} to step {found.steps[1]}{rest}"
    tensor = f" {first.tensor}" if first.tensor else ""
    where = f"{first.site}{tensor} of {first.module or 'the model'}"
    words = {"outside": "leaves the good range", "not finite": "is not finite", "missing": "has no number"}
    return f"parts at step {first.step}: {first.statistic} of {where} {words[first.kind]}"


def markdown(found: "Comparison") -> list[str]:
    """The lines of a section on one run."""
    lines = [f"**{markdown_text(found.name)}** {markdown_text(headline(found))}", ""]
    if found.partings:
        lines += [*markdown_table(_HEADER, [_cells(one) for one in found.partings]), ""]
    if found.settings:
        lines += markdown_table(["setting", "good", "here"], [_setting(one) for one in found.settings])
    return [*lines, *(f"- {markdown_text(line)}" for line in _model(found))]


def _print(console: "Console", found: "Comparison") -> None:
    style = "" if found.first is None else "critical"
    name = "" if found.name == found.other else f"  name {found.name}"
    print_line(console, f"run {found.other}{name}")
    print_line(console, headline(found), style)
    if found.partings:
        rows = [[text(cell) for cell in _cells(one)] for one in found.partings]
        right = {"step", "value", "modules"}
        print_table(
            console,
            [
                Column(
                    head,
                    [(row[at], "") for row in rows],
                    "right" if head in right else "left",
                    folds=head == "module",
                    optional=1 if head == "modules" else 0,
                )
                for at, head in enumerate(_HEADER)
            ],
        )
    if found.settings:
        settings = [_setting(one) for one in found.settings]
        heads = ("setting", "good", "here")
        print_table(
            console, [Column(head, [(row[at], "") for row in settings], folds=at > 0) for at, head in enumerate(heads)]
        )
    for line in _model(found):
        print_line(console, line)
    print_line(console, "")


def _cells(one: "Parting") -> list[Any]:
    module = one.module or "(model)"
    call = f" (call {one.call})" if one.call else ""
    value = {"outside": number(one.value), "not finite": "NaN or Inf", "missing": "none"}[one.kind]
    good = "" if one.low is None and one.high is None else f"{number(one.low)} to {number(one.high)}"
    return [one.step, module + call, one.tensor, one.site, one.statistic, value, good, one.modules]


def _setting(one: Any) -> list[str]:
    good = dict.fromkeys(_value(value) for value in one.good)
    return [one.name, ", ".join(good), _value(one.other)]


def _value(value: Any) -> str:
    return "(not set)" if value is None else str(value)


def _model(found: "Comparison") -> list[str]:
    lines = []
    for which, names in (("only in the good runs", found.only_good), ("only in this run", found.only_other)):
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            shown = ", ".join(name or "(model)" for name in names[:_NAMES_SHOWN])
            lines.append(f"modules {which}: {shown}{more}")
    return lines

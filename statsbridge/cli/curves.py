"""`statsbridge curves`: the training and the validation curve of a run, and what their shape says."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from statsbridge.wording import counted

from .answers import markdown_table, markdown_text
from .ls import DEFAULT_DIRECTORY
from .output import Column, as_csv, as_json, command, number, page, print_line, print_table, show_page

if TYPE_CHECKING:
    from statsbridge.analyze.curves import Curves

FORMATS = ("table", "json", "csv", "markdown")
_STYLES = {"healthy": "", "not enough data": "missing"}
SPARKLINE_CELLS = 40


def curves(
    run: Annotated[str, typer.Argument(help="A run's folder, id, unique beginning of an id, or name.")] = "latest",
    *,
    train: Annotated[str, typer.Option(metavar="NAME", help="The scalar that is the training loss.")] = "loss",
    validation: Annotated[
        str | None, typer.Option("--val", metavar="NAME", help="The scalar that is the validation loss.")
    ] = None,
    smoothing: Annotated[float, typer.Option(help="The weight of the moving average, between 0 and 1.")] = 0.9,
    last: Annotated[int, typer.Option(help="How many of the last points the slope is of.")] = 10,
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = DEFAULT_DIRECTORY,
    output: Annotated[str, typer.Option("--format", help="table, json, csv (the points) or markdown.")] = "table",
) -> None:
    """Judge the learning curves of a run: overfitting, underfitting, rate too large or too small, healthy.

    The verdict comes with the numbers that led to it. The moving average stands beside the raw values, never for them.
    """
    with command():
        from statsbridge.analyze.choices import unknown_choice
        from statsbridge.analyze.curves import curves as judge_curves
        from statsbridge.log import load, resolve_run

        if output not in FORMATS:
            raise unknown_choice("format", output, FORMATS)
        data = load(resolve_run(run, directory))
        found = judge_curves(data, train=train, validation=validation, smoothing=smoothing, last=last)
        if output == "json":
            sys.stdout.write(as_json({"run": data.id, **found.to_json()}) + "\n")
        elif output == "csv":
            header = found.points.column_names
            sys.stdout.write(as_csv(header, [list(row.values()) for row in found.points.to_pylist()]))
        elif output == "markdown":
            sys.stdout.write("\n".join(markdown(found)) + "\n")
        else:
            _print(data.id, found)


def facts(found: "Curves") -> list[tuple[str, float | None, str]]:
    """What is said of the curves: name, number, and a few words."""
    from statsbridge.analyze.curves import last_number

    shape = found.shape
    curve = "training" if found.validation is None else "validation"
    slope = f"of a line through the last {counted(shape.last, f'{curve} point')}"
    if shape.slope_error is not None:
        slope += f", ± {shape.slope_error:.2g}"
    rows: list[tuple[str, float | None, str]] = [("last training value", shape.last_train, "")]
    if found.validation is not None:
        rows += [
            ("last validation value", shape.last_validation, ""),
            (
                "lowest validation value",
                shape.lowest_validation,
                f"epoch {number(found.best_epoch)}, step {found.best_step}",
            ),
            ("gap", shape.gap, "last validation - last training"),
        ]
    average = found.smoothed
    hidden = f"hides {len(average.hidden)} of {counted(len(average.spikes), 'spike')}"
    return [
        *rows,
        ("slope", shape.slope, slope),
        ("wiggle", shape.wiggle, f"std of the differences between {curve} points"),
        ("last raw value", last_number(average.raw), "of the training curve as recorded"),
        ("last average", last_number(average.corrected), f"weight {average.weight:g}, bias-corrected; {hidden}"),
        ("last average, uncorrected", last_number(average.uncorrected), "begins near 0"),
    ]


def markdown(found: "Curves") -> list[str]:
    """The lines of a section on the curves."""
    lines = [f"**{found.verdict.word}**: {markdown_text('; '.join(found.verdict.reasons))}", ""]
    lines += markdown_table(["curve", "value", "what"], facts(found))
    return [*lines, *([""] if found.notes else []), *(f"- {markdown_text(note)}" for note in found.notes)]


def _print(run: str, found: "Curves") -> None:
    from statsbridge.view.sparkline import sparkline

    console = page()
    print_line(console, f"run {run}  {counted(found.shape.points, 'point')}")
    for curve in (found.train, *([] if found.validation is None else [found.validation])):
        column = "train" if curve is found.train else "validation"
        print_line(console, f"{sparkline(found.points[column].to_pylist(), SPARKLINE_CELLS)}  {curve.name}")
    print_line(console, "")
    rows = facts(found)
    print_table(
        console,
        [
            Column("curve", [(name, "") for name, _, _ in rows]),
            Column("value", [(number(value), "") for _, value, _ in rows], "right"),
            Column("what", [(words, "") for _, _, words in rows], folds=True),
        ],
    )
    print_line(console, "")
    print_line(console, found.verdict.word, _STYLES.get(found.verdict.word, "warning"))
    for line in (*found.verdict.reasons, *found.notes):
        print_line(console, f"- {line}")
    show_page(console)

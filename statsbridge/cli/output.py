"""How every command speaks: one error line, and tables that are never cut where nobody sees the edge."""

import csv
import io
import json
import math
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, TextIO

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from statsbridge.errors import StatsBridgeError, StatsBridgeWarning

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

FORMATS = ("table", "json", "csv")
EXIT_WRONG_INPUT = 2
# What a shell reports for a program that a signal ended.
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_CLOSED_PIPE = 128 + 13
STYLES: Mapping[str, str] = {"critical": "bold red", "warning": "yellow", "missing": "dim", "": ""}
# Wider than any table: a pipe has no edge.
NO_EDGE = 1_000_000
NARROWEST_FOLD = 16
GAP = 2
NARROW_GAP = 1


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table in text.

    Each cell is its text and a key of `STYLES`. In a terminal too narrow for the whole table, headers and the
    cells of a column with `break_at` go over several lines and the one that `folds` is folded; if that is not
    enough, the optional columns are left out, the one with the lowest `optional` above 0 first.
    """

    header: str
    cells: Sequence[tuple[str, str]]
    align: Literal["left", "right"] = "left"
    optional: int = 0
    folds: bool = False
    break_at: str = ""

    def lines(self, text: str, *, narrow: bool) -> list[str]:
        """A cell as lines; it is one line unless the table is narrow."""
        shown = one_line(text)
        if not (narrow and self.break_at):
            return [shown]
        return shown.split(self.break_at)

    def header_lines(self, *, narrow: bool) -> list[str]:
        return re.split("[_ ]", self.header) if narrow else [self.header]

    def width(self, *, narrow: bool) -> int:
        """The least width that it needs."""
        cells = [cell_len(line) for text, _ in self.cells for line in self.lines(text, narrow=narrow)]
        widest = max(cells, default=0)
        if narrow and self.folds:
            widest = min(widest, NARROWEST_FOLD)
        return max(widest, *(cell_len(line) for line in self.header_lines(narrow=narrow)))


@contextmanager
def command() -> Iterator[None]:
    """Run a command's body: errors of ours are one line and status 2, Ctrl-C and a closed pipe are quiet."""
    for stream in (sys.stdout, sys.stderr):
        # A sparkline in an encoding without its glyphs is a row of question marks, not a crash.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            yield
            sys.stdout.flush()
        except (StatsBridgeError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                _forget_stdout()
                raise typer.Exit(EXIT_CLOSED_PIPE) from None
            typer.echo(f"statsbridge: {one_line(str(error).strip())}", err=True)
            raise typer.Exit(EXIT_WRONG_INPUT) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, StatsBridgeWarning):
        typer.echo(one_line(str(message)), err=True)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def _forget_stdout() -> None:
    """Point the closed pipe elsewhere, or Python complains about it while shutting down."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def one_line(text: str) -> str:
    """Text from a run, safe for one line of a terminal: control characters are shown, not obeyed."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def number(value: float | None) -> str:
    """A number for a table: three significant digits, whole numbers in full, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


@contextmanager
def progress_bar(*columns: "ProgressColumn") -> "Iterator[Progress]":
    """A bar on standard error; where that is no terminal, one that is disabled and writes nothing."""
    from rich.progress import Progress

    console = Console(stderr=True)
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    # At its end a disabled one wrote an empty line, before rich 14.3.
    with nullcontext(bar) if bar.disable else bar:
        yield bar


def page() -> Console:
    """A console that collects what `show_page` prints: as wide as the terminal, or without an edge."""
    terminal = sys.stdout.isatty()
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=None if terminal else NO_EDGE,
        highlight=False,
        markup=False,
        emoji=False,
    )


def show_page(console: Console) -> None:
    """Write what `console` has collected; in a pipe without the blanks that fill a table's last column."""
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    sys.stdout.write(text if console.is_terminal else re.sub(" +$", "", text, flags=re.MULTILINE))


def print_line(console: Console, text: str, style: str = "") -> None:
    """One line, wrapped by the terminal alone."""
    console.print(Text(one_line(text), style=STYLES[style]), soft_wrap=True)


def print_table(console: Console, columns: Sequence[Column]) -> list[str]:
    """Print a table; returns the headers of the columns that a narrow terminal had no room for."""
    kept, left_out = list(columns), []
    narrow = _width(kept, narrow=False) > console.width
    while narrow and _width(kept, narrow=True) > console.width:
        optional = [column for column in kept if column.optional]
        if not optional:
            break
        least = min(optional, key=lambda column: column.optional)
        kept.remove(least)
        left_out.append(least.header)
    gap = NARROW_GAP if narrow else GAP
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in kept:
        table.add_column(
            "\n".join(column.header_lines(narrow=narrow)),
            justify=column.align,
            no_wrap=not column.folds,
            overflow="fold",
        )
    for cells in zip(*([(column, *cell) for cell in column.cells] for column in kept), strict=True):
        table.add_row(
            *(Text("\n".join(column.lines(text, narrow=narrow)), style=STYLES[style]) for column, text, style in cells)
        )
    console.print(table)
    return left_out


def _width(columns: Sequence[Column], *, narrow: bool) -> int:
    gap = NARROW_GAP if narrow else GAP
    return sum(column.width(narrow=narrow) + gap for column in columns) - gap


def as_json(value: Any) -> str:
    """Strict JSON: a NaN or an infinity, which JSON has no number for, is the string that `float` reads.

    A `Decimal` is the nearest number that 64 bits hold, as every reader of JSON would make of it.
    """
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return nonfinite(value)
    return float(value) if isinstance(value, Decimal) else value


def in_one_line(value: Any) -> Any:
    """A list or a dictionary as JSON in one line, for a cell of a table; anything else as it is."""
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)
    return value


def nonfinite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def as_csv(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """CSV with full precision; a missing value is empty, a NaN or an infinity as in `as_json`, a list is JSON."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([f"{value:f}" if isinstance(value, Decimal) else _plain(in_one_line(value)) for value in row])
    return text.getvalue()

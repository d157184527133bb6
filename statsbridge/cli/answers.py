"""Rows of an answer as a table, JSON, CSV or Markdown."""

import re
import sys
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

from statsbridge.wording import counted

from .output import Column, as_csv, as_json, in_one_line, number, one_line, page, print_line, print_table, show_page

FORMATS = ("table", "json", "csv", "markdown")
#: Rows of a table in a terminal; who wants more asks for fewer columns, a LIMIT, or CSV.
ROWS_SHOWN = 200


def write_rows(header: Sequence[str], rows: Sequence[Sequence[Any]], output: str) -> None:
    """Write rows of plain values in one of `FORMATS`, the table cut where nobody could read it."""
    if output == "json":
        sys.stdout.write(as_json([dict(zip(header, row, strict=True)) for row in rows]) + "\n")
    elif output == "csv":
        sys.stdout.write(as_csv(header, rows))
    elif output == "markdown":
        sys.stdout.write("\n".join(markdown_table(header, rows)) + "\n")
    else:
        console = page()
        shown = rows[:ROWS_SHOWN]
        left_out = print_table(console, [_column(name, [row[at] for row in shown]) for at, name in enumerate(header)])
        if len(rows) > len(shown):
            text = f"and {counted(len(rows) - len(shown), 'more row')}: --format csv has them all"
            print_line(console, text, "missing")
        if left_out:
            print_line(console, f"left out at this width: {', '.join(left_out)} (piped output has it all)")
        show_page(console)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table; no cell can break out of it."""
    lines = [header, *([text(value) for value in row] for row in rows)]
    cells = [[_inline(cell).replace("|", "\\|") for cell in line] for line in lines]
    cells.insert(1, ["---"] * len(header))
    return ["| " + " | ".join(line) + " |" for line in cells]


# What Markdown would obey: everywhere, and where a line may begin. An underscore inside a word is only itself.
_OBEYED = re.compile(
    r"[`*~]|\\(?=[!-/:-@\[-`{-~]|$)|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?:(?<=[^\W_])_+(?=[^\W_])|(?P<outside>_+))"
)
_AT_THE_BEGINNING = re.compile(r"\A(\s*(?:\d+(?=[.)](?:\s|$)))?)(?=[#>=[.)|]|[-+](?:[\s-]|$))")
_LINK = re.compile(r"\][(\[:]")


def markdown_text(words: str) -> str:
    """Text from a run, as one line of Markdown that shows it and does not obey it."""
    return _AT_THE_BEGINNING.sub(r"\1\\", _inline(words), count=1)


def _inline(words: str) -> str:
    """The same where no line can begin."""
    line = _OBEYED.sub(_escaped, one_line(words))
    return re.sub(r"[\[\]]", r"\\\g<0>", line) if _LINK.search(line) else line


def _escaped(found: re.Match[str]) -> str:
    obeyed = found["outside"] or found[0]
    inside_a_word = obeyed[0] == "_" and not found["outside"]
    return obeyed if inside_a_word else "".join(f"\\{letter}" for letter in obeyed)


def markdown_code(words: str) -> str:
    """Text from a run as code in a line of Markdown (not in a table): all of it as it is."""
    line = one_line(words)
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if line[:1] == "`" or line[-1:] == "`" else ""
    return f"{fence}{space}{line}{space}{fence}"


def text(value: Any) -> str:
    """A value for a cell that people read."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Decimal):
        return number(float(value))
    return number(value) if isinstance(value, int | float) else str(in_one_line(value))


def _column(name: str, values: Sequence[Any]) -> Column:
    right = all(
        value is None or (isinstance(value, int | float | Decimal) and not isinstance(value, bool)) for value in values
    )
    cells = [(text(value), "") for value in values]
    return Column(name, cells, "right" if right else "left", folds=not right)

"""Help and usage errors: as rich draws them in a terminal, and plain lines without an edge everywhere else.

The width of plain ones is the context's `terminal_width`, which the app sets.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from typer.core import TyperCommand, TyperGroup


@contextmanager
def _as_shown(drawn: TyperCommand | TyperGroup, stream: TextIO) -> Iterator[None]:
    """Let typer draw with rich only where `stream` is a terminal: a pipe gets neither boxes nor broken lines."""
    mode = drawn.rich_markup_mode
    # Set either way: what goes to the other stream may be drawn meanwhile.
    drawn.rich_markup_mode = "rich" if stream.isatty() else None
    try:
        yield
    finally:
        drawn.rich_markup_mode = mode


class Command(TyperCommand):
    """One command of the app."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """What `--help` prints, to standard output."""
        with _as_shown(self, sys.stdout):
            super().format_help(ctx, formatter)


class Group(TyperGroup):
    """The app itself, which also says what was wrong with a command's words."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """What `--help` prints, to standard output."""
        with _as_shown(self, sys.stdout):
            super().format_help(ctx, formatter)

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run a command. Usage errors go to standard error."""
        with _as_shown(self, sys.stderr):
            return super().main(*arguments, **options)

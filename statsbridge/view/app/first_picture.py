"""What stands on the page until its scripts are there: the picture of the address, drawn by the server.

A browser takes seconds to read Plotly and Dash; over a slow tunnel, longer. An image needs neither. The page's script
takes it away once the same picture, with all that one can do with it, is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from .sketch import sketch
from .state import State

WIDTH = 1000
"""In pixels: the browser scales it."""
PATH = "/first.svg"
_DARK = "&dark=1"
_TABS = frozenset({"overview", "module", "scalars", "compare"})
"""Whose picture is of lines, and needs little to be read."""


def has_one(state: State) -> bool:
    """Whether there may be a first picture of this place."""
    return bool(state.run) and state.tab in _TABS


def element(state: State, theme: str | None) -> str:
    """The HTML that shows it. `theme`: dark, light, or anything else for what the reader's system says."""
    if not has_one(state):
        return ""
    light = f"{PATH}{state.address()}"
    sources = f'<source media="(prefers-color-scheme: dark)" srcset="{escape(light + _DARK)}">'
    shown = light + _DARK if theme == "dark" else light
    inside = "" if theme in {"dark", "light"} else sources
    return f'<picture id="first-picture">{inside}<img src="{escape(shown)}" alt=""></picture>'


def image(contents: Sequence[Any], *, dark: bool) -> str | None:
    """The first figure among the contents of a tab as an SVG, None where there is none to draw."""
    pictures = [part.children for part in contents if getattr(part, "className", None) == "picture"]
    return sketch(pictures[0].figure, width=WIDTH, dark=dark) if pictures else None

"""Text of a run as Markdown, against a parser of Markdown: it is shown as it is, and nothing in it is obeyed."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from statsbridge.cli.answers import markdown_code, markdown_table, markdown_text
from statsbridge.cli.output import one_line

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
SPECIAL = st.text(st.sampled_from("a_*`~[]()<>!&;#|\\-+=.1: b"), max_size=14)


def parsed(page: str) -> tuple[list[str], str]:
    """The kinds of all that is no plain text, and the text."""
    tokens = [one for token in PARSER.parse(page) for one in (token.children or [token])]
    kinds = [token.type for token in tokens if token.type not in ("text", "text_special") and token.type != "inline"]
    return kinds, "".join(token.content for token in tokens)


def shown(words: str) -> str:
    """A line's text as a parser sees it: blanks at its ends do not count."""
    return one_line(words).strip()


@given(SPECIAL)
@example("__init__")
@example("1. first")
@example("![x](y)")
@example("a\\|b\\")
@example("&lt;b&gt;")
def test_text_is_shown_as_it_is(words: str) -> None:
    kinds, text = parsed(f"- see: {markdown_text(words)}.")
    assert text == f"see: {one_line(words)}."
    assert kinds == [one.type for one in PARSER.parse("- a") if one.type != "inline"]
    if shown(words) and not one_line(words).startswith("    "):
        kinds, text = parsed(markdown_text(words))
        assert (kinds, text) == (["paragraph_open", "paragraph_close"], shown(words))


@given(SPECIAL.filter(shown))
@example("a\\|b")
@example("``x`")
def test_cells_and_code_hold_what_they_are_given(words: str) -> None:
    rows: list[Token] = PARSER.parse("\n".join(markdown_table(["one", "two"], [[words, "end"]])))
    cells = ["".join(child.content for child in token.children or []) for token in rows if token.type == "inline"]
    assert cells == ["one", "two", shown(words), "end"]
    kinds, text = parsed(f"a {markdown_code(words)} b")
    assert text == f"a {one_line(words)} b" or (words[0] == words[-1] == " " and text == f"a {words[1:-1]} b")
    assert kinds == ["paragraph_open", "code_inline", "paragraph_close"]


@pytest.mark.parametrize(
    "words",
    [
        "the gradient of parameter layer_norm.weight of module encoder.block_3 is 0 (limit 1e-06, -0.5 before)",
        "5 % of [0, 1) < 3 and > 2 -> {more}; 84.4% of it #1",
        "nonfinite_activation",
    ],
)
def test_what_markdown_would_not_obey_is_left_alone(words: str) -> None:
    assert markdown_text(words) == words

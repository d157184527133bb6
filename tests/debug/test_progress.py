"""The line that shows how far a test has come: on a terminal alone, and gone at the end."""

from __future__ import annotations

import io
import sys

import pytest

from statsbridge.debug import progress as progress_module
from statsbridge.debug.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture: pytest sets its own standard error between fixtures and test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress_module, "_INTERVAL", 0.0)
    return stream


def test_the_line_counts_and_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    assert list(progress("abc", "some test", 3)) == ["a", "b", "c"]
    lines = terminal.getvalue().split("\r")
    assert lines[1:4] == ["some test: 0 of 3", "some test: 1 of 3", "some test: 2 of 3"]
    assert lines[4:] == [" " * len("some test: 0 of 3"), ""]


def test_it_is_gone_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with pytest.raises(ValueError, match="planted"):
        for _ in (shown := progress("abc", "some test")):
            raise ValueError("planted")
    shown.close()
    assert terminal.getvalue() == "\rsome test: 0\r            \r"


def test_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress(range(5), "some test")) == [0, 1, 2, 3, 4]
    assert stream.getvalue() == ""


def test_no_standard_error_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert list(progress(range(2), "some test")) == [0, 1]

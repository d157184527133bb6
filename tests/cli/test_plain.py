"""Help, usage errors and tables where nobody sees an edge: no boxes, no broken lines, no blanks at their ends."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from statsbridge.cli import app

from .conftest import run_command
from .test_output import in_terminal

BOXES = "╭╮╰╯│─"
COMMANDS = {info.callback.__name__: info.callback for info in app.registered_commands if info.callback is not None}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_in_a_pipe_is_plain_and_each_sentence_whole(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert not set(result.output) & set(BOXES)
    lines = result.output.splitlines()
    assert lines[0].startswith(f"Usage: statsbridge {name} ")
    for paragraph in (inspect.getdoc(COMMANDS[name]) or "").split("\n\n"):
        assert f"  {' '.join(paragraph.split())}" in lines
    assert not [line for line in lines if line.endswith(" ")]
    options = lines[lines.index("Options:") + 1 :]
    assert all(re.match(r"  -\S", line) or (line.startswith("   ") and len(line) > 80) for line in options), options


def test_help_of_all_in_a_pipe_names_each_command_in_one_line() -> None:
    result = run_command("--help", COLUMNS="40", FORCE_COLOR="1")
    assert (result.returncode, result.stderr) == (0, "")
    assert not set(result.stdout) & {*BOXES, "\x1b", "…"}
    listed = result.stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    for line, body in zip(listed, COMMANDS.values(), strict=True):
        assert line.split(maxsplit=1)[1] in " ".join((inspect.getdoc(body) or "").split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "--nope" * 30), f"No such option: {'--nope' * 30}"),
        (("shwo",), "No such command 'shwo'. Did you mean 'show'?"),
        (("demo", "--epochs", "many"), "Invalid value for '--epochs': "),
    ],
)
def test_a_usage_error_in_a_pipe_is_plain(arguments: tuple[str, ...], said: str) -> None:
    result = run_command(*arguments, COLUMNS="40", FORCE_COLOR="1")
    assert (result.returncode, result.stdout) == (2, "")
    usage, hint, blank, error = result.stderr.splitlines()
    assert usage.startswith("Usage: statsbridge ") or usage.startswith("Usage: -c ")
    assert hint.startswith("Try '")
    assert blank == ""
    assert error.startswith(f"Error: {said}")


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_in_a_terminal_both_are_drawn() -> None:
    assert "╭" in in_terminal(80, "show", "--help")
    assert "╭" in in_terminal(80, "show", "--nope")


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_each_stream_is_asked_for_itself() -> None:
    """`statsbridge show --help 2>errors` is read in a terminal."""
    import pty

    outside, inside = pty.openpty()
    code = "from statsbridge.cli import app; app()"
    for arguments in (["show", "--help"], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], stdout=inside, stderr=subprocess.PIPE, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert "╭".encode() in os.read(outside, 65536)
    os.close(inside)
    os.close(outside)


@pytest.mark.parametrize("name", ["ls", "show", "diagnose", "curves"])
def test_a_table_in_a_pipe_has_no_blanks_at_the_end_of_a_line(name: str, runs: Path) -> None:
    result = run_command(*((name, str(runs)) if name == "ls" else (name, "newer", "--dir", str(runs))))
    assert result.stdout
    assert not [line for line in result.stdout.splitlines() if line != line.rstrip()]

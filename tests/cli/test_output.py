"""What a pipe, a narrow terminal, a closed pipe and Ctrl-C get."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.cells import cell_len
from rich.console import Console

from statsbridge.cli.output import Column, command, number, one_line, print_table

from .conftest import LONG_NAME, run_command


def test_a_pipe_gets_whole_names_one_line_a_row_and_no_colours(runs: Path) -> None:
    result = run_command("show", "newer", "--dir", str(runs), FORCE_COLOR="1", COLUMNS="40")
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    assert "…" not in result.stdout
    (row,) = (line for line in result.stdout.splitlines() if LONG_NAME in line)
    assert row.split() == ["2", LONG_NAME, "ReLU", "0.333", "0.5", "▄▄▄", "0.969", "1", "!!", "dead"]


def test_an_encoding_without_the_glyphs_is_no_crash(runs: Path) -> None:
    result = run_command("show", "newer", "--dir", str(runs), PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    assert "???" in result.stdout


def test_a_wrong_word_is_one_line_and_status_2_in_a_real_process(runs: Path) -> None:
    result = run_command("show", "newer", "--dir", str(runs), "--site", "weights")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "statsbridge: unknown site weights: Choices: activation, parameter_grad\n"


def test_reading_a_run_needs_no_torch(runs: Path) -> None:
    code = (
        "import sys; from statsbridge.cli import app; app(standalone_mode=False); "
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    arguments = [sys.executable, "-c", code, "show", "newer", "--dir", str(runs)]
    result = subprocess.run(arguments, capture_output=True, check=False, timeout=120)
    assert b"!! dead" in result.stdout
    assert result.stderr.strip() == b"False"


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_a_closed_pipe_ends_quietly(runs: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "from statsbridge.cli import app; app()"
    arguments = [sys.executable, "-c", code, "show", "newer", "--dir", str(runs)]
    result = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=120)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


def test_ctrl_c_ends_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as raised, command():
        raise KeyboardInterrupt
    assert raised.value.exit_code == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_80_columns_hold_the_table_with_the_module_folded_and_colours(runs: Path) -> None:
    output = in_terminal(80, "show", "newer", "--dir", str(runs))
    assert "\x1b[1;31m" in output
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output).replace("\r", "")
    table = plain.split("\n\n")[1].splitlines()
    assert max(cell_len(line) for line in table) <= 80
    assert "…" not in plain
    first = next(number for number, line in enumerate(table) if line.split()[:1] == ["2"])
    folded = table[first].split()[1]
    for line in table[first + 1 :]:
        if len(line.split()) != 1:
            break
        folded += line.strip()
    assert folded == LONG_NAME
    assert table[first].split()[2:] == ["ReLU", "0.333", "0.5", "▄▄▄", "0.969", "1", "!!", "dead"]


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_terminal_too_narrow_says_what_it_left_out(runs: Path) -> None:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", in_terminal(52, "show", "newer", "--dir", str(runs)))
    assert "left out at this width: type, std over steps" in plain
    assert "Conv2d" not in plain
    assert "!! dead" in plain


def in_terminal(columns: int, *arguments: str) -> str:
    """What the command writes to a terminal of this many columns."""
    import fcntl
    import pty
    import struct
    import termios

    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "NO_COLOR"}}
    with subprocess.Popen(
        [sys.executable, "-c", "from statsbridge.cli import app; app()", *arguments],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env={**environment, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
    ):
        os.close(inside)
        written = b""
        # Linux says EIO where the other end is closed, other systems say that there is nothing more.
        while chunk := _read(outside):
            written += chunk
    os.close(outside)
    return written.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def console(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system="standard")


def test_the_least_column_goes_first_and_the_gaps_before_it() -> None:
    columns = [
        Column("a", [("x" * 10, "")]),
        Column("b", [("y" * 10, "")], optional=2),
        Column("c", [("z" * 10, "")], optional=1),
    ]
    assert print_table(console(32), columns) == []
    assert print_table(console(31), columns) == ["c"]
    assert print_table(console(21), columns) == ["c"]
    assert print_table(console(20), columns) == ["c", "b"]


def test_several_notes_go_below_each_other_only_where_they_must() -> None:
    columns = [Column("a", [("x" * 10, "")]), Column("b", [("one, two", "")], break_at=", ")]
    for width, lines in ((20, ["xxxxxxxxxx  one, two"]), (14, ["xxxxxxxxxx one", "           two"])):
        screen = Console(file=io.StringIO(), width=width)
        print_table(screen, columns)
        assert isinstance(screen.file, io.StringIO)
        assert [line.rstrip() for line in screen.file.getvalue().splitlines()[1:]] == lines


def test_only_the_folding_column_is_folded() -> None:
    screen = console(60)
    print_table(screen, [Column("a", [("x" * 30, "")], folds=True), Column("b", [("y " * 20, "")])])
    assert isinstance(screen.file, io.StringIO)
    assert "y " * 20 in screen.file.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.0, "0"),
        (1 / 3, "0.333"),
        (-1.234e-5, "-1.23e-05"),
        (12345.6, "12346"),
        (1e9, "1e+09"),
        (123456789, "123456789"),
        (float("nan"), "nan"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_one_line_shows_control_characters() -> None:
    assert one_line("a\nb\t\x1b[31mé ▁") == r"a\nb\t\x1b[31mé ▁"

"""Every example runs as its docstring says, in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import statsbridge

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (path,) = (tmp_path / "statsbridge-runs").iterdir()
    data = statsbridge.load(path)
    assert data.stats.num_rows > 0
    assert str(path) in done.stdout


def test_there_are_examples() -> None:
    assert "plain_loop" in {path.stem for path in EXAMPLES}

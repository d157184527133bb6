from pathlib import Path

import numpy
import pyarrow
import pytest
import torch
from log_rows import new_run
from typer.testing import CliRunner

import statsbridge
from statsbridge.cli import app
from statsbridge.cli.doctor import release
from statsbridge.mirror.hashing import KEY_FILE, load_key, note_key

from .conftest import run_command


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATSBRIDGE_POLICY", "STATSBRIDGE_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def doctor(directory: Path, status: int = 0) -> dict[str, str]:
    """What the report says of each subject, with the mark in front."""
    result = CliRunner().invoke(app, ["doctor", "--dir", str(directory)])
    assert result.exit_code == status, result.output
    return findings(result.stdout)


def findings(output: str) -> dict[str, str]:
    lines = [line.split(maxsplit=2) for line in output.partition("\n\n")[0].splitlines()[1:]]
    return {subject: f"{mark} {text}".rstrip() for mark, subject, text in lines}


def test_versions_are_those_of_the_packages(tmp_path: Path) -> None:
    found = doctor(tmp_path)
    assert found["statsbridge"] == f"ok {statsbridge.__version__}"
    assert found["numpy"] == f"ok {numpy.__version__}"
    assert found["pyarrow"] == f"ok {pyarrow.__version__}"
    assert found["torch"] == f"ok {torch.__version__}"


def test_it_says_which_adapters_can_be_used_and_that_no_policy_is_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctor(tmp_path)
    assert found["policy"] == "ok none: unrestricted runs may be mirrored anywhere, restricted ones nowhere"
    assert found["adapters"] == "ok can be used: aim, mlflow, tensorboard, wandb"
    assert found["switch"] == "ok $STATSBRIDGE_DISABLED is not set: statsbridge.init records"


def test_the_policy_in_force_is_named_and_a_wrong_one_is_critical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.toml"
    monkeypatch.setenv("STATSBRIDGE_POLICY", str(policy))
    missing = doctor(tmp_path, status=1)["policy"]
    assert missing.startswith("!! ")
    assert str(policy) in missing

    policy.write_text('names = "hashed"\n')
    assert doctor(tmp_path)["policy"].startswith(f"ok {policy} ")


def test_a_key_that_is_gone_is_seen_before_names_get_other_hashes(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert "key" not in doctor(tmp_path)
    file = run / "mirrors" / KEY_FILE
    note_key(run, file, load_key(file))
    assert "key" not in doctor(tmp_path)
    file.unlink()
    assert "put it back from a copy" in doctor(tmp_path)["key"]


def test_the_switch_that_turns_recording_off_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATSBRIDGE_DISABLED", "1")
    assert doctor(tmp_path)["switch"].startswith("! $STATSBRIDGE_DISABLED=1: ")


def test_trying_to_write_leaves_nothing_behind(tmp_path: Path) -> None:
    assert f"{tmp_path} can be written" in doctor(tmp_path)["run"]
    assert "can be made" in doctor(tmp_path / "new" / "deeper")["run"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_status_1(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    found = doctor(file / "runs", status=1)
    assert found["run"].startswith("!! ")
    assert "cannot be written" in found["run"]


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("2.5.1", 1, "!! 2.5.1 is too old: statsbridge.init needs 2.6 or later"),
        ("2.6.0a0+nv25", 0, "ok 2.6.0a0+nv25"),
    ],
)
def test_an_old_torch_is_status_1(tmp_path: Path, version: str, status: int, said: str) -> None:
    (tmp_path / "torch.py").write_text(f"__version__ = {version!r}\n")
    # The real one looks for tensors of the torch that it finds.
    (tmp_path / "sklearn.py").write_text("__version__ = '1.4'\n")
    result = run_command("doctor", "--dir", str(tmp_path), PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stderr) == (status, "")
    assert findings(result.stdout)["torch"] == said


def test_what_is_missing_names_its_extra_and_what_is_broken_its_error(tmp_path: Path) -> None:
    (tmp_path / "duckdb.py").write_text("raise ModuleNotFoundError('No module', name='duckdb')\n")
    (tmp_path / "numpy.py").write_text("raise OSError('libfoo.so is missing')\n")
    result = run_command("doctor", "--dir", str(tmp_path), PYTHONPATH=str(tmp_path))
    found = findings(result.stdout)
    assert result.returncode == 1
    assert found["duckdb"] == "- not installed: pip install 'statsbridge[sql]' brings it"
    assert found["numpy"] == "!! installed, but cannot be imported: libfoo.so is missing"


@pytest.mark.parametrize(
    ("version", "expected"), [("2.13.0+cpu", (2, 13)), ("2.7.0a0+ecf3bae40a.nv25.03", (2, 7)), ("10", (10,))]
)
def test_release(version: str, expected: tuple[int, ...]) -> None:
    assert release(version) == expected


def test_version_option() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"statsbridge {statsbridge.__version__}\n")

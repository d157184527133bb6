"""What a policy file may say, and the message for everything else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from statsbridge.errors import PolicyError
from statsbridge.mirror.destinations import Folder, Url
from statsbridge.mirror.policy_file import STATISTICS, PolicyFile, read_policy_file

DESTINATION = '[[destinations]]\nbackend = "mlflow"\nurl = "https://mlflow.lab.example"\n'


def read(folder: Path, text: str) -> PolicyFile:
    file = folder / "policy.toml"
    file.write_text(text)
    found = read_policy_file(file, "project")
    assert found is not None
    return found


def refusal(folder: Path, text: str | bytes) -> str:
    file = folder / "policy.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(PolicyError) as error:
        read_policy_file(file, "project")
    assert str(error.value).startswith(f"policy {file}")
    return str(error.value).removeprefix(f"policy {file}")


def test_a_whole_file(tmp_path: Path) -> None:
    policy = read(
        tmp_path,
        """
        applies_to = "all"
        names = "hashed"
        sites = ["activation*", "update"]
        key_file = "names.key"

        [[destinations]]
        backend = "mlflow"
        url = "https://mlflow.lab.example:443/team/"
        channels = ["metrics", "alerts"]
        scalars = ["loss", "val/*"]

        [[destinations]]
        backend = "*"
        path = "mirrors"
        sites = ["update"]
        names = "plain"
        """,
    )
    assert not policy.restricted_only
    assert policy.limits.names == "hashed"
    assert policy.limits.channels is None
    assert policy.destinations is not None
    first, second = policy.destinations
    assert first.address == Url("https", "mlflow.lab.example", None, ("team",))
    assert first.limits.channels == ("metrics", "alerts")
    assert first.limits.sites == ("activation*", "update")  # as at the top
    assert first.limits.scalars == ("loss", "val/*")
    assert first.limits.names == "hashed"
    assert first.limits.key_file == str(tmp_path / "names.key")
    assert second.address == Folder(str(tmp_path / "mirrors"))
    assert second.limits.channels == ("metrics",)  # where nothing is said
    assert (second.limits.sites, second.limits.names) == (("update",), "plain")


def test_an_empty_file_limits_nothing_and_applies_to_restricted_runs(tmp_path: Path) -> None:
    policy = read(tmp_path, "")
    assert policy.restricted_only
    assert policy.destinations is None
    assert read(tmp_path, "destinations = []").destinations == ()


def test_no_file_is_no_policy(tmp_path: Path) -> None:
    assert read_policy_file(tmp_path / "policy.toml", "system") is None
    (tmp_path / "file").touch()
    assert read_policy_file(tmp_path / "file" / "policy.toml", "system") is None


def test_the_statistics_are_the_columns_of_the_table() -> None:
    assert STATISTICS == (
        "count", "nan_count", "inf_count", "mean", "std", "skewness", "kurtosis", "min", "max", "abs_mean", "l2",
        "zero_fraction", "kl_unit_gaussian", "update_ratio", "histogram",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("destination = []", ": unknown key 'destination': did you mean 'destinations'? Choices: "),
        ("colour = 1", ": unknown key 'colour': Choices: applies_to, "),
        ('applies_to = "everyone"', ": applies_to = 'everyone': Choices: restricted, all"),
        ("applies_to = true", ": applies_to = True: Choices: restricted, all"),
        ('names = "hash"', ": names = 'hash': did you mean 'hashed'? Choices: plain, hashed"),
        ('sites = "activation"', ": sites = 'activation': give an array of texts"),
        ("sites = [1]", ": sites holds 1, which is no text"),
        ('sites = ["activations"]', ": sites holds 'activations': did you mean 'activation'? Choices: activation, "),
        ('statistics = ["stdev"]', ": statistics holds 'stdev': did you mean 'std'?"),
        ('tables = ["modules"]', ": tables holds 'modules': Choices: scalars, stats, events"),
        ('tables = ["s*"]', ": tables holds 's*': "),
        ('channels = ["metric"]', ": channels holds 'metric': did you mean 'metrics'?"),
        ('channels = ["*"]', ": channels holds '*': Choices: metrics, "),
        ("scalars = [true]", ": scalars holds True, which is no text"),
        ("key_file = 1", ": key_file = 1: give a path"),
        ('key_file = "~/key"', ": key_file = '~/key': write the home folder out"),
        ('destinations = "all"', ": destinations = 'all': give an array of tables"),
        ("destinations = [1]", ": [[destinations]] 1: must be a table"),
        ("[destinations]", ": destinations = {}: give an array of tables"),
        (DESTINATION + 'url2 = "x"', ": [[destinations]] 1: unknown key 'url2': did you mean 'url'?"),
        (DESTINATION + 'path = "x"', ": [[destinations]] 1: needs one of url and path"),
        ('[[destinations]]\nbackend = "mlflow"', ": [[destinations]] 1: needs one of url and path"),
        ('[[destinations]]\nurl = "https://a"', ": [[destinations]] 1: lacks backend"),
        (DESTINATION + DESTINATION + 'sites = ["x"]', ": [[destinations]] 2: sites holds 'x': Choices"),
        (DESTINATION.replace("mlflow.lab", "MLflow.lab"), ": [[destinations]] 1: url = 'https://MLflow.lab.example': "),
        (DESTINATION.replace("https://", ""), ": [[destinations]] 1: url = 'mlflow.lab.example': it is no URL"),
        ('[[destinations]]\nbackend = "aim"\npath = "~/aim"', ": [[destinations]] 1: path = '~/aim': write the home"),
        ('[[destinations]]\nbackend = "aim"\npath = "../aim"', ": [[destinations]] 1: path = '../aim': it holds '..'"),
        ('[[destinations]]\nbackend = "aim"\npath = ""', ": [[destinations]] 1: path = '': it is empty"),
        ("names = ", " is no TOML: Invalid value (at end of document)"),
        ("names = 'plain'\nnames = 'plain'\n\n", " is no TOML: Cannot overwrite a value (at line 2"),
        (b"\xff\xfe", " is no TOML: 'utf-8' codec can't decode"),
        ("a = " + "[" * 10_000, " is no TOML: "),
        ("#" * (2 << 20), " is larger than 1048576 bytes"),
    ],
)
def test_every_slip_is_named_with_its_file_and_key(tmp_path: Path, text: str | bytes, told: str) -> None:
    assert refusal(tmp_path, text).startswith(told)


@pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links and modes")
def test_a_symbolic_link_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    (tmp_path / "real.toml").write_text("")
    for target in ("real.toml", "nowhere.toml"):
        link = tmp_path / f"link-to-{target}"
        link.symlink_to(tmp_path / target)
        with pytest.raises(PolicyError, match=rf"policy {link} is a symbolic link"):
            read_policy_file(link, "system")


@pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links and modes")
def test_what_is_no_readable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.toml").mkdir()
    os.mkfifo(tmp_path / "pipe.toml")
    for name in ("folder.toml", "pipe.toml"):
        with pytest.raises(PolicyError, match=rf"policy {tmp_path / name} is no regular file"):
            read_policy_file(tmp_path / name, "system")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(PolicyError, match="cannot be read"):
        read_policy_file(tmp_path / "loop" / "policy.toml", "system")
    with pytest.raises(PolicyError, match="cannot be read"):
        read_policy_file(tmp_path / ("x" * 300), "system")

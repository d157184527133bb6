"""The adapter passes the conformance kit, with outages of a real disk, and keeps a restricted run's secrets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from disk_outage_helpers import full_disk, unmounted
from statsbridge_tensorboard import TensorBoard

from statsbridge import ConfigError, MirrorError, Retry, testing
from statsbridge.backends import make_adapters


def test_conformance(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    testing.check_adapter(lambda: TensorBoard(folder), tmp_path, outage=lambda: full_disk(folder))


def test_a_folder_that_is_away_for_a_while(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    testing.check_outage(lambda: TensorBoard(folder), tmp_path, lambda: unmounted(folder))


def test_a_restricted_run_tells_nothing_of_the_machine(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    testing.check_restricted(lambda: TensorBoard(folder), tmp_path, folder, more=[str(tmp_path)])


def test_a_disk_that_fills_up_while_it_opens(tmp_path: Path) -> None:
    """Whatever step of opening fails, the second attempt leaves the same files as an undisturbed one."""
    run = testing.made_run(tmp_path)
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    testing.Session(TensorBoard(undisturbed), run).close()
    disturbed.mkdir()
    (disturbed / "another").write_bytes(b"0123456789")
    adapter, memory = TensorBoard(disturbed), dict[str, str]()
    for room in (20, 200):  # within the first record, and within the configuration
        with full_disk(disturbed, room=room), pytest.raises(Retry, match="disturbed"):
            adapter.open(run, adapter.destination(), memory)
    adapter.open(run, adapter.destination(), memory)
    adapter.close("finished")
    texts = [
        sorted(line for path in folder.rglob("*tfevents*") for line in path.read_bytes().split(b"\n") if b'": ' in line)
        for folder in (undisturbed, disturbed)
    ]
    assert texts[0] == texts[1] != []


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert TensorBoard().destination().address == str(tmp_path / "runs")
    assert not TensorBoard().destination().explicit
    (named,) = make_adapters("tensorboard:logs/here")
    assert named.destination().address == str(tmp_path / "logs" / "here")
    assert named.destination().explicit
    with pytest.raises(ConfigError, match="local folder"):
        make_adapters("tensorboard:gs://bucket/logs")


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(MirrorError, match="cannot be written") as error:
        testing.Session(TensorBoard(tmp_path / "runs"), testing.made_run(tmp_path))
    assert not isinstance(error.value, Retry)


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "statsbridge_tensorboard.events", raising=False)
    monkeypatch.delattr("statsbridge_tensorboard.events", raising=False)
    for name in [name for name in sys.modules if name.startswith("tensorboard.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MirrorError, match=r"pip install 'statsbridge\[tensorboard\]'"):
        testing.Session(TensorBoard(tmp_path), testing.made_run(tmp_path))

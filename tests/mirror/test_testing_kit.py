"""The conformance kit passes the JSON lines example, and finds each fault of an adapter that has one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import broken_adapters_helpers as broken
import pytest
import torch
from disk_outage_helpers import full_disk, unmounted
from json_lines_adapter import JsonLines

import statsbridge
from statsbridge import testing
from statsbridge.backends import make_adapters
from statsbridge.mirror import Adapter, Reading


def test_the_example_passes(tmp_path: Path) -> None:
    folder = tmp_path / "lines"
    testing.check_adapter(lambda: JsonLines(folder), tmp_path, outage=lambda: full_disk(folder))
    testing.check_restricted(lambda: JsonLines(tmp_path / "restricted"), tmp_path, tmp_path / "restricted")


def test_rejecting_late_steps_is_allowed(tmp_path: Path) -> None:
    testing.check_order(lambda: broken.RejectsLateSteps(tmp_path / "lines"), tmp_path)


def plain(check: Callable[..., None]) -> Callable[..., None]:
    """A check that needs no folder, called as the others are."""
    return lambda make, folder: check(make)


def with_outage(make: Callable[[], Adapter], folder: Path) -> None:
    testing.check_outage(make, folder, lambda: full_disk(folder / "lines"))


def restricted(make: Callable[[], Adapter], folder: Path) -> None:
    testing.check_restricted(make, folder, folder / "lines")


FAULTS = [
    (broken.DoublesReplays, testing.check_replay, "extra: 'activation/std/blocks"),
    (broken.LosesOnKill, testing.check_crash, "lost by kill -9"),
    (broken.DoublesReplays, testing.check_crash, "extra"),
    (broken.ReplacesCharacters, plain(testing.check_key), "both have the key"),
    (broken.ReplacesCharacters, testing.check_names, "missing: "),
    (broken.ChangingKeys, plain(testing.check_key), "not always the same"),
    (broken.ForgetsOptions, plain(testing.check_key), "options"),
    (broken.RoundsSilently, testing.check_values, "0.333333 "),
    (broken.StoresZeros, testing.check_values, "stored(0.1) is 0.0"),
    (broken.ForgetsSignOfZero, testing.check_values, "missing: .* = -0.0"),
    (broken.DropsNaN, testing.check_values, "missing: .* = NaN"),
    (broken.DropsLateSteps, testing.check_order, "missing: "),
    (broken.RoundsSteps, testing.check_steps, "step 9007199254740991"),
    (broken.KeepsLast, testing.check_steps, "extra: 'loss' step 7"),
    (broken.OwnTimes, testing.check_order, "has the time"),
    (broken.ShowsHistogramsAsValues, testing.check_channels, "= 45.0"),
    (broken.IgnoresOutage, with_outage, "acknowledged the batch of step 2"),
    (broken.RejectsDuringOutage, with_outage, "no reason to reject"),
    (broken.ImportsEarly, plain(testing.check_destination), "'tensorboard'"),
    (broken.TouchesEarly, plain(testing.check_destination), "os.mkdir"),
    (broken.LooksUpHosts, plain(testing.check_destination), "socket.getaddrinfo"),
    (broken.TellsHost, restricted, "holds .'host-"),
    (broken.TellsUser, restricted, "holds .'user-"),
    (broken.TellsFolder, restricted, "holds .'folder-"),
    (broken.TellsCommand, restricted, "holds .'argument-"),
]


@pytest.mark.parametrize(
    ("kind", "check", "text"), FAULTS, ids=[f"{kind.__name__}-{number}" for number, (kind, *_) in enumerate(FAULTS)]
)
def test_each_fault_is_found(kind: type[Any], check: Callable[..., None], text: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=text.replace("(", r"\(").replace(")", r"\)")):
        check(partial(kind, str(tmp_path / "lines")), tmp_path)


def test_errors_of_the_adapter_come_through(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        testing.check_channels(lambda: broken.FailsOnEventsWithoutStep(tmp_path / "lines"), tmp_path)


def test_a_call_that_hangs_is_named(tmp_path: Path) -> None:
    class Hangs(JsonLines):
        def send(self, batch: object) -> None:
            release.wait()

    release = threading.Event()
    session = testing.Session(Hangs(tmp_path / "lines"), testing.made_run(tmp_path), bound=0.2)
    with pytest.raises(AssertionError, match=r"send did not return within 0\.2 s"):
        session.send(testing.made_batches(1)[0])
    release.set()


def test_a_missing_disk_is_an_outage_to_the_example(tmp_path: Path) -> None:
    """The file stays open, so that what is written while the folder is away is there when it is back."""
    folder = tmp_path / "lines"
    session = testing.Session(JsonLines(folder), testing.made_run(tmp_path))
    with unmounted(folder):
        session.send(testing.made_batches(1)[0])
    session.close()
    readings = list(JsonLines(folder).read_back(session.run, session.destination, session.memory))
    assert readings == [Reading(point.series.name, *point[1:]) for point in testing.made_batches(1)[0].points]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example as an installed distribution with an entry point: what `pip install` leaves on the disk."""
    site = tmp_path / "site"
    metadata = site / "statsbridge_jsonlines-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: statsbridge-jsonlines\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[statsbridge.adapters]\njsonlines = json_lines_adapter:JsonLines\n")
    monkeypatch.syspath_prepend(str(site))
    return site


def test_found_by_its_entry_point(installed: Path, tmp_path: Path) -> None:
    (adapter,) = make_adapters(f"jsonlines:{tmp_path / 'lines'}")
    assert isinstance(adapter, JsonLines)
    assert adapter.destination().address == str(tmp_path / "lines")


def test_mirrors_a_run_by_name(installed: Path, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    run = statsbridge.init(model, backend=f"jsonlines:{tmp_path / 'lines'}", every=1, dir=tmp_path / "runs")
    losses = []
    for _ in range(5):
        loss = model(torch.randn(1, 2)).sum()
        loss.backward()
        losses.append(loss.item())
        run.step(loss=loss)
    run.finish()
    lines = [json.loads(line) for line in (tmp_path / "lines" / f"{run.id}.jsonl").read_text().splitlines()]
    assert [value for name, _, _, value in lines if name == "loss"] == losses
    assert "activation/std/root" in {name for name, *_ in lines}

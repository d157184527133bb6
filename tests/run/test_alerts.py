"""What goes wrong while a training runs is said, written, sampled more densely and delivered; health is silence."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from mirror_helpers import JsonLines
from recording import Small, events
from torch import nn

import statsbridge
from statsbridge.analyze import watch
from statsbridge.analyze.diagnosis import diagnose
from statsbridge.analyze.thresholds import Thresholds

Record = Callable[..., statsbridge.Run]


def train(
    run: statsbridge.Run, model: nn.Module, steps: int, *, before: Callable[[int, torch.optim.Optimizer], None]
) -> None:
    """Learn y = sum of x; between two steps the writer's thread gets its turn, as in a training of some size."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        before(step, optimizer)
        x = torch.randn(32, 8)
        loss = (model(x)[:, 0] - x.sum(1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
        assert run._writer.flush()


def poison(step: int, model: nn.Module) -> Callable[[int, torch.optim.Optimizer], None]:
    def before(now: int, _: torch.optim.Optimizer) -> None:
        if now == step:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))

    return before


def healthy(step: int, optimizer: torch.optim.Optimizer) -> None:
    pass


def sampled(run: statsbridge.Run) -> list[int]:
    return sorted(set(statsbridge.load(run.path).stats["step"].to_pylist()))


def test_a_healthy_training_is_silent(record: Record, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = Small()
    run = record(model, every=10)
    train(run, model, 31, before=healthy)
    run.finish()
    assert statsbridge.load(run.path).events.num_rows == 0
    assert sampled(run) == [0, 10, 20, 30]
    assert capfd.readouterr().err == ""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> tuple[statsbridge.Run, str, JsonLines]:
    """A training whose first layer turns NaN before step 12; what it printed, and its mirror."""
    torch.manual_seed(0)
    model = Small()
    mirror = JsonLines(tmp_path_factory.mktemp("mirror") / "store")
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("statsbridge.reporting.print", lambda text, **_: said.append(text), raising=False)
        run = statsbridge.init(
            model, dir=tmp_path_factory.mktemp("alerts"), every=10, backend=mirror, flush_interval=0.05
        )
        train(run, model, 41, before=poison(12, model))
        run.finish()
    return run, "\n".join(said), mirror


def test_a_finding_is_one_line_on_standard_error(poisoned: tuple[statsbridge.Run, str, JsonLines]) -> None:
    run, said, _ = poisoned
    lines = said.splitlines()
    assert all(line.startswith("statsbridge: ") for line in lines)
    assert lines[0].startswith("statsbridge: critical at step 12: ")
    assert len(set(lines)) == len(lines) <= 9, "each is said once, and a breakdown does not fill the screen"
    told = [event["message"] for event in statsbridge.load(run.path).events.to_pylist()]
    assert any(lines[0].endswith(message) for message in told)


def test_a_finding_is_an_event_with_all_that_is_known(poisoned: tuple[statsbridge.Run, str, JsonLines]) -> None:
    data = statsbridge.load(poisoned[0].path)
    told = {event["kind"]: event for event in data.events.to_pylist()}
    loss = told["nonfinite_loss"]
    assert (loss["step"], loss["severity"], loss["module"]) == (12, "critical", None)
    activation = told["nonfinite_activation"]
    assert (activation["severity"], activation["module"], activation["site"]) == ("critical", "first", "activation")
    assert activation["value"] == 32 * 16
    # The same code offline: kinds, first steps and modules are those of the events written live.
    again = {(finding.kind, finding.step, finding.module) for finding in diagnose(data)}
    live = {(kind, event["step"], event["module"]) for kind, event in told.items() if kind != "burst"}
    assert live == again


def test_the_steps_after_a_finding_are_sampled_each_once(poisoned: tuple[statsbridge.Run, str, JsonLines]) -> None:
    run = poisoned[0]
    data = statsbridge.load(run.path)
    bursts = events(data, "burst")
    begun = [event["step"] for event in bursts]
    assert begun[0] == 14, "found after step 12, heeded at the end of step 13"
    assert [event["value"] for event in bursts] == [5.0] * len(bursts)
    expected = {step for begin in begun for step in range(begin, begin + 5)} | {0, 10, 20, 30, 40}
    assert sampled(run) == sorted(expected)
    assert max(begun) < 25, "what was found before calls for no burst again: they come to an end"
    rows = data.stats.select(["step", "module", "site", "tensor", "call"]).to_pylist()
    assert len({tuple(row.values()) for row in rows}) == len(rows), "no step was sampled twice"


def test_a_mirror_delivers_it_as_an_alert(poisoned: tuple[statsbridge.Run, str, JsonLines]) -> None:
    run, _, mirror = poisoned
    written = statsbridge.load(run.path).events.to_pylist()
    grave = [(event["kind"], event["message"]) for event in written if event["severity"] in ("warning", "critical")]
    assert [(event.kind, event.message) for event in mirror.alerts] == grave
    assert "burst" not in {event.kind for event in mirror.alerts}


def test_no_burst_where_none_is_wanted(record: Record, capfd: pytest.CaptureFixture[str]) -> None:
    model = Small()
    run = record(model, every=statsbridge.Sampling(every=10, burst=0))
    train(run, model, 31, before=poison(12, model))
    run.finish()
    assert sampled(run) == [0, 10, 20, 30]
    assert events(statsbridge.load(run.path), "nonfinite_loss")
    assert not events(statsbridge.load(run.path), "burst")
    assert "critical at step 12" in capfd.readouterr().err


def test_no_alerts_where_none_are_wanted(record: Record, capfd: pytest.CaptureFixture[str]) -> None:
    model = Small()
    run = record(model, every=10, alerts=False)
    train(run, model, 21, before=poison(12, model))
    run.finish()
    assert statsbridge.load(run.path).events.num_rows == 0
    assert sampled(run) == [0, 10, 20]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("alerts", [{"loss_spike": 1e9}, Thresholds(loss_spike=1e9), {"loss_spike": 3.0}, True])
def test_limits_are_the_users(alerts: Any, record: Record, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = Small()
    run = record(model, every=100, alerts=alerts)
    for step in range(30):
        run.step(loss=50.0 if step == 20 else 1.0 / (1 + step / 10) + 0.01 * (step % 3))
    run.finish()
    spikes = events(statsbridge.load(run.path), "loss_spike")
    wanted = alerts is True or alerts == {"loss_spike": 3.0}
    assert [event["step"] for event in spikes] == ([20] if wanted else [])
    assert ("50" in capfd.readouterr().err) == wanted


@pytest.mark.parametrize(
    ("alerts", "said"),
    [
        ("yes", "give True, False, a Thresholds or a mapping"),
        ({"loss_spik": 3}, "loss_spike"),
        ({"loss_spike": -1}, "at least 0"),
        (1, "give True, False"),
    ],
)
def test_wrong_limits_are_refused_at_once(alerts: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(statsbridge.ConfigError, match=said):
        statsbridge.init(Small(), dir=tmp_path, alerts=alerts)
    assert not list(tmp_path.iterdir())


def test_a_finding_at_the_very_end_is_on_disk(record: Record, capfd: pytest.CaptureFixture[str]) -> None:
    run = record(Small(), every=100, flush_interval=60)
    for step in range(30):
        run.step(loss=float("inf") if step == 29 else 1.0)
    run.finish()
    found = events(statsbridge.load(run.path), "nonfinite_loss_outside") or events(
        statsbridge.load(run.path), "nonfinite_loss"
    )
    assert [event["step"] for event in found] == [29]
    assert "step 29" in capfd.readouterr().err


def test_a_watch_that_fails_stops_watching_and_nothing_else(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fails(self: watch.Watch, tables: dict[str, pa.Table]) -> list[Any]:
        asked.append(sorted(tables))
        raise RuntimeError("planted")

    monkeypatch.setattr(watch.Watch, "add", fails)
    model = Small()
    run = record(model, every=2)
    with pytest.warns(statsbridge.StatsBridgeWarning, match="no alerts from here on"):
        train(run, model, 6, before=healthy)
        run.finish()
    assert len(asked) == 1
    data = statsbridge.load(run.path)
    assert [event["kind"] for event in data.events.to_pylist()] == ["internal_error"]
    assert sampled(run) == [0, 2, 4]


def test_names_of_modules_cannot_move_the_cursor(record: Record, capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential()
    model.add_module("\x1b[2Jevil\r[red]", nn.Linear(8, 3))
    run = record(model, every=1)
    train(run, model, 4, before=poison(2, model))
    run.finish()
    said = capfd.readouterr().err
    assert "\x1b" not in said
    assert "\r" not in said
    assert "\\x1b[2Jevil [red]" in said


def test_standard_error_that_is_closed_hurts_nobody(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    model = Small()
    run = record(model, every=1)
    train(run, model, 4, before=poison(2, model))
    run.finish()
    assert [event["step"] for event in events(statsbridge.load(run.path), "nonfinite_loss")] == [2]


def test_training_is_the_same_to_the_bit_with_alerts_and_bursts(record: Record) -> None:
    weights = []
    for alerts in (False, True):
        torch.manual_seed(0)
        model = Small(dropout=0.3)
        run = record(model, every=5, alerts=alerts)

        def before(step: int, optimizer: torch.optim.Optimizer) -> None:
            optimizer.param_groups[0]["lr"] = 0.3 if 10 <= step < 14 else 0.01

        train(run, model, 24, before=before)
        run.finish()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_an_alert_does_not_wait_for_the_next_flush(record: Record) -> None:
    """The rows and what follows from them are written in one go."""
    run = record(Small(), every=100, flush_interval=0.05)
    for step in range(12):
        run.step(loss=float("nan") if step == 11 else 1.0)
    deadline = time.monotonic() + 20
    while not statsbridge.load(run.path).events.num_rows and time.monotonic() < deadline:
        time.sleep(0.02)
    assert statsbridge.load(run.path).events["step"].to_pylist()[0] == 11

"""One mirror at work on a record: retries, refusals, failures, restarts, and that nothing is lost or doubled."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from log_rows import new_run, scalar_rows, stats_rows, write_run
from mirror_helpers import Hanging, JsonLines, Planned, lines, logged, stored_scalars

from statsbridge import MirrorError, PolicyError, Reject, Retry, Selection
from statsbridge.log.folder import create_run
from statsbridge.mirror import Batch, delivery
from statsbridge.mirror import lease as lease_module
from statsbridge.mirror import tail as tail_module
from statsbridge.mirror.dead_letters import read_dead_letters
from statsbridge.mirror.mirrors import new_plan
from statsbridge.mirror.policy import load_policy
from statsbridge.mirror.relay import Relay
from statsbridge.mirror.state import load_state, state_file

Said = list[tuple[str, str, bool]]


def steps(first: int, last: int, rows: int = 2) -> list[dict[str, Any]]:
    return [
        {"stats": stats_rows(step, rows), "scalars": scalar_rows(step, loss=1.0 / (step + 1), lr=0.1)}
        for step in range(first, last)
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return new_run(tmp_path)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits as in real life, only shorter."""
    monkeypatch.setattr(delivery, "LONGEST_WAIT_AT_THE_END", 0.05)
    monkeypatch.setattr(delivery, "_GROWING", lambda state: 0.01)


@pytest.fixture
def said() -> Said:
    return []


@pytest.fixture
def relay(run: Path, said: Said) -> Iterator[Callable[..., Relay]]:
    made: list[Relay] = []

    def make(adapter: JsonLines, selection: Selection | None = None, **options: Any) -> Relay:
        name = state_file(run, new_plan(run, adapter, adapter.destination(), Selection(), load_policy()).state.name)
        plan = new_plan(run, adapter, adapter.destination(), selection or Selection(), load_policy())
        if name.exists():
            object.__setattr__(plan, "state", load_state(name))
        report = lambda kind, message, *, cause, warn: said.append((kind, message, warn))  # noqa: E731
        made.append(Relay(plan, report, interval=0.01, **options))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.give_up("the test is over")


def finish(relay: Relay, status: str = "finished") -> None:
    relay.begin_finish(status)
    assert relay.join(30)


def eventually(what: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def kinds(said: Said) -> list[str]:
    return [kind for kind, _, _ in said]


def state_of(run: Path, relay: Relay) -> Any:
    return load_state(state_file(run, relay.plan.state.name))


def test_everything_arrives_in_order_and_is_counted(run: Path, tmp_path: Path, relay: Any, said: Said) -> None:
    adapter = JsonLines(tmp_path / "store")
    serving = relay(adapter)
    write_run(run, *steps(0, 20))
    finish(serving, "failed")
    assert stored_scalars(adapter.path) == logged(run)
    state = state_of(run, serving)
    assert (state.status, state.reason, state.owner) == ("finished", None, None)
    assert state.counts.points == len(lines(adapter.path)) > 60
    assert state.memory == {"run": run.name}
    assert (adapter.status, said) == ("failed", [])
    assert len(adapter.threads) == 1


def test_an_outage_is_said_once_and_costs_nothing(run: Path, tmp_path: Path, relay: Any, said: Said) -> None:
    adapter = Planned(tmp_path / "store", [Retry("connection refused")] * 30 + [None, None, Retry("again")])
    serving = relay(adapter)
    write_run(run, *steps(0, 5))
    eventually(lambda: adapter.calls >= 31)
    eventually(lambda: len(lines(adapter.path)) > 0)
    finish(serving)
    assert stored_scalars(adapter.path) == logged(run)
    outages = [(kind, warn) for kind, _, warn in said]
    assert outages[:2] == [("mirror_unreachable", True), ("mirror_resumed", False)]
    assert set(outages) == {("mirror_unreachable", True), ("mirror_resumed", False)}
    assert len(outages) <= 4
    assert "connection refused" in said[0][1]


def test_a_tracker_may_be_down_from_the_beginning(run: Path, tmp_path: Path, relay: Any, said: Said) -> None:
    adapter = Planned(tmp_path / "store", opening=[Retry("no route")] * 5)
    serving = relay(adapter)
    write_run(run, *steps(0, 3))
    finish(serving)
    assert stored_scalars(adapter.path) == logged(run)
    assert kinds(said) == ["mirror_unreachable", "mirror_resumed"]


def test_what_happens_when_the_record_is_closed_is_kept_with_the_mirror(
    run: Path, tmp_path: Path, relay: Any, said: Said
) -> None:
    up = threading.Event()

    class Down(Planned):
        def send(self, batch: Batch) -> None:
            self.calls += 1
            if not up.is_set():
                raise Retry("connection refused")
            JsonLines.send(self, batch)

    adapter = Down(tmp_path / "store")
    serving = relay(adapter)
    write_run(run, *steps(0, 3))
    eventually(lambda: adapter.calls >= 2)
    serving.begin_finish("finished")
    up.set()
    assert serving.join(30)
    assert kinds(said) == ["mirror_unreachable", "mirror_resumed"]
    # The record has an event of the first; the second came when it could take none.
    kept = state_of(run, serving).late
    assert [(one["kind"], one["message"]) for one in kept] == [said[1][:2]]
    assert kept[0]["time"] > "2020"


def test_names_that_leave_under_another_key_are_said(
    run: Path, tmp_path: Path, relay: Any, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('applies_to = "all"\nnames = "hashed"\n[[destinations]]\nbackend = "lines"\npath = "."\n')
    monkeypatch.setenv("STATSBRIDGE_POLICY", str(policy))
    write_run(run, *steps(0, 2))
    finish(relay(JsonLines(tmp_path / "store")))
    assert said == []
    (run / "mirrors" / "policy.key").unlink()
    finish(relay(JsonLines(tmp_path / "other")))
    assert kinds(said) == ["mirror_key_changed"]
    assert said[0][2], "it is a warning"


def test_the_tracker_says_how_long_to_wait(run: Path, tmp_path: Path, relay: Any) -> None:
    moments: list[float] = []
    note = lambda batch: moments.append(time.monotonic())  # noqa: E731

    class Busy(Planned):
        def send(self, batch: Batch) -> None:
            note(batch)
            super().send(batch)

    adapter = Busy(tmp_path / "store", [Retry("busy", after=0.4)])
    write_run(run, *steps(0, 2))
    serving = relay(adapter)
    eventually(lambda: len(moments) >= 2)
    finish(serving)
    assert moments[1] - moments[0] >= 0.4


def test_what_is_refused_is_kept_with_its_reason(run: Path, tmp_path: Path, relay: Any, said: Said) -> None:
    def refuse_losses(batch: Batch) -> None:
        raise Reject("no loss, please", [point for point in batch.points if point.series.name == "loss"])

    class Picky(JsonLines):
        backend = "picky"

        def send(self, batch: Batch) -> None:
            points = [point for point in batch.points if point.series.name != "loss"]
            super().send(Batch(points, batch.histograms))
            if len(points) < len(batch.points):
                refuse_losses(batch)

    adapter = Picky(tmp_path / "store")
    serving = relay(adapter)
    write_run(run, *steps(0, 4))
    finish(serving)
    assert stored_scalars(adapter.path) == logged(run, lambda name: name != "loss")
    letters = read_dead_letters(run, serving.plan.state.name).to_pylist()
    assert [(row["series"], row["step"], row["value"], row["reason"]) for row in letters] == [
        ("loss", step, 1.0 / (step + 1), "no loss, please") for step in range(4)
    ]
    times = read_dead_letters(run, serving.plan.state.name)["time"].cast("int64").to_pylist()
    assert times == [time for _, _, time, _ in logged(run, lambda name: name == "loss")]
    assert state_of(run, serving).counts.rejected == 4
    assert set(kinds(said)) == {"mirror_rejected"}
    assert any(f"refused {count} of" in said[0][1] for count in range(1, 5)), "as many as were read at once"


def test_a_batch_refused_as_a_whole(run: Path, tmp_path: Path, relay: Any) -> None:
    adapter = Planned(tmp_path / "store", [Reject("not today")])
    write_run(run, *steps(0, 4))
    serving = relay(adapter)
    finish(serving)
    letters = read_dead_letters(run, serving.plan.state.name)
    state = state_of(run, serving)
    assert letters.num_rows == state.counts.rejected > 0
    assert state.counts.rejected + state.counts.points == letters.num_rows + len(lines(adapter.path))


def test_an_adapter_that_fails_once_is_tried_again(run: Path, tmp_path: Path, relay: Any, said: Said) -> None:
    adapter = Planned(tmp_path / "store", [ValueError("a bug"), KeyError("another")])
    serving = relay(adapter)
    write_run(run, *steps(0, 3))
    finish(serving)
    assert stored_scalars(adapter.path) == logged(run)
    assert said == []


def test_a_batch_that_always_fails_goes_aside_with_the_traceback(
    run: Path, tmp_path: Path, relay: Any, said: Said
) -> None:
    adapter = Planned(tmp_path / "store", [ZeroDivisionError("a bug")] * 3)
    write_run(run, *steps(0, 3))
    serving = relay(adapter)
    finish(serving)
    letters = read_dead_letters(run, serving.plan.state.name).to_pylist()
    assert letters
    assert all("ZeroDivisionError: a bug" in row["reason"] for row in letters)
    assert all("Traceback" in row["reason"] for row in letters)
    assert kinds(said) == ["mirror_rejected"]
    assert state_of(run, serving).status == "finished"


def test_an_adapter_that_fails_on_everything_stops_and_loses_nothing(
    run: Path, tmp_path: Path, relay: Any, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "CHUNK_ROWS", 4)
    write_run(run, *steps(0, 10))
    broken = Planned(tmp_path / "store", [TypeError("a bug")] * 1000)
    serving = relay(broken)
    assert serving.join(30)
    state = state_of(run, serving)
    assert (state.status, broken.calls) == ("stopped", 9)
    assert "TypeError: a bug" in state.reason
    assert kinds(said) == ["mirror_rejected", "mirror_rejected", "mirror_stopped"]
    # Mended, it goes on where it stopped; what went aside is no more than the two batches before that.
    finish(relay(Planned(tmp_path / "store")))
    letters = read_dead_letters(run, serving.plan.state.name)
    kept = set(zip(letters["series"].to_pylist(), letters["step"].to_pylist(), strict=True))
    arrived = {(name, step) for name, step, _, _ in stored_scalars(tmp_path / "store")}
    everything = {(name, step) for name, step, _, _ in logged(run)}
    assert arrived | kept >= everything
    assert not arrived & kept
    assert len({step for _, step in kept}) <= 4


@pytest.mark.parametrize("error", [MirrorError("wrong password"), PolicyError("the policy has changed")])
@pytest.mark.parametrize("where", ["open", "send"])
def test_what_waiting_does_not_mend_stops_the_mirror(
    where: str, error: Exception, run: Path, tmp_path: Path, relay: Any, said: Said
) -> None:
    adapter = Planned(tmp_path / "store", **{"opening" if where == "open" else "plan": [error]})
    write_run(run, *steps(0, 3))
    serving = relay(adapter)
    assert serving.join(30)
    ((kind, message, warn),) = said
    assert (kind, warn) == ("mirror_stopped", True)
    assert str(error) in message
    assert f"statsbridge sync {run}" in message
    assert (state_of(run, serving).status, state_of(run, serving).owner) == ("stopped", None)
    finish(relay(Planned(tmp_path / "store")))
    assert stored_scalars(adapter.path) == logged(run)


def test_giving_up_leaves_the_rest_and_a_late_return_changes_nothing(run: Path, tmp_path: Path, relay: Any) -> None:
    hanging = Hanging(tmp_path / "store")
    serving = relay(hanging)
    write_run(run, *steps(0, 4))
    assert hanging.hangs.wait(20)
    serving.begin_finish("finished")
    assert not serving.join(0.05)
    serving.give_up("nobody waits")
    state = state_of(run, serving)
    assert (state.status, state.reason, state.owner) == ("remaining", "nobody waits", None)
    before = state_file(run, serving.plan.state.name).read_bytes()
    hanging.let_go.set()
    assert serving.join(20)
    assert state_file(run, serving.plan.state.name).read_bytes() == before
    assert hanging.status is None


def test_a_mirror_that_another_process_has_taken_over_is_left_to_it(
    run: Path, tmp_path: Path, relay: Any, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hung for so long that it looked dead."""
    hanging = Hanging(tmp_path / "store")
    serving = relay(hanging)
    write_run(run, *steps(0, 4))
    assert hanging.hangs.wait(20)
    monkeypatch.setattr(lease_module, "STALE", -1.0)
    file = state_file(run, serving.plan.state.name)
    raw = json.loads(file.read_text())
    raw["owner"]["token"] = "another"
    file.write_text(json.dumps(raw))
    hanging.let_go.set()
    assert serving.join(20)
    assert json.loads(file.read_text()) == raw
    assert kinds(said) == ["mirror_stopped"]
    assert "served by another process" in said[0][1]


def test_patience_ends(run: Path, tmp_path: Path, relay: Any) -> None:
    write_run(run, *steps(0, 2))
    serving = relay(Planned(tmp_path / "store", [Retry("down")] * 10_000), patience=0.2)
    assert serving.join(20)
    assert (state_of(run, serving).status, state_of(run, serving).reason) == ("remaining", "down")


@pytest.mark.parametrize("interrupted_at", [1, 3, 6])
def test_taken_up_again_the_curves_go_on_as_if_nothing_had_been(
    interrupted_at: int, run: Path, tmp_path: Path, relay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averages and choices are rebuilt from the record: the store is as after one uninterrupted delivery."""
    monkeypatch.setattr(tail_module, "CHUNK_ROWS", 5)
    selection = Selection(max_series=12)
    write_run(run, *steps(0, 12, rows=4))
    whole = JsonLines(tmp_path / "whole")
    finish(relay(whole, selection))
    cut = Planned(tmp_path / "cut", [None] * interrupted_at + [MirrorError("enough")])
    assert relay(cut, selection).join(30)
    assert 0 < len(lines(cut.path)) < len(lines(whole.path))
    finish(relay(Planned(tmp_path / "cut"), selection))
    assert Counter(lines(cut.path)) == Counter(lines(whole.path))
    assert any(name.endswith("/smoothed") for name, *_ in lines(cut.path))


def test_a_damaged_part_is_said_once_and_the_rest_arrives(run: Path, tmp_path: Path, relay: Any, said: Said) -> None:
    write_run(run, *steps(0, 4))
    (part,) = (run / "scalars" / "rank=0").glob("000000000002-*")
    part.write_bytes(part.read_bytes()[:-1])
    serving = relay(JsonLines(tmp_path / "store"))
    finish(serving)
    assert {step for _, step, _, _ in stored_scalars(tmp_path / "store")} == {0, 2, 3}
    ((kind, message, warn),) = said
    assert (kind, warn) == ("mirror_damaged_part", True)
    assert part.name in message
    state = state_of(run, serving)
    assert (state.counts.lost, state.status, state.cursor.scalars) == (2, "finished", 8)


def test_what_does_not_fit_the_budget_is_said_once(run: Path, tmp_path: Path, relay: Any, said: Said) -> None:
    serving = relay(JsonLines(tmp_path / "store"), Selection(max_series=10))
    write_run(run, *steps(0, 6, rows=40))
    finish(serving)
    ((kind, message, _),) = said
    assert kind == "mirror_left_out"
    assert "statsbridge show" in message


def test_alerts_figures_and_the_artifact(run: Path, tmp_path: Path, relay: Any) -> None:
    adapter = JsonLines(tmp_path / "store")
    event = {"time": 1.7e9, "severity": "critical", "message": "NaN"}
    write_run(
        run, *steps(0, 4), {"events": {**event, "kind": "nan"}}, {"events": {**event, "kind": "x", "severity": "info"}}
    )
    serving = relay(adapter, Selection(artifact=True))
    finish(serving)
    assert [event.kind for event in adapter.alerts] == ["nan"]
    assert {name for name, _ in adapter.figures} == {"heatmap/activation"}
    assert adapter.figures[-1][1] == 3
    assert adapter.artifacts == [{"run.json", "stats", "scalars", "events"}], "no mirrors, no writers"
    counts = state_of(run, serving).counts
    assert (counts.alerts, counts.figures, counts.artifacts) == (1, len(adapter.figures), 1)
    assert not list((run / "mirrors").glob("artifact-*"))


def test_a_refused_figure_costs_only_itself(run: Path, tmp_path: Path, relay: Any, said: Said) -> None:
    class Plain(JsonLines):
        backend = "plain"

        def figure(self, name: str, figure: Any, step: int) -> None:
            raise Reject("no pictures")

        def alert(self, event: Any) -> None:
            raise RuntimeError("a bug")

    write_run(run, *steps(0, 3), {"events": {"time": 1.0, "kind": "nan", "severity": "critical", "message": "m"}})
    serving = relay(Plain(tmp_path / "store"))
    finish(serving)
    assert stored_scalars(tmp_path / "store") == logged(run)
    assert set(kinds(said)) == {"mirror_rejected"}
    assert state_of(run, serving).status == "finished"


def test_a_tracker_run_that_cannot_be_ended(run: Path, tmp_path: Path, relay: Any, said: Said) -> None:
    class Stubborn(JsonLines):
        backend = "stubborn"

        def close(self, status: str) -> None:
            raise RuntimeError("will not end")

    write_run(run, *steps(0, 3))
    serving = relay(Stubborn(tmp_path / "store"))
    finish(serving)
    assert kinds(said) == ["mirror_stopped"]
    assert "all rows were delivered" in said[0][1]
    assert stored_scalars(tmp_path / "store") == logged(run)


def test_a_state_that_cannot_be_written_stops_no_delivery(
    run: Path, tmp_path: Path, relay: Any, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    from statsbridge.mirror import state as state_module

    adapter = JsonLines(tmp_path / "store")
    serving = relay(adapter)
    write = state_module.write_json
    full = threading.Event()

    def writing(path: Path, value: Any) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        write(path, value)

    monkeypatch.setattr(state_module, "write_json", writing)
    write_run(run, *steps(0, 2))
    eventually(lambda: len(lines(adapter.path)) > 0)
    full.set()
    serving.begin_finish("finished")
    eventually(lambda: "mirror_state" in kinds(said))
    full.clear()
    assert serving.join(20)
    assert stored_scalars(adapter.path) == logged(run)


def test_a_config_with_a_path_that_is_no_utf8(tmp_path: Path) -> None:
    """As a shell hands one over in an argument: no tracker takes it as it is, and all would stop for it."""
    config = {"data": ["/data/caf\udce9"], "\ud800": {"n": 1}}
    run = create_run(tmp_path / "runs", name="caf\udce9", config=config, information={})
    adapter = JsonLines(tmp_path / "store")
    info = new_plan(run, adapter, adapter.destination(), Selection(), load_policy()).info
    assert info.name == "caf\\udce9"
    assert info.config == {"data": ["/data/caf\\udce9"], "\\ud800": {"n": 1}}

"""The sampling of a run changes while it trains: at the next step, as asked, and back again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import Small, events, scalars

import statsbridge
from statsbridge import ConfigError, Sampling
from statsbridge.log.control import FILE, Control, Wish, ask, find_sites
from statsbridge.reporting import Reporter
from statsbridge.run.live import Live
from statsbridge.run.schedule import Schedule

Record = Callable[..., statsbridge.Run]

SITES = frozenset({"activation", "activation_grad", "parameter", "parameter_grad", "update"})


def train(run: statsbridge.Run, model: Small, steps: int, wishes: dict[int, Wish]) -> statsbridge.RunData:
    """Train; a wish of step n is left after that step, and has been seen before the next one ends."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    assert run.path is not None
    for step in range(steps):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
        if step in wishes:
            ask(run.path, wishes[step])
            assert run._writer.flush()
    run.finish()
    return statsbridge.load(run.path)


def sites(data: statsbridge.RunData) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for row in data.stats.select(["step", "site"]).to_pylist():
        found.setdefault(row["step"], set()).add(row["site"])
    return found


def test_more_densely_for_a_while_and_back(record: Record) -> None:
    model = Small()
    data = train(record(model, every=10), model, 31, {3: Wish(every=1, steps=4, asked_by="me@here")})
    # Asked after step 3, heard while step 4 was on its way, done from step 5 on.
    assert sorted(sites(data)) == [0, 5, 6, 7, 8, 10, 20, 30]
    told = [(event["step"], event["severity"], event["message"]) for event in events(data, "sampling_changed")]
    assert told == [
        (
            5,
            "info",
            "every step is sampled; for 4 steps, then as before (before: every 10 steps one is sampled); "
            "asked by me@here",
        ),
        (9, "info", "as before: every 10 steps one is sampled"),
    ]
    assert sorted(scalars(data.scalars, "loss")) == list(range(31)), "scalars go on at every step"


def test_sites_of_a_running_training(record: Record) -> None:
    model = Small()
    data = train(
        record(model, every=2),
        model,
        12,
        {2: Wish(sites=("activation", "update")), 6: Wish(every=3, sites=("parameter_grad",), steps=100)},
    )
    every_site = set(SITES)
    first = {0: every_site, 2: every_site, 4: {"activation", "update"}, 6: {"activation", "update"}}
    assert sites(data) == {**first, 9: {"parameter_grad"}}
    ratios = data.series("first", "update", "update_ratio", tensor="weight")
    assert ratios["step"].to_pylist() == [0, 2, 4, 6], "an update's ratio needs no row of its parameter"
    assert all(value > 0 for value in ratios["value"].to_pylist())


def test_stop_and_go_on(record: Record) -> None:
    model = Small()
    data = train(record(model, every=1), model, 12, {2: Wish(stop=True), 6: Wish(every=2)})
    assert sorted(sites(data)) == [0, 1, 2, 3, 8, 10]
    assert sorted(scalars(data.scalars, "loss")) == list(range(12))


def test_a_wish_from_before_the_process_is_not_for_it(record: Record, tmp_path: Path) -> None:
    model = Small()
    first = record(model, every=1)
    assert first.path is not None
    train(first, model, 3, {2: Wish(stop=True)})
    again = record(model, every=1, resume=first.path, start_step=3)
    data = train(again, model, 2, {})
    assert sorted(sites(data)) == [0, 1, 2, 3, 4]


def test_what_cannot_be_understood_changes_nothing(record: Record) -> None:
    model = Small()
    run = record(model, every=3)
    assert run.path is not None
    broken = ["{", "[]", '{"every": 0}', '{"every": true}', '{"sites": ["no"]}', '{"stop": 1}', "{}", " " * 100_000]
    broken += ["[" * 20_000]  # deeper than a parser goes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for text in broken:
        (run.path / FILE).write_text(text)
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
        assert run._writer.flush()
    run.finish()
    data = statsbridge.load(run.path)
    assert sorted(sites(data)) == [0, 3, 6]
    refused = events(data, "sampling_refused")
    assert len(refused) == len(broken)
    assert "at least 1" in refused[2]["message"]
    assert "activation_grad" in refused[4]["message"], "it says which sites there are"


def test_processes_that_train_together_refuse(tmp_path: Path) -> None:
    rows: list[Any] = []
    (tmp_path / "run").mkdir()
    reporter = Reporter(lambda work: rows.append(work()))
    live = Live(tmp_path / "run", reporter, None, Control(tmp_path / "run"), several=True)
    ask(tmp_path / "run", Wish(every=1, asked_by="me@here"))
    assert live.follow({}) == {}
    assert not live.orders
    (event,) = (row["events"] for row in rows)
    assert event["kind"] == ["sampling_refused"]
    assert "at the same step" in event["message"][0]
    assert "me@here" in event["message"][0]


def test_a_schedule_bursts_once_at_a_time() -> None:
    schedule = Schedule(Sampling(every=10, burst=3), SITES)
    assert [n for n in range(21) if schedule.sampled(n)] == [0, 10, 20]
    assert schedule.burst(9) == 3
    assert schedule.burst(10) == 0, "one is under way"
    assert [n for n in range(9, 21) if schedule.sampled(n)] == [9, 10, 11, 20]
    assert schedule.burst(12) == 3
    schedule.grant(Wish(stop=True), 13)
    assert not any(schedule.sampled(n) for n in range(13, 31)), "who says stop means it"
    assert schedule.burst(14) == 0


def test_a_wish_within_the_time_of_another() -> None:
    """The later one counts, and what both go back to is what held before them."""
    schedule = Schedule(Sampling(every=10), SITES)
    schedule.grant(Wish(every=1, steps=5), 3)
    schedule.grant(Wish(every=2, steps=6), 4)
    assert [n for n in range(4, 10) if schedule.sampled(n)] == [4, 6, 8]
    assert not schedule.go_back(9)
    assert schedule.go_back(10)
    assert schedule.now.sampling.every == 10
    schedule.grant(Wish(every=1, steps=5), 12)
    schedule.grant(Wish(every=4), 13)
    assert not schedule.go_back(100), "for good ends the one for a while"
    assert schedule.now.sampling.every == 4


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({}, "give every"),
        ({"steps": 5}, "for 5 steps, but what"),
        ({"every": 0}, "at least 1"),
        ({"every": 1.5}, "at least 1"),
        ({"every": 1, "steps": 0}, "at least 1"),
        ({"sites": ()}, "activation"),
        ({"sites": ("weights",)}, "'weights' is none of"),
        ({"stop": True, "every": 3}, "neither"),
    ],
)
def test_wishes_that_make_no_sense(wish: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Wish(**wish)


def test_a_wish_comes_back_from_disk_as_it_was(tmp_path: Path) -> None:
    control = Control(tmp_path)
    assert control.look() is None
    wish = Wish(every=3, steps=10, sites=("activation", "update"), asked_by='"a"\n@b')
    ask(tmp_path, wish)
    assert control.look() == wish
    assert control.look() is None, "once"
    ask(tmp_path, wish)
    assert control.look() == wish, "asked again"
    (tmp_path / FILE).unlink()
    assert control.look() is None
    assert json.loads(json.dumps(find_sites("act*, update"))) == ["activation", "activation_grad", "update"]

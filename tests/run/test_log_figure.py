"""`run.log_figure`: in the run's folder first, then in the trackers that the policy lets have it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from mirror_helpers import JsonLines
from recording import events
from torch import nn

import statsbridge
from statsbridge import LogError, Selection, StatsBridgeWarning
from statsbridge.log import files
from statsbridge.log import writer as writer_module
from statsbridge.log.figures import stored_figures
from statsbridge.run import figures as run_figures

Record = Callable[..., statsbridge.Run]


POLICY = """
applies_to = "all"
{rule}

[[destinations]]
backend = "lines"
path = "{store}"
channels = ["metrics", "alerts", "figures"]
"""


class Shown(JsonLines):
    """Keeps what it is shown."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.shown: list[tuple[str, Any, int]] = []

    def figure(self, name: str, figure: Any, step: int) -> None:
        self.shown.append((name, figure, step))


def curve(title: str, *values: float) -> go.Figure:
    return go.Figure(go.Scatter(y=list(values)), layout={"title": {"text": title}})


def steps(run: statsbridge.Run, count: int) -> None:
    for _ in range(count):
        run.step(loss=1.0)


def test_it_is_stored_as_it_was_and_told_of(record: Record) -> None:
    run = record(nn.Linear(2, 2), every=100, start_step=5)
    steps(run, 2)
    name = "../../etc/<b>name</b>\n\x1b[2J"
    figure = curve("first", 1.0, float("nan"), 3.0)
    run.log_figure(name, figure)
    figure.update_layout(title="changed later")
    steps(run, 1)
    run.log_figure("second", curve("second", 4.0))
    run.finish()
    data = statsbridge.load(run.path)
    first, second = stored_figures(data.path, data.events)
    assert (first.name, first.step) == (name, 6)
    assert (second.name, second.step) == ("second", 7)
    assert first.file.parent == data.path / "figures" / "rank=0"
    assert go.Figure(first.read()).layout.title.text == "first"
    assert list(go.Figure(first.read()).data[0].y)[::2] == [1.0, 3.0]
    assert json.loads(go.Figure(second.read()).to_json()) == json.loads(curve("second", 4.0).to_json())
    assert [event["severity"] for event in events(data, "figure")] == ["info", "info"]


def test_what_is_no_plotly_figure_is_refused_with_what_to_do(record: Record) -> None:
    class Figure:  # as Matplotlib's
        def savefig(self, file: str) -> None:
            raise AssertionError

    run = record(nn.Linear(2, 2), every=100)
    for wrong in (Figure(), None, {"data": []}, "figure"):
        with pytest.warns(StatsBridgeWarning, match="is no Plotly figure"):
            run.log_figure(f"wrong {wrong!r:.9}", wrong)
    run.finish()
    data = statsbridge.load(run.path)
    assert {event["kind"] for event in data.events.to_pylist()} == {"bad_figure"}
    assert not (data.path / "figures").exists()


def test_a_figure_that_is_a_data_set_is_refused(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_figures, "LARGEST", 1000)
    run = record(nn.Linear(2, 2), every=100)
    with pytest.warns(StatsBridgeWarning, match="Draw fewer points"):
        run.log_figure("large", curve("large", *range(2000)))
    run.finish()
    assert [event["kind"] for event in statsbridge.load(run.path).events.to_pylist()] == ["figure_too_large"]


def test_it_never_raises(record: Record) -> None:
    class Broken(go.Figure):
        def to_json(self, *_: Any, **__: Any) -> str:
            raise RuntimeError("planted")

    Broken.__module__ = "plotly.graph_objs"
    run = record(nn.Linear(2, 2), every=100)
    with pytest.warns(StatsBridgeWarning, match="planted"):
        run.log_figure("broken", Broken())
    run.finish()
    run.log_figure("too late", curve("late", 1.0))
    assert [event["kind"] for event in statsbridge.load(run.path).events.to_pylist()] == ["internal_error"]


def test_a_disk_that_refuses_it(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(nn.Linear(2, 2), every=100)
    original = files.write_durably

    def refuses(path: Path, data: bytes) -> None:
        if path.suffix == ".json" and "figures" in path.parts:
            raise OSError(28, "No space left on device")
        original(path, data)

    monkeypatch.setattr("statsbridge.log.figures.write_durably", refuses)
    with pytest.warns(StatsBridgeWarning, match="could not be written"):
        run.log_figure("lost", curve("lost", 1.0))
        assert run._writer.flush()
    monkeypatch.setattr("statsbridge.log.figures.write_durably", original)
    run.log_figure("kept", curve("kept", 1.0))
    run.finish()
    data = statsbridge.load(run.path)
    assert [one.name for one in stored_figures(data.path, data.events)] == ["kept"]
    assert [event["kind"] for event in data.events.to_pylist()] == ["figure_lost", "figure"]


def test_a_disk_that_hangs_costs_the_figure_and_it_is_said(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "QUEUE_ROWS", 5)
    run = record(nn.Linear(2, 2))
    taken, released = threading.Event(), threading.Event()

    def hang() -> dict[str, Any]:
        taken.set()
        released.wait(30)
        return {}

    assert run._writer.submit(hang, urgent=True)
    assert taken.wait(30)
    assert run._writer.submit(dict)
    with pytest.warns(StatsBridgeWarning, match=r"log_figure\('late'\): too much waits") as warned:
        run.log_figure("late", go.Figure())
    released.set()
    with pytest.warns(StatsBridgeWarning, match="not recorded: steps came faster"):
        run.finish()
    assert len(warned) == 1
    assert not list(Path(str(run.path)).glob("figures/*/*.json"))


def test_a_resumed_run_overwrites_no_figure(record: Record) -> None:
    first = record(nn.Linear(2, 2), every=100)
    steps(first, 3)
    first.log_figure("a", curve("a", 1.0))
    first.finish()
    again = record(nn.Linear(2, 2), every=100, resume=first.path, start_step=2)
    steps(again, 1)
    again.log_figure("a", curve("b", 1.0))
    again.finish()
    every = statsbridge.load(first.path, attempts="all")
    titles = [go.Figure(one.read()).layout.title.text for one in stored_figures(every.path, every.events)]
    assert titles == ["a", "b"]
    effective = statsbridge.load(first.path)
    assert [one.step for one in stored_figures(effective.path, effective.events)] == [2]


def test_trackers_are_shown_it(record: Record, tmp_path: Path) -> None:
    mirror = Shown(tmp_path / "store")
    run = record(nn.Linear(2, 2), every=1, backend=mirror, flush_interval=0.05)
    steps(run, 2)
    for name in ("mine", "heatmap/activation", "~odd"):
        run.log_figure(name, curve(name, 1.0, 2.0))
    run.finish()
    shown = [(name, figure.layout.title.text, step) for name, figure, step in mirror.shown if "heatmap/p" not in name]
    assert shown == [
        ("mine", "mine", 1),
        ("~heatmap/activation", "heatmap/activation", 1),
        ("~~odd", "~odd", 1),
    ], "none takes the place of one of ours, or of another"
    assert not mirror.alerts


def test_it_is_in_the_artifact_and_left_out_where_figures_are_not_wanted(record: Record, tmp_path: Path) -> None:
    mirror = Shown(tmp_path / "store")
    run = record(nn.Linear(2, 2), every=100, backend=mirror, mirror=Selection(figures=False, artifact=True))
    steps(run, 2)
    run.log_figure("mine", curve("mine", 1.0))
    run.finish()
    assert mirror.shown == []
    assert "figures" in mirror.artifacts[0]


@pytest.mark.parametrize("rule", ['names = "hashed"', 'scalars = ["loss"]', 'statistics = ["std"]'])
def test_it_stays_where_nobody_could_look_into_it(
    rule: str, record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture could show the names or numbers that may not leave."""
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(store=tmp_path / "store", rule=rule))
    monkeypatch.setenv("STATSBRIDGE_POLICY", str(policy))
    mirror = Shown(tmp_path / "store")
    with pytest.warns(StatsBridgeWarning, match="figures of your own stay here"):
        run = record(nn.Linear(2, 2), every=100, backend=mirror, flush_interval=0.05)
        steps(run, 2)
        run.log_figure("secret", curve("secret", 1.0))
        steps(run, 1)
        run.finish()
    assert not [name for name, *_ in mirror.shown if "heatmap" not in name]
    assert stored_figures(run.path, statsbridge.load(run.path).events)[0].name == "secret"
    assert not any(b"secret" in file.read_bytes() for file in (run.path / "mirrors").rglob("*") if file.is_file())
    assert b"secret" not in (tmp_path / "store").read_bytes()


def test_a_figure_whose_file_is_gone_is_said(record: Record, tmp_path: Path) -> None:
    run = record(nn.Linear(2, 2), every=100)
    steps(run, 2)
    run.log_figure("gone", curve("gone", 1.0))
    run.log_figure("damaged", curve("damaged", 1.0))
    run.finish()
    gone, damaged = stored_figures(run.path, statsbridge.load(run.path).events)
    gone.file.unlink()
    damaged.file.write_text("[1")
    for one in (gone, damaged):
        with pytest.raises(LogError, match="cannot be read"):
            one.read()

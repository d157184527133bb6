"""The size of a record: measured, told, and limited; training never notices."""

from pathlib import Path

import pytest
import torch
from log_rows import new_run, scalar_rows, stats_rows, written
from torch import nn
from typer.testing import CliRunner

import statsbridge
from statsbridge import ConfigError, StatsBridgeWarning
from statsbridge.cli import app
from statsbridge.log import Writer, load
from statsbridge.log.compaction import compact_table
from statsbridge.log.size import growth


def on_disk(run: Path) -> int:
    return sum(file.stat().st_size for file in run.rglob("*.parquet"))


def test_growth_is_bytes_over_the_time_of_each_attempt(tmp_path: Path):
    data = written(tmp_path, {"scalars": scalar_rows(0, loss=1.0)}, {"scalars": scalar_rows(30, loss=1.0)})
    with_pause = Writer(data.path, attempt=1)
    for step in (10_000, 10_010):  # resumed hours later: the pause is no training
        with_pause.submit(lambda step=step: {"scalars": scalar_rows(step, loss=1.0)})
    assert with_pause.close()
    grown = growth(load(data.path))
    assert grown.seconds == 40.0
    assert grown.bytes == on_disk(data.path)
    assert grown.bytes_a_day == on_disk(data.path) * 86400 / 40


def test_one_step_is_no_rate(tmp_path: Path):
    assert growth(written(tmp_path, {"scalars": scalar_rows(0, loss=1.0)})).bytes_a_day is None


def test_show_and_doctor_say_it(tmp_path: Path):
    works = [{"stats": stats_rows(step), "scalars": scalar_rows(step, loss=1.0)} for step in (0, 3600)]
    data = written(tmp_path, *works)
    a_day = on_disk(data.path) * 24 / 1000
    for command in (["show", "latest"], ["doctor"]):
        shown = CliRunner().invoke(app, [*command, "--dir", str(tmp_path)]).output
        assert f"{a_day:.3g} kB a day" in " ".join(shown.split())


def test_a_writer_is_full_once_its_parts_are_and_not_by_those_that_were_merged(tmp_path: Path):
    run = new_run(tmp_path)
    writer = Writer(run, flush_interval=3600, max_bytes=10**9)
    for step in range(20):
        writer.submit(lambda step=step: {"stats": stats_rows(step)})
        assert writer.flush()
    writer.close()
    assert not writer.full
    apart = on_disk(run)
    compact_table(run, "stats", 0, fan_in=2)
    together = on_disk(run)
    assert together < apart / 2

    again = Writer(run, attempt=1, flush_interval=3600, max_bytes=together + 1)
    assert not again.full
    again.submit(lambda: {"scalars": scalar_rows(0, loss=1.0)})
    assert again.flush()
    assert again.full
    again.close()


def train(run: statsbridge.Run, model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = model(torch.full((2, 3), float(step))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
        run._writer.flush()


def test_max_bytes_ends_the_statistics_and_not_the_scalars(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    run = statsbridge.init(model, dir=tmp_path, every=1, max_bytes=1e5, alerts=False)
    with pytest.warns(StatsBridgeWarning, match="max_bytes") as warned:
        train(run, model, 25)
        run.finish()
    assert len(warned) == 1
    data = load(run.path)
    sampled = data.stats["step"].unique().to_pylist()
    assert sampled == list(range(len(sampled)))
    assert 2 < len(sampled) < 25
    losses = [row for row in data.scalars.to_pylist() if row["name"] == "loss"]
    assert [row["step"] for row in losses] == list(range(25))
    events = data.events.to_pylist()
    assert [(event["kind"], event["step"]) for event in events] == [("record_full", len(sampled))]


@pytest.mark.parametrize("wrong", [0, -1, True, "1 GB", float("inf"), float("nan")])
def test_max_bytes_is_a_number_above_0(tmp_path: Path, wrong: object):
    with pytest.raises(ConfigError, match="max_bytes"):
        statsbridge.init(nn.Linear(1, 1), dir=tmp_path, max_bytes=wrong)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []

"""The whole way: `statsbridge.init(backend="aim")`, training, `finish`, `verify`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import aim
import pytest
import torch
from torch import nn

import statsbridge
from statsbridge.mirror.verify import verify


def train(tmp_path: Path, steps: int = 20, **options: object) -> statsbridge.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    backend = f"aim:{tmp_path / 'repository'}"
    run = statsbridge.init(model, backend=backend, every=5, dir=tmp_path / "runs", name="trained", **options)
    for _ in range(steps):
        loss = model(torch.randn(32, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
    run.finish()
    return run


def test_what_aim_shows_is_what_was_recorded(tmp_path: Path) -> None:
    run = train(tmp_path, histograms=True, config={"lr": 0.01})
    (told,) = verify(run.path, "aim")
    assert told.proved
    assert told.same > 100

    (mirrored,) = aim.Repo(str(tmp_path / "repository")).query_runs("run.name == 'trained'", report_mode=0).iter_runs()
    shown = mirrored.run
    recorded = statsbridge.load(run.path)
    context = {"module": "1", "type": "ReLU", "site": "activation", "depth": 2}
    for statistic in ("std", "zero_fraction"):
        steps, (values, *_) = shown.get_metric(
            f"activation/{statistic}", aim.storage.context.Context(context)
        ).data.items_list()
        expected = recorded.series("1", "activation", statistic)
        assert steps == expected["step"].to_pylist() == [0, 5, 10, 15]
        assert values == expected["value"].to_pylist()
    assert shown["hparams", "lr"] == 0.01
    figures = list(shown.iter_sequence_info_by_type("aim.figure"))
    assert figures
    distributions = [
        (name, context.to_dict()) for name, context, _ in shown.iter_sequence_info_by_type("aim.distribution")
    ]
    assert ("activation/histogram", context | {"kind": "histogram"}) in distributions


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "aim_local.py"
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = (tmp_path / "statsbridge-runs").iterdir()
    (told,) = verify(path, "aim")
    assert told.proved
    recorded = statsbridge.load(path).series("1", "activation", "std").to_pylist()
    assert len(recorded) == 6
    lines = [f"  step {row['step']:3d}  {row['value']:.4f}" for row in recorded]
    assert "\n".join(["activation/std of 1 (Tanh):", *lines]) in done.stdout
    names = {run.run.name for run in aim.Repo(str(tmp_path)).query_runs("", report_mode=0).iter_runs()}
    assert "aim local" in names

"""Rules on what was sampled sparsely, and on what is small, idle or held by nobody on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from log_rows import new_run, stats_rows, write_run
from torch import nn
from torch.nn import functional
from zoo_helpers import Training, mlp, record, regression, supervised, vectors

import statsbridge
from statsbridge.analyze.diagnosis import diagnose
from statsbridge.analyze.findings import Finding
from statsbridge.analyze.watch import Watch
from statsbridge.collect.histogram import histogram_of
from statsbridge.log.schema import to_table

STEPS = (0, 5, 10, 30)


def watched(*rows: dict[str, Any]) -> dict[str, Finding]:
    watch = Watch()
    watch.add({"stats": pa.concat_tables([to_table("stats", one) for one in rows])})
    return {finding.kind: finding for finding in watch.findings()}


def weights(*norms: float, count: int = 100) -> list[dict[str, Any]]:
    """A weight of these norms at `STEPS`, and one that stays as it is."""
    about = {"site": "parameter", "tensor": "weight", "count": count, "zero_fraction": 0.0}
    return [stats_rows(step, 2, **about, l2=[norm, 1.0]) for step, norm in zip(STEPS, norms, strict=False)]


def found_in(training: Training, folder: Path, **settings: Any) -> list[Finding]:
    torch.manual_seed(0)
    return diagnose(statsbridge.load(record(training, folder, **{"steps": 12} | settings)))


# ---------------------------------------------------------------------- between two sampled steps


def test_what_a_weight_grew_by_says_how_large_its_updates_were_at_least() -> None:
    found = watched(*weights(1.0, 1.1, 1.1 * 1.5**5, 8.0))
    assert list(found) == ["update_too_large"]
    finding = found["update_too_large"]
    assert (finding.module, finding.tensor, finding.step, finding.severity) == ("m0", "weight", 5, "warning")
    assert finding.value == pytest.approx(0.5)
    assert "7.59 times as large in 5 steps" in finding.message


@pytest.mark.parametrize(
    ("norms", "count"),
    [
        ((1.0, 3.5, 6.0, 1000.0), 100),  # by 0.28, 0.11 and 0.29 a step
        ((0.0, 3.0, 9.0, 9.0), 100),  # from 0
        ((0.001, 0.02, 0.1, 0.3), 100),  # so small that it may
        ((8.0, 4.0, 1.0, 0.1), 100),
    ],
)
def test_growth_that_is_no_fault(norms: tuple[float, ...], count: int) -> None:
    assert watched(*weights(*norms, count=count)) == {}


def test_growth_against_a_good_run_is_judged_all_the_same(tmp_path: Path) -> None:
    def run(folder: str, *norms: float) -> statsbridge.RunData:
        path = new_run(tmp_path / folder)
        steps = range(0, 5 * len(norms), 5)
        about = {"site": "parameter", "tensor": "weight", "count": 100, "zero_fraction": 0.0}
        write_run(
            path, *({"stats": stats_rows(step, 1, **about, l2=[one])} for step, one in zip(steps, norms, strict=True))
        )
        return statsbridge.load(path)

    good = statsbridge.baseline(run("good", 1, 1, 1, 1, 1))
    kinds = [one.kind for one in diagnose(run("bad", 1, 1, 9, 9, 9, 9, 9, 9), baseline=good)]
    assert set(kinds) == {"update_too_large", "outside_baseline"}


def test_a_line_search_may_leap_and_a_learning_rate_may_not(tmp_path: Path) -> None:
    inputs, targets = next(regression(batch=128))

    def leaping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        return Training(model, lambda number: {"loss": optimizer.step(closure)})  # type: ignore[arg-type]

    torch.manual_seed(0)
    model = mlp(16, 32, 1, activation=nn.Tanh)
    search = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    run = record(leaping(model, search), tmp_path, steps=12)
    data = statsbridge.load(run)
    assert np.nanmax(data.stats["update_ratio"].to_numpy()) > 1
    assert diagnose(data) == []
    for kind, rate in ((torch.optim.SGD, 30.0), (torch.optim.Adam, 1.0)):
        model = mlp(16, 32, 1, activation=nn.Tanh)
        found = found_in(leaping(model, kind(model.parameters(), lr=rate)), tmp_path / kind.__name__, steps=1)
        assert [one.kind for one in found] == ["update_too_large"]


# ---------------------------------------------------------------------- what gets nothing on purpose


class Routed(nn.Module):
    """Its second expert gets samples in the first steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        out = self.experts[0](x)
        return out + self.experts[1](x) if self.steps < 5 else out


def test_a_module_that_rests_is_told_and_no_more(tmp_path: Path) -> None:
    found = found_in(supervised(Routed(), vectors()), tmp_path, steps=24)
    assert [(one.kind, one.severity, one.module) for one in found] == [("unused_module", "info", "experts.1")]


class Heads(nn.Module):
    """Two heads, of which one counts for nothing; its outputs are below 0 where `shift` is."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.body, self.head, self.idle = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 1)
        with torch.no_grad():
            self.idle.bias.fill_(shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden) + 0 * self.idle(hidden)


def test_only_what_is_below_zero_everywhere_looks_dead(tmp_path: Path) -> None:
    kinds = {shift: [one.kind for one in found_in(supervised(Heads(shift), vectors()), tmp_path)] for shift in (0, -9)}
    assert "zero_gradient" in kinds[0]
    assert "dead_units" not in kinds[0]
    assert kinds[-9][0] == "dead_units"


def test_a_dead_function_says_how_far_below_zero(tmp_path: Path) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 4, 3), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(x)).mean((2, 3)))

    torch.manual_seed(0)
    model = Functional()
    with torch.no_grad():
        model.first.bias.fill_(-50.0)
    images = [(torch.randn(8, 1, 6, 6), torch.arange(8) % 4)] * 12
    found = found_in(supervised(model, images), tmp_path)[0]
    highest = float(model.first(images[0][0]).max())
    assert (found.kind, found.module, found.value, found.severity) == ("dead_units", "first", 1.0, "critical")
    assert f"below 0 everywhere (at most {highest:.3g})" in found.message


# ---------------------------------------------------------------------- float16


def test_what_float16_cut_off_is_seen_at_parameters_and_in_optimizers_too() -> None:
    generator = np.random.default_rng(8)
    fine = generator.normal(size=5000) * 2e-7
    cut = fine.astype(np.float16).astype(np.float64)
    # The same small numbers everywhere, as behind a mean: no distribution, and none that is cut off.
    coarse = np.repeat(np.where(generator.random(5) < 0.5, 0, 1e-7), 5)

    def rows(site: str, values: np.ndarray) -> list[dict[str, Any]]:
        about = {"site": site, "tensor": "weight", "zero_fraction": float((values == 0).mean())}
        return [stats_rows(step, 1, **about, l2=[1.0], histogram=[histogram_of(values).tolist()]) for step in range(6)]

    for site in ("activation_grad", "parameter_grad", "optimizer_state"):
        assert "underflow" in watched(*rows(site, cut)), site
        assert "underflow" not in watched(*rows(site, fine)), site
        assert "underflow" not in watched(*rows(site, coarse)), site
    assert "underflow" not in watched(*rows("activation", cut)), "attention has such numbers"

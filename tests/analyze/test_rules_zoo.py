"""Healthy trainings raise nothing; of broken ones the planted fault is the first finding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo_broken_helpers import BROKEN
from zoo_healthy_helpers import HEALTHY
from zoo_helpers import record

import statsbridge
from statsbridge.analyze.diagnosis import diagnose
from statsbridge.analyze.rules.words import WORDS

#: What is tried in each fast run: of every kind of fault one, and the kinds of network that differ most.
FAST_HEALTHY = (
    "MLP", "CNN with BatchNorm", "GAN", "sparse ReLU network", "fine-tuning a frozen backbone", "vision transformer",
    "low-rank adapters",
)  # fmt: skip
_FIRST_OF_A_KIND = {broken.kind: name for name, broken in reversed(BROKEN.items())}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def some_slow(names: Any, fast: Any) -> list[Any]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def silent(run: Path) -> None:
    data = statsbridge.load(run)
    assert [str(finding) for finding in diagnose(data) if finding.severity != "info"] == []
    live = [event for event in data.events.to_pylist() if event["severity"] != "info"]
    assert live == []


@pytest.mark.parametrize("name", some_slow(HEALTHY, FAST_HEALTHY))
def test_a_healthy_training_raises_nothing(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    silent(record(HEALTHY[name](), tmp_path, steps=30))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("every", "steps"), [(1, 20), (10, 100), (5, 400), (1, 120)])
@pytest.mark.parametrize("name", HEALTHY)
def test_nor_does_it_sampled_otherwise_from_another_start(
    name: str, every: int, steps: int, seed: int, tmp_path: Path
) -> None:
    torch.manual_seed(seed)
    silent(record(HEALTHY[name](), tmp_path, every=every, steps=steps))


@pytest.mark.parametrize("name", some_slow(BROKEN, _FIRST_OF_A_KIND.values()))
def test_the_planted_fault_is_the_first_finding_in_its_module(name: str, tmp_path: Path) -> None:
    broken = BROKEN[name]
    torch.manual_seed(0)
    run = record(broken.make(), tmp_path, steps=broken.steps, **broken.settings)
    good = None
    if broken.good is not None:
        torch.manual_seed(0)
        good = statsbridge.baseline(statsbridge.load(record(broken.good(), tmp_path / "good", steps=broken.steps)))
    first = diagnose(statsbridge.load(run), thresholds=broken.thresholds, baseline=good)[0]
    assert (first.kind, first.module) == (broken.kind, broken.module)
    assert first.severity in broken.severities
    assert first.causes
    assert first.suggestions


def test_every_kind_that_has_words_is_planted_somewhere() -> None:
    assert set(WORDS) == {broken.kind for broken in BROKEN.values()}

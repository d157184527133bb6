"""Facts that statistics cannot show: each planted in a training by hand, and silence where nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recording import Small, events, rows
from torch import nn
from torch.nn import functional

import statsbridge
from statsbridge.collect import module_facts, statistics

Record = Callable[..., statsbridge.Run]

FACTS = (
    "module_eval",
    "no_optimizer",
    "parameter_replaced",
    "running_statistics_unchanged",
    "identical_outputs",
)


class Normed(nn.Module):
    """What has every kind of module that facts are about."""

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16, momentum=momentum)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(0.2)
        self.second = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(self.relu(self.norm(self.first(x)))))


def train(
    run: statsbridge.Run,
    model: nn.Module,
    steps: int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    before: Callable[[int], Any] = lambda step: None,
) -> list[tuple[Any, ...]]:
    """Train on random numbers; the facts of the run as (step, kind, module, tensor)."""
    torch.manual_seed(1)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        before(step)
        loss = model(torch.randn(6, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
    run.finish()
    return facts(run)


def facts(run: statsbridge.Run) -> list[tuple[Any, ...]]:
    told = [event for event in statsbridge.load(run.path).events.to_pylist() if event["kind"] in FACTS]
    assert all(event["severity"] == "info" and event["message"] for event in told)
    return [(event["step"], event["kind"], event["module"], event["tensor"]) for event in told]


def test_a_sound_training_tells_nothing(record: Record) -> None:
    model = Normed()
    assert train(record(model, alerts=False), model, 12) == []


def test_a_module_in_eval_mode_is_told_once_and_again_when_it_comes_back(record: Record) -> None:
    model = Normed()

    def before(step: int) -> None:
        model.train()
        if step in (2, 3, 4, 7):
            model.norm.eval()
        if step >= 5:
            model.dropout.eval()

    assert train(record(model, alerts=False), model, 9, before=before) == [
        (2, "module_eval", "norm", None),
        (5, "module_eval", "dropout", None),
        (7, "module_eval", "norm", None),
    ]


def test_what_eval_mode_does_not_change_is_no_fact(record: Record) -> None:
    """A dropout that drops nothing, normalisation without running statistics, and a model in eval mode on purpose."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.0), nn.BatchNorm1d(4, track_running_stats=False), nn.ReLU())
    for module in model:
        module.eval()
    assert train(record(model, alerts=False), model, 3) == []
    whole = Normed()
    assert train(record(whole, eval=True, alerts=False), whole, 3, before=lambda step: whole.eval()) == []


def test_every_kind_of_dropout_is_one(record: Record) -> None:
    class DropPath(nn.Module):
        drop_prob = 0.1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.path = DropPath()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
            self.lstm = nn.LSTM(8, 4, num_layers=2, dropout=0.3, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.path(x).unsqueeze(1)
            return self.lstm(self.attention(x, x, x)[0])[0]

    model = Attends()
    for module in model.children():
        module.eval()
    found = train(record(model, alerts=False), model, 2)
    assert found == [(0, "module_eval", name, None) for name in ("path", "attention", "lstm")]


def test_running_statistics_that_never_change(record: Record) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=0.0), nn.Linear(4, 4), nn.BatchNorm1d(4))
    run = record(model, alerts=False)
    assert train(run, model, 8) == [(2, "running_statistics_unchanged", "1", None)]


@pytest.mark.parametrize("since", [0, 4])
def test_running_statistics_that_have_become_nan_are_not_told_again(record: Record, since: int) -> None:
    model = Normed()

    def spoil(step: int) -> None:
        if step == since:
            nn.init.constant_(model.first.weight, torch.nan)

    assert train(record(model, alerts=False), model, since + 6, before=spoil) == []


def test_frozen_normalisation_in_eval_mode_is_only_in_eval_mode(record: Record) -> None:
    model = Normed()
    model.norm.eval().requires_grad_(False)
    run = record(model, alerts=False)
    assert train(run, model, 6) == [(0, "module_eval", "norm", None)]
    assert "not trained either" in events(statsbridge.load(run.path), "module_eval")[0]["message"]


def test_statistics_that_differ_in_one_bit_have_changed(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Normed(momentum=0.0)

    def nudge(step: int) -> None:
        value = model.norm.running_mean[3]
        model.norm.running_mean[3] = torch.nextafter(value, value + 1) if step else value

    assert train(record(model, alerts=False), model, 6, before=nudge) == []


def test_a_parameter_with_a_gradient_that_no_optimizer_holds(record: Record) -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    found = train(record(model, every=2, alerts=False), model, 14, optimizer=optimizer)
    # After eight steps of some optimizer: of two that take turns each would have been seen by then.
    assert found == [(8, "no_optimizer", "second", "weight"), (8, "no_optimizer", "second", "bias")]


def test_frozen_and_unused_parameters_need_no_optimizer(record: Record) -> None:
    class Unused(Small):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

    model = Unused()
    model.second.requires_grad_(False)
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    assert train(record(model, alerts=False), model, 12, optimizer=optimizer) == []


def test_a_generator_that_steps_each_fifth_time_has_an_optimizer(record: Record) -> None:
    """Its parameters get gradients in the critic's steps too, where the user does not detach them."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 8), nn.Linear(8, 1)
    run = record({"generator": generator, "critic": critic}, alerts=False)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for step in range(15):
        fake = generator(torch.randn(6, 2))
        loss = critic(fake).mean() - critic(torch.randn(6, 8)).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        if step % 5 == 4:
            of_generator.zero_grad()
            (-critic(generator(torch.randn(6, 2))).mean()).backward()
            of_generator.step()
        run.step(loss=loss)
    run.finish()
    assert facts(run) == []


def test_a_layer_replaced_under_the_optimizers_feet(record: Record) -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def before(step: int) -> None:
        if step == 4:
            model.second = nn.Linear(16, 3)

    found = train(record(model, every=2, alerts=False), model, 30, optimizer=optimizer, before=before)
    # Replaced says it all: that the new ones have no optimizer follows from it.
    assert found == [(4, "parameter_replaced", "second", "weight"), (4, "parameter_replaced", "second", "bias")]


def test_a_layer_replaced_together_with_the_optimizer(record: Record) -> None:
    model = Small()
    torch.manual_seed(1)
    old = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(model, alerts=False)
    for step in range(14):
        if step == 4:
            model.second = nn.Linear(16, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.randn(6, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
    run.finish()
    assert old is not optimizer, "it lives on, as in a learning rate scheduler"
    assert facts(run) == []


@pytest.mark.parametrize("held", [True, False])
def test_a_parameter_made_anew_at_each_forward(held: bool, record: Record) -> None:
    class Renewed(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.second.weight = nn.Parameter(self.second.weight.detach() * 1.0)
            return super().forward(x)

    model = Renewed()
    parameters = model.parameters() if held else [*model.first.parameters(), model.second.bias]
    found = train(record(model, alerts=False), model, 6, optimizer=torch.optim.SGD(parameters, lr=0.1))
    # Where the optimizer has the first one it is plain at once, else when it has happened again and again.
    assert found == [(0 if held else 2, "parameter_replaced", "second", "weight")]


class Dead(nn.Module):
    """A hidden layer all of whose units are dead, and beside it what puts out the same for all by design."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.relu = nn.ReLU()
        self.positions = nn.Embedding(6, 4)
        self.learned = Learned()
        self.head = nn.Linear(4, 3)
        nn.init.constant_(self.first.bias, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same = torch.zeros(len(x), dtype=torch.long)
        return self.head(self.relu(self.first(x)) + self.positions(same) + self.learned(x))


class Learned(nn.Module):
    """A parameter for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value.expand(len(x), -1)


def test_outputs_that_are_the_same_for_every_sample(record: Record) -> None:
    model = Dead(bias=-50.0)
    run = record(model, alerts=False)
    found = train(run, model, 6)
    # The fifth sampled step: seen once, and proved four times to have inputs that differ. Of all that follows only the
    # model itself has such inputs.
    assert found == [(4, "identical_outputs", "relu", None), (4, "identical_outputs", "", None)]
    told = events(statsbridge.load(run.path), "identical_outputs")
    assert [(event["value"], event["threshold"]) for event in told] == [(0.0, 1e-5)] * 2
    model = Dead(bias=0.0)
    assert train(record(model, alerts=False), model, 6) == []


def test_outputs_alike_at_first_only(record: Record) -> None:
    """A last layer of zeros is a usual start."""
    model = Small()
    nn.init.zeros_(model.second.weight)
    run = record(model, alerts=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for _ in range(6):
        loss = functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(3, (6,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
    run.finish()
    assert facts(run) == []


def test_the_same_batch_of_one_sample_is_no_collapse(record: Record) -> None:
    model = Small()

    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x[:1].expand(len(x), -1) if len(x) else x)

    outer = Alike()
    # The outer model's inputs differ and its outputs do not; the inner one has nothing to tell its samples by.
    assert train(record(outer, alerts=False), outer, 6) == [(4, "identical_outputs", "", None)]


def test_the_same_facts_on_the_path_of_accelerators(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "runs_on_host", lambda tensor: False)
    model = Dead(bias=-50.0)
    found = train(record(model, alerts=False), model, 5)
    assert found == [(4, "identical_outputs", "relu", None), (4, "identical_outputs", "", None)]
    normed = Normed(momentum=0.0)
    found = train(record(normed, alerts=False), normed, 5)
    assert found == [(2, "running_statistics_unchanged", "norm", None)]


def test_what_fails_in_there_costs_no_number(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(module_facts.ModuleFacts, "close", fails)
    model = Small()
    run = record(model, alerts=False)
    with pytest.warns(statsbridge.StatsBridgeWarning, match="planted"):
        train(run, model, 3)
    data = statsbridge.load(run.path)
    assert set(data.stats["step"].to_pylist()) == {0, 1, 2}
    assert len(rows(data, site="activation")) == 3 * 5

"""Dead units: planted ones are found, and only they; brought back to life, they learn."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from statsbridge import ConfigError
from statsbridge.debug import DeadUnits, find_dead_units, revive_dead_units

CRITERION = nn.CrossEntropyLoss()


def batches(inputs: torch.Tensor, classes: int = 3, size: int = 16) -> DataLoader[Any]:
    labels = torch.arange(len(inputs)) % classes
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(inputs, labels), batch_size=size, shuffle=True, generator=generator)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kill(layer: nn.Linear | nn.Conv2d, units: list[int]) -> None:
    with torch.no_grad():
        layer.bias[units] = -1000.0  # type: ignore[index]


def layers(found: DeadUnits) -> dict[str, tuple[int, ...]]:
    return {layer.title: layer.dead for layer in found.layers}


class Net(nn.Module):
    """A convolution with BatchNorm, one ReLU module for two places, a function, a transformer layer, a clamp."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(6 * 16, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.bn(self.conv1(x)))
        x = self.drop(self.act(self.conv2(x)))
        x = F.relu(self.fc(x.flatten(1)))
        x = self.encoder(x[:, None])[:, 0] + 5
        return self.head(x.clamp(min=0))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


# ------------------------------------------------------------------ finding


def test_the_units_are_those_that_numpy_finds() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 3))
    with torch.no_grad():
        model[0].bias.normal_(-2, 1.5)
        model[2].bias.normal_(-1, 1.0)
    inputs = drawn(100, 5)
    found = find_dead_units(model, CRITERION, batches(inputs))
    values = inputs.double().numpy()
    for layer, linear in zip(found.layers, (model[0], model[2]), strict=True):
        weight, bias = linear.weight.detach().double().numpy(), linear.bias.detach().double().numpy()
        values = np.maximum(values @ weight.T + bias, 0)
        np.testing.assert_array_equal(layer.dead, np.flatnonzero((values == 0).all(axis=0)))
        np.testing.assert_allclose(layer.firing, (values != 0).mean(axis=0), rtol=1e-12)
    assert 0 < found.numbers["dead_units"] < 32
    assert found.numbers["dead_fraction"] == pytest.approx(found.numbers["dead_units"] / 32)


def test_modules_functions_channels_and_shared_modules_in_the_order_of_the_data_flow() -> None:
    model = net()
    with torch.no_grad():
        model.bn.bias[[0, 3]] = -1000.0
    kill(model.conv2, [5])
    kill(model.fc, [1, 4])
    kill(model.encoder.linear1, [7])
    found = find_dead_units(model, CRITERION, batches(drawn(40, 1, 4, 4)))
    expected = {"act": {0, 3}, "act call 1": {5}, "(model): relu": {1, 4}, "encoder: relu": {7}}
    assert list(layers(found)) == [*expected, "(model): clamp"]
    for title, planted in expected.items():
        assert planted <= set(layers(found)[title])
    assert [layer.source for layer in found.layers] == ["conv1", "conv2", "fc", "encoder.linear1", None]
    assert found.layers[0].between == ("bn",)


def test_a_fresh_network_has_hardly_any_and_passes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 3))
    found = find_dead_units(model, CRITERION, batches(drawn(200, 5)))
    assert found.passed is True
    assert found.numbers["dead_units"] == 0
    assert "Every unit fired for some of the 200 samples" in str(found)


def test_a_layer_passes_with_the_share_that_is_allowed() -> None:
    model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))
    kill(model[0], [0, 1, 2, 3, 4, 5, 6])
    found = find_dead_units(model, CRITERION, batches(drawn(60, 5)))
    assert (found.passed, found.numbers["worst_fraction"], found.numbers["worst_layer"]) == (False, 0.7, "1")
    assert "1: 7 of 10 units never fired" in str(found)
    assert "revive_dead_units" in str(found)
    assert find_dead_units(model, CRITERION, batches(drawn(60, 5)), allowed=0.7).passed is True


def test_dropout_does_not_hide_and_batch_norm_uses_the_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.ReLU())
    model[1].running_mean += 1000.0
    model.eval()
    found = find_dead_units(model, None, batches(drawn(60, 5)))
    assert found.numbers["dead_units"] == 0
    assert not model.training


def test_any_batch_and_any_way_to_run_the_model() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
    kill(model[0], [2])
    listed = [{"x": drawn(10, 5, seed=seed), "labels": torch.zeros(10)} for seed in range(3)]
    found = find_dead_units(model, lambda model, batch: model(batch["x"]), listed)
    assert 2 in found.layers[0].dead
    assert found.numbers["samples"] == 30
    assert find_dead_units(model, None, [(drawn(10, 5),)]).layers[0].units == 8
    assert 2 in find_dead_units(model, None, [(batch["x"], batch["labels"]) for batch in listed]).layers[0].dead


def test_it_stops_after_the_limit() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
    assert find_dead_units(model, CRITERION, batches(drawn(100, 5)), limit=20).numbers["samples"] == 32


def test_a_compiled_model_is_run_eagerly() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
    kill(model[0], [2])
    compiled = torch.compile(model, backend="eager")
    assert 2 in find_dead_units(compiled, CRITERION, batches(drawn(40, 5))).layers[0].dead


def test_what_says_nothing() -> None:
    assert find_dead_units(nn.Linear(5, 3), CRITERION, batches(drawn(40, 5))).passed is None
    empty = find_dead_units(nn.Sequential(nn.Linear(5, 3), nn.ReLU()), CRITERION, [])
    assert empty.passed is None
    assert empty.numbers["dead_fraction"] is None


def test_a_layer_used_twice_counts_as_dead_where_both_uses_are() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.fc(torch.relu(self.fc(x)) - 3))

    model = Twice()
    with torch.no_grad():
        model.fc.weight.copy_(torch.eye(4))
        model.fc.bias.copy_(torch.tensor([-1000.0, 0, 0, 0]))
    found = find_dead_units(model, None, [(drawn(30, 4).clamp(-1, 1),)])
    assert [layer.dead for layer in found.layers] == [(0,), (0, 1, 2, 3)]
    assert revive_dead_units(model, found).units == {"fc": (0,)}


def test_a_layer_that_is_also_used_without_a_relu_is_left_as_it_is() -> None:
    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(torch.relu(self.fc(x)))

    model = Past()
    kill(model.fc, [1])
    found = find_dead_units(model, None, [(drawn(30, 4),)])
    assert 1 in found.layers[0].dead
    assert found.layers[0].source is None
    revival = revive_dead_units(model, found)
    assert revival.units == {}
    assert revival.skipped == {"(model): relu": "no Linear or convolution feeds it directly and alone"}


@pytest.mark.parametrize("fails", [False, True, KeyboardInterrupt])
def test_everything_is_as_found(fails: Any) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    data = batches(drawn(40, 1, 4, 4))
    inputs, labels = next(iter(data))
    CRITERION(model(inputs), labels).backward()
    optimizer.step()
    model.bn.eval()
    before = copy.deepcopy(everything(model, optimizer, data))
    gradients = [parameter.grad for parameter in model.parameters()]
    calls = iter(range(10))

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        torch.rand(3)
        out = model(batch[0])
        if fails and next(calls) == 1:
            raise fails() if fails is not True else RuntimeError("half-way")
        return out

    if fails:
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            find_dead_units(model, forward, data)
    else:
        find_dead_units(model, forward, data)
    assert equal(before, everything(model, optimizer, data))
    assert all(old is parameter.grad for old, parameter in zip(gradients, model.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, data: DataLoader[Any]) -> dict[str, Any]:
    return {
        "state": model.state_dict(),
        "gradients": [parameter.grad for parameter in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "optimizer": optimizer.state_dict()["state"],
        "random": torch.get_rng_state(),
        "loader": data.generator.get_state(),
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"allowed": 1.5}, "allowed=1.5"),
        ({"limit": 0}, "limit=0"),
        ({"loss": 3}, "loss is a int"),
        ({"loader": iter([])}, "only once"),
        ({"model": print}, "model is a builtin"),
    ],
)
def test_wrong_arguments_are_said(keywords: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"model": nn.Linear(2, 2), "loss": None, "loader": []} | keywords
    with pytest.raises(ConfigError, match=said):
        find_dead_units(**given)


def test_the_figure_and_the_file(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 4), nn.ReLU())
    kill(model[0], list(range(7)))
    found = find_dead_units(model, CRITERION, batches(drawn(60, 5)))
    (bars,) = found.figure().data
    assert bars.x[0] == pytest.approx(found.layers[0].fraction)
    assert bars.text[0] == f"{len(found.layers[0].dead)} of 10"
    found.to_csv(tmp_path / "dead.csv")
    header, first, _ = (tmp_path / "dead.csv").read_text().splitlines()
    assert header == "module,type,call,units,dead,fraction,source,dead_units"
    assert first == "1,ReLU,0,10,7,0.7,0,0 1 2 3 4 5 6"


# ------------------------------------------------------------------ reviving


def test_revival_changes_what_it_says_and_nothing_else() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    data = batches(drawn(40, 1, 4, 4))
    for inputs, labels in data:
        CRITERION(model(inputs), labels).backward()
        optimizer.step()
    with torch.no_grad():
        model.bn.bias[[0, 3]] = -1000.0
    kill(model.fc, [1, 4])
    found = find_dead_units(model, CRITERION, data)
    state, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    random = torch.get_rng_state()
    revival = revive_dead_units(model, found, optimizer)

    assert torch.equal(random, torch.get_rng_state())
    assert {0, 3} <= set(revival.units["conv1"])
    assert {1, 4} <= set(revival.units["fc"])
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, state[name])}
    assert changed <= set(revival.tensors)
    names = [name for name, _ in model.named_parameters()]
    for name, tensor in model.state_dict().items():
        source = "conv1" if name.startswith("bn.") else name.rpartition(".")[0]
        if tensor.dim() == 0:
            continue
        kept = torch.ones(len(tensor), dtype=torch.bool)
        kept[list(revival.units.get(source, ()))] = False
        assert torch.equal(tensor[kept], state[name][kept]), name
        if name in names:
            now, before = (states[names.index(name)] for states in (optimizer.state_dict()["state"], moments))
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                assert torch.equal(now[key][kept], before[key][kept])
                assert not now[key][~kept].any()
            assert now["step"] == before["step"]
    for name, value in (("fc.bias", 0), ("conv1.bias", 0), ("bn.weight", 1), ("bn.bias", 0), ("bn.running_var", 1)):
        units = list(revival.units["fc" if name.startswith("fc") else "conv1"])
        assert (model.state_dict()[name][units] == value).all()
    assert f"{revival.count} units were drawn anew" in str(revival)
    again = find_dead_units(model, CRITERION, data)
    assert not set(again.layers[0].dead) & {0, 3}


def test_the_new_weights_are_kaimings() -> None:
    model = nn.Sequential(nn.Linear(50, 400), nn.ReLU())
    kill(model[0], list(range(400)))
    found = find_dead_units(model, None, [(drawn(20, 50),)])
    revive_dead_units(model, found, seed=3)
    weight = model[0].weight.detach().double()
    # 20,000 draws: the standard error of their std is 0.5 %.
    assert float(weight.std()) == pytest.approx(math.sqrt(2 / 50), rel=0.02)
    assert abs(float(weight.mean())) < 4 * math.sqrt(2 / 50 / weight.numel())
    other = nn.Sequential(nn.Linear(50, 400), nn.ReLU())
    kill(other[0], list(range(400)))
    revive_dead_units(other, find_dead_units(other, None, [(drawn(20, 50),)]), seed=3)
    assert torch.equal(model[0].weight, other[0].weight)


def test_what_cannot_be_drawn_anew_is_said() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.ReLU(), nn.Linear(3, 3), nn.ReLU())
    with torch.no_grad():
        model[0].bias -= 1000
        model[2].bias -= 1000
    model[2].weight.requires_grad_(False)
    revival = revive_dead_units(model, find_dead_units(model, None, [(drawn(20, 4),)]))
    assert revival.units == {}
    assert revival.skipped == {"1": "its weight is computed from others", "3": "its weight is frozen"}
    assert "left as they are behind 1: its weight is computed from others" in str(revival)


def test_another_model_is_refused_before_anything_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
    kill(model[0], [1])
    found = find_dead_units(model, None, [(drawn(20, 4),)])
    for other in (nn.Sequential(nn.Linear(4, 5), nn.ReLU()), nn.Linear(4, 6)):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ConfigError, match="another model"):
            revive_dead_units(other, found)
        assert equal(before, other.state_dict())
    with pytest.raises(ConfigError, match="optimizer is a Linear"):
        revive_dead_units(model, found, nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_network_with_seventy_percent_dead_units_learns_again() -> None:
    """Digits through two layers of 10 units, of which 7 in each are dead: revived, it learns what it could not."""
    data = load_digits()
    inputs, labels = torch.tensor(data.data[:400] / 16, dtype=torch.float32), torch.tensor(data.target[:400])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))
    kill(model[0], list(range(7)))
    kill(model[2], list(range(7)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def train(steps: int) -> float:
        for _ in range(steps):
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return float((model(inputs).argmax(1) == labels).float().mean())

    train(80)
    pairs = [(inputs, labels)]
    found = find_dead_units(model, CRITERION, pairs)
    assert [len(layer.dead) >= 7 for layer in found.layers] == [True, True]
    assert found.passed is False
    still_dead = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    without = train(80)
    model.load_state_dict(still_dead[0])
    optimizer.load_state_dict(still_dead[1])

    revival = revive_dead_units(model, found, optimizer)
    at_once = find_dead_units(model, CRITERION, pairs)
    revived = train(80)
    assert revival.count >= 14
    assert without < 0.8
    assert revived > 0.9
    assert found.numbers["dead_fraction"] >= 0.7
    assert at_once.numbers["dead_fraction"] < 0.3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_is_said_not_to_be_looked_into() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    whole = find_dead_units(scripted, None, batches(drawn(32, 4)))
    assert whole.passed is None
    assert "No call of ReLU's kind could be seen" in whole.explanation
    part = find_dead_units(nn.Sequential(scripted, nn.Linear(8, 8), nn.ReLU()), None, batches(drawn(32, 4)))
    assert [layer.module for layer in part.layers] == ["2"]
    assert "Not looked into, since a scripted module shows nothing of what it calls: 0" in part.explanation

"""`gradient_check`: healthy models of every kind pass, and each planted fault is found in the right parameter."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from statsbridge import ConfigError
from statsbridge.debug import GradientResult, gradient_check
from statsbridge.debug.gradients import _places

BATCH = (torch.randn(6, 8, generator=torch.Generator().manual_seed(3)), torch.arange(6) % 4)


class Multiply(torch.autograd.Function):
    """x @ weight.T with a backward of its own, into which faults are planted."""

    fault = ""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = context.saved_tensors
        of_x, of_weight = gradient @ weight, gradient.T @ x
        match Multiply.fault:
            case "weight transposed":
                of_x = gradient @ weight.T
            case "gradient of the weight transposed":
                of_weight = of_weight.T
            case "mean for sum":
                of_weight = of_weight / len(x)
            case "sign":
                of_weight = -of_weight
            case "one element":
                of_weight = of_weight.clone()
                of_weight[3, 5] *= 1.5
        return of_x, of_weight


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Multiply.apply(x, self.weight)


def custom() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Custom(), nn.Tanh(), nn.Linear(8, 4))


@pytest.fixture
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Multiply, "fault", request.param)
    return str(request.param)


FAULTS = {
    "weight transposed": ("0.weight", "0.bias"),
    "gradient of the weight transposed": ("2.weight",),
    "mean for sum": ("2.weight",),
    "sign": ("2.weight",),
    "one element": ("2.weight",),
}


@pytest.mark.parametrize("planted", FAULTS, indirect=True)
def test_a_fault_in_a_custom_backward_is_found(planted: str) -> None:
    result = gradient_check(custom(), nn.CrossEntropyLoss(), BATCH)
    assert result.passed is False
    assert result.wrong == FAULTS[planted]
    assert result.explanation.startswith(f"The gradient of {', '.join(FAULTS[planted])} is not the derivative")
    assert f"between the last of them, {FAULTS[planted][-1]}, and the loss" in result.explanation
    table: Any = result.table
    judged = {name for name, verdict in zip(table["parameter"], table["verdict"], strict=True) if verdict == "right"}
    assert judged >= {"0.weight", "0.bias", "2.weight", "4.weight", "4.bias"} - set(FAULTS[planted])


def test_without_the_fault_it_passes() -> None:
    result = gradient_check(custom(), nn.CrossEntropyLoss(), BATCH)
    assert result.passed
    assert result.wrong == ()
    assert result.numbers["right"] == result.numbers["checks"] == 5 * 3
    assert result.numbers["largest_right_difference"] < 1e-6


@pytest.mark.parametrize("order", ["channels_last", "transposed"])
def test_parameters_in_another_order_of_memory(order: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Tanh(), nn.Linear(3, 4))
    if order == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    else:
        model[4].weight = nn.Parameter(torch.randn(3, 4).t())
    assert not all(parameter.is_contiguous() for parameter in model.parameters())
    result = gradient_check(model, nn.CrossEntropyLoss(), BATCH, coordinates=5)
    assert result.passed, result.explanation
    assert result.numbers["right"] == result.numbers["checks"]


def test_the_derivatives_are_those_of_a_closed_form() -> None:
    """Mean squared error of a linear model: the gradient is 2 (xw - y) x over the number of samples."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    result = gradient_check(model, nn.MSELoss(), (x, y), coordinates=3, directions=0)
    residual = x.numpy() @ model.weight.detach().numpy().T - y.numpy()
    gradient = 2 * residual.T @ x.numpy() / 5
    table: Any = result.table
    for index, autograd, numeric in zip(table["index"], table["autograd"], table["numeric"], strict=True):
        place = tuple(map(int, index.split(", ")))
        assert autograd == pytest.approx(gradient[place], rel=1e-12)
        assert numeric == pytest.approx(gradient[place], rel=1e-7)
    assert sorted(table["index"]) == ["0, 0", "0, 1", "0, 2"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 5, batch_first=True)
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x.reshape(-1, 2, 8))[0][:, -1])


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.second(torch.tanh(hidden)) + torch.zeros(4)  # made inside: of the default type


class Penalised(nn.Module):
    """A model that takes a gradient of its own in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = torch.tanh(self.first(x))
        (force,) = torch.autograd.grad(energy.square().sum(), x, create_graph=True)
        return self.second(energy) + force[:, :4]


class Counting(nn.Module):
    """A model whose output depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * (1 + self.calls / 10)


def normalised(**changes: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.4), nn.Linear(6, 4), nn.LayerNorm(4)
    )


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model[2].weight = model[0].weight
    return model


HEALTHY: dict[str, Any] = {
    "batch norm, ReLU, dropout": normalised,
    "a buffer that counts": Counting,
    "spectral norm": lambda: nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))),
    "convolution and pooling": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 4),
    ),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(8, 4)
    ),
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
    "gradients of its own": Penalised,
    "half precision weights": lambda: nn.Linear(8, 4).to(torch.bfloat16),
    "tied weights": tied,
    "a scalar parameter": lambda: nn.Sequential(nn.Linear(8, 4), nn.PReLU(1)),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_model_passes(kind: str) -> None:
    torch.manual_seed(0)
    result = gradient_check(HEALTHY[kind](), nn.CrossEntropyLoss(), BATCH, coordinates=1)
    assert result.passed, str(result)
    assert result.numbers["wrong"] == 0


def test_a_recurrent_model_with_a_loss_of_its_own_passes() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(6, 2, 8), "more": [torch.arange(6) % 4]}
    result = gradient_check(
        Recurrent(), lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["more"][0]), batch
    )
    assert result.passed, str(result)
    assert result.numbers["parameters"] == 6


CASTS: dict[str, Any] = {
    "float()": lambda x: x.float(),
    "half()": lambda x: x.half(),
    "to(dtype)": lambda x: x.to(torch.float32),
    "to(dtype=)": lambda x: x.to(dtype=torch.bfloat16),
    "type()": lambda x: x.type(torch.float32),
    "softmax": lambda x: torch.log_softmax(x, dim=-1, dtype=torch.float32),
    "made inside": lambda x: x + torch.ones(4, dtype=torch.float16),
}


@pytest.mark.parametrize("kind", CASTS)
def test_a_cast_inside_the_model_stays_exact(kind: str) -> None:
    """As in transformers, whose losses take their logits as float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    result = gradient_check(
        model, lambda model, batch: functional.cross_entropy(CASTS[kind](model(batch[0])).float(), batch[1]), BATCH
    )
    assert result.passed, str(result)
    assert result.numbers["undecided"] == 0
    assert result.numbers["largest_right_difference"] < 1e-6


def test_a_bias_before_batch_norm_has_no_gradient_that_could_be_wrong() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        result = gradient_check(normalised(), nn.CrossEntropyLoss(), BATCH, seed=seed)
        assert result.passed, str(result)
        assert "smaller than what the loss is rounded to" in result.explanation


def test_what_is_cut_off_is_wrong_and_said_to_be_cut_off() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x)).detach())

    result = gradient_check(Cut(), nn.CrossEntropyLoss(), BATCH)
    assert result.wrong == ("first.weight", "first.bias")
    assert "No gradient arrives at first.weight, first.bias at all" in result.explanation


def test_a_parameter_that_is_not_used_is_right() -> None:
    model = nn.Linear(8, 4)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    result = gradient_check(model, nn.CrossEntropyLoss(), BATCH)
    assert result.passed


def test_a_kink_is_said() -> None:
    class Bent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(8))
            self.shift = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x * self.scale) + x * self.shift

    result = gradient_check(Bent(), lambda model, batch: model(batch).square().mean(), BATCH[0])
    assert result.passed is not False
    assert "at a kink" in result.explanation
    table: Any = result.table
    reasons = dict(zip(table["parameter"], table["reason"], strict=True))
    assert reasons == {"scale": "kink", "shift": ""}


@torch.jit.script
def single(x: torch.Tensor) -> torch.Tensor:
    """Out of reach of what keeps casts at float64."""
    return x.to(torch.float32)


@torch.jit.script
def brain(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: functional.cross_entropy(single(model(batch[0])), batch[1]), "float32 inside the model"),
        (
            lambda model, batch: functional.cross_entropy(brain(model(batch[0])), batch[1]).float(),
            "low precision inside the model",
        ),
        (lambda model, batch: model(batch[0]).sum() * math.nan, "The loss is nan: it has no gradient to check"),
    ],
)
def test_what_cannot_be_judged_is_undecided(loss: Any, said: str) -> None:
    torch.manual_seed(0)
    result = gradient_check(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)), loss, BATCH)
    assert result.passed is None
    assert said in result.explanation


def test_a_loss_that_is_float32_alone_is_undecided_and_quoted() -> None:
    weights = torch.ones(4)
    result = gradient_check(
        nn.Linear(8, 4), lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1], weights), BATCH
    )
    assert result.passed is None
    assert "cannot be computed in float64 (RuntimeError: expected scalar type" in result.explanation
    assert result.figure().layout.annotations[0].text == "no derivative could be measured"


def test_a_loss_of_another_model_is_undecided() -> None:
    for model, said in (
        (nn.Linear(8, 4), "a loss that uses another model than the one it is given"),
        (nn.Linear(8, 4).double(), "Does the loss use the model that it is given?"),
    ):

        def loss(_: nn.Module, batch: Any, other: nn.Module = model) -> torch.Tensor:
            return functional.cross_entropy(other(batch[0]), batch[1])

        result = gradient_check(model, loss, BATCH)
        assert result.passed is None
        assert said in result.explanation


def test_the_weights_of_a_criterion_are_converted_with_the_model() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert gradient_check(nn.Linear(8, 4), criterion, BATCH).passed
    assert criterion.weight is not None
    assert criterion.weight.dtype == torch.float32


def test_a_frozen_parameter_is_not_checked() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    model[0].requires_grad_(False)
    table: Any = gradient_check(model, nn.CrossEntropyLoss(), BATCH).table
    assert set(table["parameter"]) == {"1.weight", "1.bias"}


def test_coordinates_are_different_ones_and_reach_those_with_a_gradient() -> None:
    """Of an embedding most rows have no gradient: random elements alone would all be 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 2), nn.Flatten(), nn.Linear(6, 4))
    batch = (torch.randint(0, 5, (6, 3)), BATCH[1])
    result = gradient_check(model, nn.CrossEntropyLoss(), batch, coordinates=4, directions=0)
    table: Any = result.table
    found = [
        (index, autograd)
        for name, index, autograd in zip(table["parameter"], table["index"], table["autograd"], strict=True)
        if name == "0.weight"
    ]
    assert len({index for index, _ in found}) == 4
    assert sum(autograd != 0 for _, autograd in found) >= 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"coordinates": 0, "directions": 0}, "coordinates=0, directions=0: give at least one"),
        ({"coordinates": -1}, "coordinates=-1"),
    ],
)
def test_a_wrong_argument_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gradient_check(nn.Linear(8, 4), nn.CrossEntropyLoss(), BATCH, **changes)


@pytest.mark.parametrize("planted", ["weight transposed"], indirect=True)
def test_the_figure_shows_each_check_in_the_row_of_its_parameter(planted: str) -> None:
    result: GradientResult = gradient_check(custom(), nn.CrossEntropyLoss(), BATCH)
    figure = result.figure()
    by_name = {trace.name: trace for trace in figure.data}
    assert set(by_name) == {"right", "wrong"}
    assert set(by_name["wrong"].y) == {0, 1}
    assert list(figure.layout.yaxis.ticktext) == ["0.weight", "0.bias", "2.weight", "4.weight", "4.bias"]
    assert min(by_name["wrong"].x) > 1e-3
    assert max(by_name["right"].x) < 1e-5
    assert np.isfinite(by_name["right"].x).all()


def test_a_gradient_that_is_nan_where_the_loss_is_finite_fails() -> None:
    """The branch that torch.where does not take has a derivative too, and 0 * inf is NaN."""

    class Trap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
            self.scale = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = torch.where(self.scale > -1, 1 + self.scale, torch.sqrt(self.scale))
            return self.last(torch.tanh(self.first(x))) * scale

    result = gradient_check(Trap(), nn.CrossEntropyLoss(), BATCH)
    assert result.passed is False
    assert result.wrong == ("scale",)
    assert "The gradient of scale is not finite, though the loss is" in result.explanation
    assert result.figure() is not None


def test_complex_parameters_are_checked_by_their_real_and_imaginary_parts() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.fft.rfft(x).to(torch.complex64) @ self.weight).abs()

    torch.manual_seed(0)
    result = gradient_check(Spectral(), nn.CrossEntropyLoss(), BATCH, coordinates=6)
    assert result.passed, str(result)
    assert result.numbers["right"] == 7
    indices = {str(index).rpartition(", ")[2] for index in result.table["index"] if index}
    assert indices == {"0", "1"}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_spectral_norm_is_no_fault_though_its_vectors_have_not_settled(old: bool) -> None:
    normalise: Any = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), normalise(nn.Linear(32, 4)))
    result = gradient_check(model, nn.CrossEntropyLoss(), BATCH)
    assert result.passed, str(result)


def test_a_tensor_kept_of_the_last_forward_pass_does_not_keep_the_model_from_being_copied() -> None:
    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = super().forward(x)
            return self.seen

    model = Keeps(8, 4)
    model(BATCH[0])
    seen = model.seen
    assert gradient_check(model, nn.CrossEntropyLoss(), BATCH).passed
    assert model.seen is seen


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_has_its_gradients() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    result = gradient_check(model, nn.CrossEntropyLoss(), BATCH)
    assert result.passed, str(result)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="the seed is no longer kept for later")
def test_the_seed_that_a_gpu_is_to_begin_with_stays() -> None:
    torch.manual_seed(1234)
    before = torch.cuda._lazy_seed_tracker.manual_seed_all_cb
    gradient_check(nn.Linear(8, 4), nn.CrossEntropyLoss(), BATCH)
    assert torch.cuda._lazy_seed_tracker.manual_seed_all_cb is before


def test_the_elements_of_a_large_gradient_are_chosen_without_a_list_of_them() -> None:
    gradient = torch.ones(1_000_000)
    tracemalloc.start()
    _places(gradient, 4, torch.Generator().manual_seed(0))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1_000_000, "Python's objects; a list of the elements takes 36 MB"

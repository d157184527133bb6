"""Trainings with one planted fault each, what it is, and in which module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo_broken_more_helpers import MORE, nan_in_the_data
from zoo_healthy_helpers import convolutional, transformer
from zoo_helpers import Broken, Then, Training, mlp, regression, same_batch, sequences, sgd, supervised, vectors

# ---------------------------------------------------------------------- NaN and infinity


def overflow_inside() -> Training:
    """exp() overflows in module 2; only module 3, which divides infinity by infinity, makes NaN of it."""
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), Then(lambda x: torch.exp(x * model.gain)),
        Then(lambda x: x / x.sum(1, keepdim=True)), nn.Linear(32, 4),
    )  # fmt: skip
    model.gain = 1.0

    def grow(number: int) -> None:
        model.gain = 1.0 if number < 12 else 300.0

    return supervised(model, vectors(), before=grow)


def root_of_zero() -> Training:
    """The derivative of sqrt is infinite at 0, which the ReLU before it puts out."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), Then(torch.sqrt), nn.Linear(32, 4))
    return supervised(model, vectors())


class _Careless(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bad: bool) -> Tensor:
        context.save_for_backward(x, weight)
        context.bad = bad
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = context.saved_tensors
        return grad @ weight, (grad.t() @ x) / (0.0 if context.bad else 1.0), None


class CarelessLinear(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(after, before) / before**0.5)
        self.bad = False

    def forward(self, x: Tensor) -> Tensor:
        return _Careless.apply(x, self.weight, self.bad)


def custom_backward() -> Training:
    careless = CarelessLinear(32, 32)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), careless, nn.ReLU(), nn.Linear(32, 4))

    def break_it(number: int) -> None:
        careless.bad = number >= 12

    return supervised(model, vectors(), before=break_it)


class Dividing(torch.optim.SGD):
    """Divides by the gradient's own root mean square, with nothing added."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad / parameter.grad.pow(2).mean().sqrt()


def optimizer_divides_by_zero() -> Training:
    """The gradient of one layer becomes exactly 0, and 0/0 its parameter's end."""
    model = mlp(16, 32, 32, 4)
    gate = torch.ones(())

    def shut(number: int) -> None:
        gate.fill_(float(number != 12))

    model[2].weight.register_hook(lambda grad: grad * gate)
    return supervised(model, vectors(), optimizer=Dividing(model.parameters(), lr=1e-3), before=shut)


def log_of_zero_in_the_loss() -> Training:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        right = torch.softmax(outputs * scale, 1).gather(1, targets[:, None])
        return -right.log().mean()

    scale = torch.ones(())

    def sharpen(number: int) -> None:
        scale.fill_(1.0 if number < 12 else 500.0)

    return supervised(mlp(16, 32, 4), vectors(), loss=loss, before=sharpen)


def nan_in_a_parameter() -> Training:
    model = mlp(16, 32, 32, 4)

    def spoil(number: int) -> None:
        if number == 12:
            with torch.no_grad():
                model[2].weight[0, 0] = torch.nan

    return supervised(model, vectors(), before=spoil)


# ---------------------------------------------------------------------- rates and updates


def rate_too_large() -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    x = torch.randn(256, 8)
    y = 2 * x[:, :1] - x[:, 1:2] + 0.1 * torch.randn(256, 1)

    def same() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield x, y

    return supervised(model, same(), loss=functional.mse_loss, optimizer=sgd(model, 0.5))


def one_group_too_fast() -> Training:
    model = mlp(16, 32, 32, 4)
    others = [*model[0].parameters(), *model[4].parameters()]
    groups = [{"params": model[2].parameters(), "lr": 0.3}, {"params": others}]
    return supervised(model, vectors(), optimizer=torch.optim.Adam(groups, lr=1e-3))


def rate_zero() -> Training:
    model = mlp(16, 32, 4)
    return supervised(model, vectors(), optimizer=sgd(model, 0.0))


def one_group_at_zero() -> Training:
    model = mlp(16, 32, 32, 4)
    others = [*model[0].parameters(), *model[4].parameters()]
    groups = [{"params": model[2].parameters(), "lr": 0.0}, {"params": others}]
    return supervised(model, vectors(), optimizer=torch.optim.Adam(groups, lr=3e-3))


def rate_too_small() -> Training:
    model = mlp(16, 32, 4)
    return supervised(model, vectors(), optimizer=sgd(model, 1e-6))


def rounded_away() -> Training:
    model = mlp(16, 32, 32, 4).to(torch.bfloat16)

    def narrow() -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in vectors():
            yield inputs.to(torch.bfloat16), targets

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.float(), targets)

    return supervised(model, narrow(), loss=loss, optimizer=sgd(model, 1e-4))


def no_zero_grad() -> Training:
    model = mlp(16, 32, 32, 4)
    return supervised(model, vectors(), optimizer=sgd(model, 0.02), zero=False)


def no_zero_grad_adam() -> Training:
    return supervised(transformer().model, sequences(), zero=False)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what the training does not reach


def detached() -> Training:
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), Then(lambda x: x.detach()), nn.Linear(32, 4)
    )
    return supervised(model, vectors())


def not_in_the_optimizer() -> Training:
    model = mlp(16, 32, 32, 4)
    held = [*model[0].parameters(), *model[4].parameters()]
    return supervised(model, vectors(), optimizer=torch.optim.Adam(held, lr=3e-3))


class MadeAnew(nn.Module):
    """Its parameter is another one in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = nn.Parameter(torch.ones(32))
        return self.second(torch.relu(self.first(x)) * self.scale)


def made_anew() -> Training:
    return supervised(MadeAnew(), vectors())


def replaced_later() -> Training:
    model = mlp(16, 32, 32, 4)

    def replace(number: int) -> None:
        if number == 10:
            model[2].weight = nn.Parameter(model[2].weight.detach().clone())

    return supervised(model, vectors(), before=replace)


def hard_limit() -> Training:
    """round() has no slope: nothing before it gets a gradient other than 0."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), Then(torch.round), nn.Linear(32, 4))
    return supervised(model, vectors())


class Cached(nn.Module):
    """Computes with a copy of its weight from the start; the gradient reaches the weight all the same."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(after, before) / before**0.5)
        self.copy: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.copy is None:
            self.copy = self.weight.detach().clone()
        return x @ (self.copy + (self.weight - self.weight.detach())).t()


def stale_copy() -> Training:
    model = nn.Sequential(Cached(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return supervised(model, same_batch(vectors()))


# ---------------------------------------------------------------------- units and layers


def dead_layer() -> Training:
    model = mlp(16, 32, 32, 4)
    with torch.no_grad():
        model[2].bias.fill_(-20.0)
    return supervised(model, vectors())


def dying_layer() -> Training:
    """Units of one layer die one after the other: their biases sink."""
    model = mlp(16, 64, 64, 4)

    def sink(number: int) -> None:
        with torch.no_grad():
            model[2].bias[: min(4 * number, 60)] = -20.0

    return supervised(model, vectors(), before=sink)


def huge_weights() -> Training:
    model = mlp(16, 32, 32, 32, 4)
    with torch.no_grad():
        model[2].weight.mul_(1e5)
    return supervised(model, vectors(), optimizer=torch.optim.Adam(model.parameters(), lr=1e-4))


def constant_output() -> Training:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), Then(lambda x: x * 0 + 1), nn.Linear(32, 4))
    return supervised(model, vectors())


def deep_sigmoids() -> Training:
    model = mlp(16, *[16] * 10, 4, activation=nn.Sigmoid)
    return supervised(model, vectors())


def small_branch() -> Training:
    """One layer's output is scaled down to a millionth, and up again where the gradient does not see it."""
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), Then(lambda x: x * 1e-6 + (x * (1 - 1e-6)).detach()),
        nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip
    return supervised(model, vectors())


def loss_scaled_down() -> Training:
    model = mlp(16, 32, 4)
    return supervised(model, vectors(), loss=lambda a, b: functional.cross_entropy(a, b) * 1e-7, optimizer=sgd(model))


def enlarged_gradients() -> Training:
    """Each of eight layers makes the gradient three times as large, and leaves its output as it is."""
    layers: list[nn.Module] = [nn.Linear(16, 32)]
    for _ in range(8):
        layers += [nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh(), Then(lambda x: 3 * x - 2 * x.detach())]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    return supervised(model, vectors(), optimizer=torch.optim.Adam(model.parameters(), lr=1e-4))


def summed_loss() -> Training:
    model = mlp(16, 32, 1)

    def far() -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in regression(batch=256):
            yield inputs, targets * 300

    def summed(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets, reduction="sum")

    return supervised(model, far(), loss=summed, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))


def sudden_gradients() -> Training:
    model = mlp(16, 32, 32, 4)
    scale = torch.ones(())
    model[4].weight.register_hook(lambda grad: grad * scale)

    def blow_up(number: int) -> None:
        scale.fill_(1.0 if number < 22 else 1e4)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return supervised(model, vectors(), optimizer=optimizer, before=blow_up)


def saturated_tanh() -> Training:
    model = mlp(16, 32, 32, 4, activation=nn.Tanh)
    with torch.no_grad():
        model[2].weight.mul_(100)
    return supervised(model, vectors())


def saturated_sigmoid() -> Training:
    model = mlp(16, 32, 32, 4, activation=nn.Sigmoid)
    with torch.no_grad():
        model[2].bias.fill_(12.0)
    return supervised(model, vectors())


# ---------------------------------------------------------------------- modes


def eval_mode() -> Training:
    training = convolutional()
    training.model.eval()  # type: ignore[union-attr]
    return training


def norm_in_eval() -> Training:
    training = convolutional()
    training.model[1].eval()  # type: ignore[index]
    return training


def momentum_zero() -> Training:
    training = convolutional()
    training.model[5].momentum = 0.0  # type: ignore[index]
    return training


def same_for_all() -> Training:
    """The layer takes the mean over the batch where it should take one over its features."""
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), Then(lambda x: x.mean(0, keepdim=True) + 0 * x), nn.Linear(32, 4)
    )
    return supervised(model, vectors())


# ---------------------------------------------------------------------- the loss


def one_odd_batch() -> Training:
    def odd() -> Iterator[tuple[Tensor, Tensor]]:
        for number, (inputs, targets) in enumerate(vectors()):
            yield (inputs * 20, (targets + 1) % 4) if number == 25 else (inputs, targets)

    model = mlp(16, 32, 4)
    return supervised(model, odd(), optimizer=torch.optim.Adam(model.parameters(), lr=1e-2))


def swinging() -> Training:
    """A parabola, and steps that are nearly twice as long as to its minimum."""
    model = nn.Linear(1, 1, bias=False)
    turn = {"number": 0}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        turn["number"] += 1
        high = 1.0 if turn["number"] % 2 else 0.4
        return (outputs - targets).pow(2).mean() * 0 + outputs.mean() * 1e-3 + high

    return supervised(model, regression(size=1), loss=loss, optimizer=sgd(model, 1e-3))


def wrong_sign() -> Training:
    model = mlp(16, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, maximize=True)
    return supervised(model, vectors(), optimizer=optimizer)


def random_labels() -> Training:
    def shuffled() -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in vectors(batch=256):
            yield inputs, targets[torch.randperm(len(targets))]

    model = mlp(16, 32, 4)
    return supervised(model, shuffled(), optimizer=sgd(model, 0.01))


def flat_loss() -> Training:
    """What is logged is the loss of the first batch, for ever."""
    training = supervised(mlp(16, 32, 4), vectors())
    first: dict[str, Any] = {}

    def step(number: int) -> dict[str, Any]:
        scalars = training.step(number)
        return first or first.update(scalars) or scalars

    return Training(training.model, step)


def large_start() -> Training:
    model = mlp(16, 32, 4)
    with torch.no_grad():
        model[-1].weight.mul_(40)
    return supervised(model, vectors(), optimizer=sgd(model, 0.01))


# ---------------------------------------------------------------------- float16


def half_precision() -> Training:
    """float16 without loss scaling: gradients fall below 2^-24."""
    model = mlp(16, 64, 64, 4, activation=nn.GELU).half()

    def narrow() -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in vectors(batch=512):
            yield inputs.half(), targets

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.float(), targets) / 64

    return supervised(model, narrow(), loss=loss, optimizer=sgd(model, 1.0))


def overflowing_scaler() -> Training:
    model = mlp(16, 32, 4)
    optimizer = sgd(model, 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    source = vectors()
    model[0].weight.register_hook(lambda grad: grad * torch.inf)

    def step(number: int) -> dict[str, Any]:
        inputs, targets = next(source)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return {"loss": loss}

    return Training(model, step)


BROKEN: dict[str, Broken] = {
    "NaN in one batch": Broken(nan_in_the_data, "nonfinite_activation", "0"),
    "exp overflows; the next module makes NaN of it": Broken(overflow_inside, "nonfinite_activation", "2"),
    "sqrt at 0": Broken(root_of_zero, "nonfinite_gradient", "1"),
    "custom backward divides by 0": Broken(custom_backward, "nonfinite_gradient", "2"),
    "optimizer divides 0 by 0": Broken(optimizer_divides_by_zero, "nonfinite_update", "2"),
    "log of 0 in the loss": Broken(log_of_zero_in_the_loss, "nonfinite_loss_outside", None),
    "NaN written into a parameter": Broken(nan_in_a_parameter, "nonfinite_parameter", "2"),
    "learning rate too large": Broken(rate_too_large, "update_too_large", "2"),
    "one parameter group too fast": Broken(one_group_too_fast, "update_too_large", "2"),
    "learning rate 0": Broken(rate_zero, "update_zero", "0"),
    "one parameter group at rate 0": Broken(one_group_at_zero, "update_zero", "2"),
    "learning rate far too small": Broken(rate_too_small, "update_too_small", "0"),
    "updates rounded away in bfloat16": Broken(rounded_away, "update_rounded_away", "0"),
    "no zero_grad, SGD": Broken(no_zero_grad, "gradient_accumulating", "0"),
    "no zero_grad, Adam": Broken(no_zero_grad_adam, "gradient_accumulating", "layers.layers.0.linear1"),
    "detach() in the middle": Broken(detached, "no_gradient", "2"),
    "a layer not in the optimizer": Broken(not_in_the_optimizer, "no_optimizer", "2"),
    "a parameter made anew in forward()": Broken(made_anew, "parameter_replaced", ""),
    "a parameter replaced after the optimizer was made": Broken(replaced_later, "parameter_replaced", "2"),
    "round() in the middle": Broken(hard_limit, "zero_gradient", "2"),
    "a cached copy of the weights": Broken(stale_copy, "stale_outputs", "0"),
    "dead ReLU from the start": Broken(dead_layer, "dead_units", "3"),
    "ReLU units die one after the other": Broken(dying_layer, "dead_units", "3"),
    "weights 100,000 times too large": Broken(huge_weights, "exploding_activation", "2"),
    "an output that is constant": Broken(constant_output, "collapsed_activation", "3"),
    "the gradient scaled down in one place": Broken(small_branch, "vanishing_gradient", "2"),
    "a loss scaled down": Broken(loss_scaled_down, "vanishing_gradient", "2"),
    "a summed loss of unscaled targets": Broken(summed_loss, "exploding_gradient", "2"),
    "gradients that suddenly explode": Broken(sudden_gradients, "exploding_gradient", None, steps=27),
    "ten sigmoid layers": Broken(deep_sigmoids, "vanishing_gradient", "12"),
    "eight layers that enlarge the gradient": Broken(enlarged_gradients, "exploding_gradient", "1"),
    "saturated tanh": Broken(saturated_tanh, "saturated", "3"),
    "saturated sigmoid": Broken(saturated_sigmoid, "saturated", "3"),
    "model left in eval mode": Broken(eval_mode, "eval_mode", None),
    "BatchNorm left in eval mode": Broken(norm_in_eval, "module_eval", "1"),
    "BatchNorm with momentum 0": Broken(momentum_zero, "running_statistics_unchanged", "5"),
    "a mean over the batch": Broken(same_for_all, "identical_outputs", "2"),
    "one odd batch": Broken(one_odd_batch, "loss_spike", None, steps=28),
    "loss swings to and fro": Broken(swinging, "loss_oscillating", None, steps=64),
    "the sign of the loss is wrong": Broken(wrong_sign, "loss_not_decreasing", None, steps=125, settings={"every": 25}),
    "labels shuffled apart from inputs": Broken(
        random_labels, "loss_not_decreasing", None, steps=125, settings={"every": 25}
    ),
    "a loss that no parameter moves": Broken(flat_loss, "loss_flat", None),
    "outputs too large at the start": Broken(large_start, "initial_loss", None, thresholds={"classes": 4}),
    "float16 without loss scaling": Broken(half_precision, "underflow", "0", settings={"histograms": True}),
    "every step overflows": Broken(overflowing_scaler, "skipped_steps", None),
    **MORE,
}

"""Further trainings with one planted fault each: what fresh users met, and what needs a good run or sparse steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo_helpers import Broken, Training, images, mlp, sgd, supervised, vectors
from zoo_modern_helpers import Experts, VisionTransformer

SPARSE = {"every": 5, "alerts": False}  # and no bursts where something is found


def nan_in_the_data() -> Training:
    def spoiled() -> Iterator[tuple[Tensor, Tensor]]:
        for number, (inputs, targets) in enumerate(vectors()):
            if number == 12:
                inputs[3, 5] = torch.nan
            yield inputs, targets

    return supervised(mlp(16, 32, 32, 4), spoiled())


def nan_between_samples() -> Training:
    return nan_in_the_data()


class Spare(nn.Module):
    """Has a layer that forward() forgot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def forgotten_layer() -> Training:
    model = Spare()
    held = [*model.first.parameters(), *model.last.parameters()]
    return supervised(model, vectors(), optimizer=torch.optim.Adam(held, lr=3e-3))


def usual() -> Training:
    return supervised(mlp(16, 32, 4), vectors())


def unscaled_inputs() -> Training:
    """Sixteen times as large as in the good run: no rule by itself has a limit for that."""

    def larger() -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in vectors():
            yield 16 * inputs, targets

    return supervised(mlp(16, 32, 4), larger())


class Functions(nn.Module):
    """Its ReLUs are functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)
        self.second, self.last = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.norm(self.first(x)))
        return self.last(functional.relu(self.second(hidden)))


def dead_function() -> Training:
    model = Functions()
    with torch.no_grad():
        model.second.bias.fill_(-20.0)
    return supervised(model, vectors())


def dead_function_behind_a_norm() -> Training:
    model = Functions()
    with torch.no_grad():
        model.norm.bias.fill_(-20.0)
    return supervised(model, vectors())


def nothing_to_learn() -> Training:
    """Labels at random: the best that a network can do is a constant, and on the way there its units die."""

    def drawn() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(5)
        for inputs, targets in vectors():
            yield inputs, torch.randint(0, 4, targets.shape, generator=generator)

    model = mlp(16, 64, 64, 4)
    with torch.no_grad():
        model[4].weight.mul_(0.5)
    return supervised(model, drawn(), optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))


def rate_of_ten() -> Training:
    model = mlp(16, 64, 64, 4)
    return supervised(model, vectors(), optimizer=sgd(model, 10.0))


def outgrown_between_samples() -> Training:
    """Its last layer begins at 0, so in the first step nothing else moves; in the next ones all weights outgrow it."""
    model = VisionTransformer()
    return supervised(model, images(batch=32), optimizer=torch.optim.AdamW(model.parameters(), lr=0.3))


def masked_row() -> Training:
    """From some step on one token may look at none: a softmax of infinities alone."""
    model = VisionTransformer()
    mask = torch.zeros(17, 17)
    mask[3] = -torch.inf

    def mask_it(number: int) -> None:
        model.blocks[1].mask = mask if number >= 12 else None

    return supervised(model, images(batch=16), before=mask_it)


def expert_in_no_optimizer() -> Training:
    model = Experts()
    held = [parameter for name, parameter in model.named_parameters() if "experts" not in name]
    return supervised(model, vectors(), optimizer=torch.optim.Adam(held, lr=1e-3))


def never_stepped() -> Training:
    """The loop forgot `optimizer.step()`."""
    model, batches = mlp(16, 32, 4), vectors()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(number: int) -> dict[str, Tensor]:
        inputs, targets = next(batches)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        return {"loss": loss}

    return Training(model, step)


MORE: dict[str, Broken] = {
    "NaN between two sampled steps": Broken(
        nan_between_samples, "nonfinite_loss", None, steps=18, settings={"every": 10}
    ),
    "a layer that forward() does not call": Broken(forgotten_layer, "unused_module", "middle", severities=("info",)),
    "inputs sixteen times as large as in the good run": Broken(unscaled_inputs, "outside_baseline", "0", good=usual),
    "a ReLU that is a function, dead": Broken(dead_function, "dead_units", "second"),
    "a ReLU that is a function, dead behind a norm": Broken(dead_function_behind_a_norm, "dead_units", "norm"),
    "nothing to learn, and units die of it": Broken(
        nothing_to_learn, "loss_not_decreasing", None, steps=220, settings={"every": 10}
    ),
    "learning rate 10, every fifth step sampled": Broken(
        rate_of_ten, "update_too_large", "0", steps=60, settings=SPARSE
    ),
    "weights outgrow their start between two sampled steps": Broken(
        outgrown_between_samples, "update_too_large", "blocks.0.queries", steps=30, settings=SPARSE
    ),
    "attention of which a whole row is masked": Broken(masked_row, "nonfinite_activation", "blocks.1.out"),
    "an optimizer that never steps": Broken(never_stepped, "never_stepped", None),
    "experts in no optimizer": Broken(expert_in_no_optimizer, "no_optimizer", "experts.0.0"),
}

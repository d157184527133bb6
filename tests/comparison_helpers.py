"""Small trainings that are alike but for their seed and one planted fault, recorded for comparison."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import statsbridge


class Convolutional(nn.Module):
    """A small CNN with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.act = nn.ReLU()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.body(self.relu(self.norm(self.stem(x)))))
        return self.head(x.mean(dim=(2, 3)))


class Perceptron(nn.Module):
    """Five layers."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [16, 32, 32, 32, 4]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = self.relu(layer(x))
        last: torch.Tensor = self.layers[-1](x)
        return last


class Attending(nn.Module):
    """One transformer layer over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(self.embed(x)).mean(1)
        return self.head(hidden)


SHAPES: dict[type[nn.Module], tuple[int, ...]] = {
    Convolutional: (1, 8, 8),
    Perceptron: (16,),
    Attending: (6, 4),
}


def train(
    folder: Path,
    kind: type[nn.Module],
    seed: int,
    *,
    plant: Callable[[nn.Module], None] = lambda model: None,
    at: int = 0,
    lr: float = 3e-3,
    steps: int = 40,
    every: int = 2,
) -> statsbridge.RunData:
    """Train for `steps` steps on four classes of noisy patterns; `plant` changes the model before step `at`."""
    torch.manual_seed(seed)
    model = kind()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    patterns = torch.randn(4, *SHAPES[kind], generator=torch.Generator().manual_seed(1))
    with statsbridge.init(model, dir=folder, name=f"{kind.__name__}-{seed}", every=every, config={"lr": lr}) as run:
        for step in range(steps):
            if step == at:
                plant(model)
            labels = torch.randint(0, 4, (32,))
            loss = nn.functional.cross_entropy(model(patterns[labels] + torch.randn(32, *SHAPES[kind])), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
    return statsbridge.load(run.path)

"""Healthy trainings of further kinds, and the networks that broken ones share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo_helpers import Training, images, mlp, regression, sequences, supervised, vectors


class Attending(nn.Module):
    """A transformer block with its attention in functions. `mask`: added to the scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.queries(self.before(x)).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        scores = scores if self.mask is None else scores + self.mask
        x = x + self.out(scores.softmax(-1) @ value)
        return x + self.inner(self.after(x))


class VisionTransformer(nn.Module):
    """Patches, a class token that begins at 0, and a head that does."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 3, 3)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(Attending(width), Attending(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.token.expand(len(x), -1, -1), patches), 1) + self.places
        return self.head(self.norm(self.blocks(tokens))[:, 0])


def warmed_up(optimizer: torch.optim.Optimizer) -> Any:
    """From 0 in ten steps, then half a cosine."""
    factor = lambda step: min(step / 10, 0.5 + 0.5 * math.cos(math.pi * min(step / 1000, 1.0)))  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def vision_transformer() -> Training:
    model = VisionTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    return supervised(model, images(batch=32), optimizer=optimizer, clip=1.0, scheduler=warmed_up)


class Experts(nn.Module):
    """Each sample goes to one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.experts = nn.ModuleList([mlp(32, 32, 32) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        weight, chosen = self.gate(hidden).softmax(1).max(1)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_put((rows,), expert(hidden[rows]) * weight[rows, None])
        return self.last(hidden + out)


def experts() -> Training:
    model = Experts()
    return supervised(model, vectors(), optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))


class Adapted(nn.Module):
    """A frozen layer, and a low-rank change of it that begins at 0."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapters() -> Training:
    model = nn.Sequential(
        Adapted(nn.Linear(16, 32)), nn.ReLU(), Adapted(nn.Linear(32, 32)), nn.ReLU(), Adapted(nn.Linear(32, 4))
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return supervised(model, vectors(), optimizer=torch.optim.AdamW(trained, lr=5e-3))


class Residual(nn.Module):
    """Two convolutions of which the last norm begins at 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu, self.out = nn.ReLU(), nn.ReLU()
        nn.init.zeros_(self.last_norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.last_norm(self.second(self.relu(self.norm(self.first(x))))))


def residual() -> Training:
    """Batches of two, SGD with momentum."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Residual(8), Residual(8),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return supervised(model, images(batch=2), optimizer=optimizer)


class Denoiser(nn.Module):
    """Says the noise in a picture, told how much there is. Its last layer begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.amount = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 16))
        self.enter = nn.Conv2d(1, 16, 3, padding=1)
        self.down, self.up = nn.Conv2d(16, 32, 3, 2, 1), nn.ConvTranspose2d(32, 16, 2, 2)
        self.middle = nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1))
        self.leave = nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 1, 3, padding=1))
        nn.init.zeros_(self.leave[2].weight)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, angle = given
        amount = self.amount(torch.stack((angle.sin(), angle.cos()), 1))
        fine = self.enter(x) + amount[:, :, None, None]
        coarse = self.down(fine)
        return self.leave(torch.cat((fine, self.up(coarse + self.middle(coarse))), 1))


def diffusion() -> Training:
    def noisy() -> Iterator[tuple[Any, Tensor]]:
        for pictures, _ in images(batch=16):
            angle, noise = torch.rand(16) * 1.5, torch.randn_like(pictures)
            shares = angle.cos()[:, None, None, None], angle.sin()[:, None, None, None]
            yield (shares[0] * pictures + shares[1] * noise, angle), noise

    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return supervised(model, noisy(), loss=functional.mse_loss, optimizer=optimizer, clip=1.0)


def contrastive() -> Training:
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    source = vectors()

    def step(number: int) -> dict[str, Any]:
        inputs, _ = next(source)
        one, other = (functional.normalize(model(inputs + 0.3 * torch.randn_like(inputs))) for _ in range(2))
        loss = functional.cross_entropy(one @ other.t() / 0.2, torch.arange(len(inputs)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    return Training(model, step)


class Tied(nn.Module):
    """The words' embedding is the last layer too."""

    def __init__(self, words: int = 11, width: int = 32) -> None:
        super().__init__()
        self.words, self.gru = nn.Embedding(words, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.gru(self.words(text))[0]).transpose(1, 2)


def tied() -> Training:
    model = Tied()
    return supervised(model, sequences(), optimizer=torch.optim.Adam(model.parameters(), lr=5e-3), clip=1.0)


def second_order() -> Training:
    """LBFGS with a line search, on one batch."""
    model = mlp(16, 32, 1, activation=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    inputs, targets = next(regression(batch=128))
    losses: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses.append(functional.mse_loss(model(inputs), targets))
        losses[-1].backward()
        return losses[-1]

    def step(number: int) -> dict[str, Any]:
        optimizer.step(closure)
        return {"loss": losses[-1]}

    return Training(model, step)


def hinge() -> Training:
    """Triplets: most losses are 0 in the end, and a few are not."""
    model = mlp(16, 64, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    source = vectors(batch=128)

    def step(number: int) -> dict[str, Any]:
        inputs, _ = next(source)
        near = inputs[:64] + 0.1 * torch.randn(64, 16)
        loss = functional.triplet_margin_loss(model(inputs[:64]), model(near), model(inputs[64:]), margin=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    return Training(model, step)


MODERN: dict[str, Callable[[], Training]] = {
    "vision transformer": vision_transformer,
    "mixture of experts": experts,
    "low-rank adapters": adapters,
    "residual network, batches of two": residual,
    "denoising diffusion": diffusion,
    "contrastive learning": contrastive,
    "GRU with tied weights": tied,
    "LBFGS": second_order,
    "triplets": hinge,
}

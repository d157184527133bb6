"""Healthy trainings of different kinds: no rule may raise a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo_helpers import Training, images, mlp, sequences, supervised, vectors
from zoo_modern_helpers import MODERN


def multilayer() -> Training:
    model = mlp(16, 32, 32, 4)
    return supervised(model, vectors(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def convolutional() -> Training:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(64, 4),
    )  # fmt: skip
    return supervised(model, images())


class UNet(nn.Module):
    """Two levels, GroupNorm, one skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = self._block(1, 8)
        self.inner = self._block(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = self._block(16, 8)
        self.head = nn.Conv2d(8, 1, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = self.inner(functional.max_pool2d(fine, 2))
        return self.head(self.out(torch.cat((fine, self.up(coarse)), 1)))


def unet() -> Training:
    def masks() -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, _ in images(batch=8):
            yield inputs, (functional.avg_pool2d(inputs, 3, 1, 1) > 0.6).float()

    return supervised(UNet(), masks(), loss=functional.binary_cross_entropy_with_logits)


class Transformer(nn.Module):
    def __init__(self, words: int = 11, width: int = 32, length: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.words(text) + self.places(torch.arange(length))
        return self.head(self.norm(self.layers(hidden, mask=mask, is_causal=True))).transpose(1, 2)


def transformer() -> Training:
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return supervised(
        model,
        sequences(),
        optimizer=optimizer,
        clip=1.0,
        scheduler=lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda step: min((step + 1) / 10, 1.0)),
    )


class Recurrent(nn.Module):
    def __init__(self, words: int = 11, width: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(text))[0]).transpose(1, 2)


def lstm() -> Training:
    model = Recurrent()
    return supervised(model, sequences(), optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), clip=1.0)


def adversarial() -> Training:
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    first = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    second = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    loss = functional.binary_cross_entropy_with_logits

    def step(number: int) -> dict[str, Any]:
        real = torch.randn(64, 2) * 0.5 + torch.tensor([1.0, -1.0])
        made = generator(torch.randn(64, 4))
        critical = loss(critic(real), torch.ones(64, 1)) + loss(critic(made.detach()), torch.zeros(64, 1))
        second.zero_grad()
        critical.backward()
        second.step()
        fooling = loss(critic(made), torch.ones(64, 1))
        first.zero_grad()
        fooling.backward()
        first.step()
        return {"loss": fooling, "loss_critic": critical}

    return Training({"generator": generator, "critic": critic}, step)


def autoencoder() -> Training:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(144, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 32), nn.Tanh(),
        nn.Linear(32, 144), nn.Sigmoid(),
    )  # fmt: skip

    def pictures() -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, _ in images(batch=32):
            squashed = torch.sigmoid(2 * inputs)
            yield squashed, squashed.flatten(1)

    return supervised(model, pictures(), loss=functional.mse_loss)


def sparse() -> Training:
    """An overcomplete code of which few units are on for each sample: most outputs are 0, few units are dead."""
    encode, decode = nn.Linear(16, 64), nn.Linear(64, 16)
    with torch.no_grad():
        encode.bias.fill_(-1.0)
    model = nn.Sequential(encode, nn.ReLU(), decode)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    source = vectors(batch=128)

    def step(number: int) -> dict[str, Any]:
        inputs, _ = next(source)
        code = model[1](model[0](inputs))
        loss = functional.mse_loss(model(inputs), inputs) + 0.02 * code.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    return Training(model, step)


def frozen() -> Training:
    """A backbone that is frozen, its BatchNorm and Dropout in eval mode, and a new head."""
    backbone = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU()
    )
    backbone.requires_grad_(False)
    model = nn.Sequential(backbone, nn.Linear(32, 4))
    backbone.eval()
    return supervised(model, vectors(), optimizer=torch.optim.Adam(model[1].parameters(), lr=1e-2))


def low_precision() -> Training:
    """Autocast to bfloat16, the parameters in float32."""
    model = mlp(16, 64, 64, 4, activation=nn.GELU)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.float(), targets)

    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    wrapped = Autocast()
    return supervised(wrapped, vectors(), loss=loss, optimizer=torch.optim.AdamW(wrapped.parameters(), lr=3e-3))


HEALTHY: dict[str, Callable[[], Training]] = {
    "MLP": multilayer,
    "CNN with BatchNorm": convolutional,
    "U-Net with GroupNorm": unet,
    "transformer": transformer,
    "LSTM": lstm,
    "GAN": adversarial,
    "autoencoder": autoencoder,
    "sparse ReLU network": sparse,
    "fine-tuning a frozen backbone": frozen,
    "bfloat16 autocast": low_precision,
    **MODERN,
}

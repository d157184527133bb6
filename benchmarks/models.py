"""The model that overhead is measured on: a U-Net of about 10 million parameters, built from public layers."""

from __future__ import annotations

import torch
from torch import nn


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions, each with GroupNorm and SiLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """The classic shape: double convolutions, three times down by pooling, three times up, skips concatenated."""

    def __init__(self, width: int = 72, channels: int = 3) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(map(double_convolution, [channels, *widths], widths))
        self.pool = nn.ModuleList(nn.MaxPool2d(2) for _ in widths[1:])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, stride=2) for size in reversed(widths[:-1]))
        self.up = nn.ModuleList(double_convolution(2 * size, size) for size in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else self.pool[number - 1](x))
            skips.append(x)
        skips.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)

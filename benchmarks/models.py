"""The model that overhead is measured on: a U-Net of about 10 million parameters, built from public layers."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Two 3x3 convolutions with GroupNorm and SiLU, and a residual connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.act = nn.SiLU()
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(self.act(self.norm1(x)))
        h = self.conv2(self.act(self.norm2(h)))
        return h + self.skip(x)


class UNet(nn.Module):
    """Three resolutions; on 3x32x32 images, as in image generation."""

    def __init__(self, width: int = 64, channels: int = 3) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList()
        previous = width
        for size in widths:
            self.down.append(nn.ModuleList([Block(previous, size), nn.Conv2d(size, size, 3, stride=2, padding=1)]))
            previous = size
        self.middle = nn.Sequential(*(Block(previous, previous) for _ in range(4)))
        self.up = nn.ModuleList()
        for size in reversed(widths):
            self.up.append(nn.ModuleList([nn.Upsample(scale_factor=2), Block(previous + size, size)]))
            previous = size
        self.norm = nn.GroupNorm(8, previous)
        self.act = nn.SiLU()
        self.head = nn.Conv2d(previous, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        skips = []
        for block, shrink in self.down:
            h = block(h)
            skips.append(h)
            h = shrink(h)
        h = self.middle(h)
        for grow, block in self.up:
            h = block(torch.cat([grow(h), skips.pop()], dim=1))
        return self.head(self.act(self.norm(h)))

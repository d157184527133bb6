"""A small residual network with GroupNorm, for the demo and the benchmarks. Imports torch."""

import torch
from torch import nn

# Far below what GroupNorm puts out (mean 0, standard deviation 1): no unit of the ReLU after it ever fires.
DEAD_BIAS = -8.0


class ResidualBlock(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))): [N, channels, H, W] to the same shape."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.relu2 = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.relu1(self.norm1(self.conv1(x)))
        result: torch.Tensor = self.relu2(x + self.norm2(self.conv2(inner)))
        return result


class ResidualNetwork(nn.Module):
    """Stem, residual blocks, global mean, linear head: images [N, 1, H, W] to logits [N, classes]."""

    def __init__(self, channels: int = 16, blocks: int = 3, classes: int = 10, groups: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False),
            nn.GroupNorm(groups, channels),
            nn.ReLU(inplace=True),
        )
        self.blocks = nn.Sequential(*(ResidualBlock(channels, groups) for _ in range(blocks)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.pool(self.blocks(self.stem(images))).flatten(1))
        return logits


def kill(network: ResidualNetwork, block: int) -> str:
    """Make the inner ReLU of one block dead from the start; returns its path.

    The block then adds nothing but a constant, no gradient reaches its convolutions, and the skip connection
    lets the rest of the network learn on: the loss alone does not tell.
    """
    residual = network.blocks[block]
    assert isinstance(residual, ResidualBlock)
    with torch.no_grad():
        residual.norm1.bias.fill_(DEAD_BIAS)
    return f"blocks.{block}.relu1"

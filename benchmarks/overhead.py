"""Ratio of step time with statsbridge to without: interleaved blocks of some seconds in one process, medians.

Each variant trains its own copy of the model; a round runs one block of each, in turning order. All work counts: what
the background does during the steps, and after a block until its rows are on disk. Ratios are to the mean of the two
plain variants of a round, whose distance is the noise.

    python benchmarks/overhead.py [--rounds 16] [--model unet|demo|both]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from models import UNet
from rich.console import Console
from rich.table import Table
from torch import nn

import statsbridge
from statsbridge.cli.demo_model import ResidualNetwork

SIZES = (32, 48)  # of images: their work grows, that for parameters does not
VARIANTS: dict[str, int | None] = {"plain": None, "plain again": None, "every step": 1, "every 10th": 10}


@dataclass
class Variant:
    """One copy of the model in training, watched or not."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module], torch.Tensor]
    run: statsbridge.Run | None

    def block(self, steps: int) -> float:
        """Seconds for the steps of one block."""
        begin = time.perf_counter()
        for _ in range(steps):
            loss = self.loss(self.model)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.run is not None:
                self.run.step(loss=loss)
        if self.run is not None:
            self.run._writer.flush()
        return time.perf_counter() - begin


def unet_loss(size: int) -> Callable[[nn.Module], torch.Tensor]:
    def loss(model: nn.Module) -> torch.Tensor:
        images = torch.randn(16, 3, size, size)
        return (model(images) - images).pow(2).mean()

    return loss


def digits_loss(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(torch.randn(64, 1, 8, 8)), torch.randint(0, 10, (64,)))


def measure(name: str, model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], rounds: int, steps: int) -> None:
    """Print one table."""
    variants = {}
    folder = tempfile.TemporaryDirectory(prefix="statsbridge-bench-")
    for label, every in VARIANTS.items():
        own = copy.deepcopy(model)
        run = None if every is None else statsbridge.init(own, every=every, dir=folder.name)
        variants[label] = Variant(own, torch.optim.AdamW(own.parameters(), lr=1e-4), loss, run)
    times: dict[str, list[float]] = {label: [] for label in variants}
    labels = list(variants)
    for number in range(rounds + 1):
        for label in labels[number % 4 :] + labels[: number % 4]:
            seconds = variants[label].block(steps)
            if number:  # the first round warms up
                times[label].append(seconds / steps)
    for variant in variants.values():
        if variant.run is not None:
            variant.run.finish()
    folder.cleanup()

    parameters = sum(p.numel() for p in model.parameters())
    modules = len(list(model.modules()))
    table = Table(
        title=f"{name}: {parameters / 1e6:.2f}M parameters, {modules} modules, {rounds} rounds of {steps} steps"
    )
    for column in ("variant", "median ms a step", "ratio (median of rounds)", "quartiles"):
        table.add_column(column, justify="right")
    usual = [statistics.mean(both) for both in zip(times["plain"], times["plain again"], strict=True)]
    for label in labels:
        ratios = [a / b for a, b in zip(times[label], usual, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        table.add_row(label, f"{statistics.median(times[label]) * 1e3:.2f}", f"{middle:.3f}", f"{low:.3f} … {high:.3f}")
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--model", choices=("unet", "demo", "both"), default="both")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.model in ("unet", "both"):
        for size in SIZES:
            measure(f"U-Net, batch 16, 3x{size}x{size}", UNet(), unet_loss(size), arguments.rounds, 10)
    if arguments.model in ("demo", "both"):
        measure("residual CNN of the demo, batch 64", ResidualNetwork(), digits_loss, arguments.rounds, 400)


if __name__ == "__main__":
    main()

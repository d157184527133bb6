"""Error of kl_unit_gaussian over random tensors of known distributions: the tables of docs/statistics.md.

A drawn tensor has not exactly the mean and spread of its distribution, and its divergence truly is another one. So
there are three tables: the error against the distribution's own value; of that error, what would remain if the shape
were known exactly (mean and spread of the draw alone); and the error of the estimate of the shape alone.

    python benchmarks/divergence.py [--draws 2000]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from statsbridge.collect.statistics import Reducer, Wanted, measure, pack

CONSOLE = Console(width=170)
SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 65_536, 1_000_000)
MOST_NUMBERS = 2**24  # drawn in all for one cell: fewer tensors where they are large
FEWEST_DRAWS = 20
GAUSSIAN_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)

Draw = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Distribution:
    """How to draw from it, its mean, its standard deviation and its differential entropy in nats."""

    name: str
    draw: Draw
    mean: float
    std: float
    entropy: float

    @property
    def shape(self) -> float:
        """KL(p ‖ N(mean, std²)), in nats."""
        return GAUSSIAN_ENTROPY + math.log(self.std) - self.entropy

    @property
    def divergence(self) -> float:
        """KL(p ‖ N(0, 1)), in nats."""
        return float(of_gaussian(self.mean, self.std)) + self.shape


def of_gaussian(mean: float | np.ndarray, std: float | np.ndarray) -> np.ndarray:
    """KL(N(mean, std²) ‖ N(0, 1)), in nats: the part of the divergence that mean and spread decide."""
    return np.asarray(0.5 * (np.square(mean) + np.square(std) - 1) - np.log(std))


def gaussian(name: str, mean: float, std: float) -> Distribution:
    return Distribution(name, lambda n: mean + std * torch.randn(n), mean, std, GAUSSIAN_ENTROPY + math.log(std))


def laplace(size: int) -> torch.Tensor:
    return torch.distributions.Laplace(0.0, 1.0).sample((size,))


def two_gaussians() -> Distribution:
    """½N(−1.5, ½²) + ½N(1.5, ½²), with its entropy by numerical integration."""
    x = np.linspace(-8, 8, 400_001)
    density = sum(np.exp(-2 * (x - centre) ** 2) for centre in (-1.5, 1.5)) / math.sqrt(2 * math.pi)
    entropy = float(-np.trapezoid(density * np.log(density), x))

    def draw(size: int) -> torch.Tensor:
        return torch.randn(size) / 2 + 1.5 * (2 * torch.randint(0, 2, (size,)) - 1)

    return Distribution("two Gaussians", draw, 0.0, math.sqrt(2.5), entropy)


DISTRIBUTIONS = (
    gaussian("N(0, 1)", 0, 1),
    gaussian("N(0, 0.02²)", 0, 0.02),
    gaussian("N(0, 2²)", 0, 2),
    gaussian("N(1, 1)", 1, 1),
    gaussian("N(3, 2²)", 3, 2),
    Distribution("uniform(−1, 1)", lambda n: 2 * torch.rand(n) - 1, 0.0, math.sqrt(1 / 3), math.log(2)),
    Distribution("Laplace(0, 1)", laplace, 0.0, math.sqrt(2), 1 + math.log(2)),
    two_gaussians(),
)


@dataclass(frozen=True)
class Errors:
    """Over many tensors of one size from one distribution, in nats, shape `[draws]`."""

    whole: np.ndarray  # of what is recorded, against the distribution's own value
    of_draw: np.ndarray  # of the value that the draw's mean and spread give with the right shape
    shape: np.ndarray  # of the estimated shape


def errors(distribution: Distribution, size: int, draws: int) -> Errors:
    """Measure tensors as a training does."""
    wanted = Wanted(kl=True)
    pieces = [measure(distribution.draw(size), wanted) for _ in range(draws)]
    pack(pieces)
    reducer = Reducer(wanted)
    reducer.add(list(range(draws)), pieces)
    rows = reducer.finish(draws)
    whole = rows["kl_unit_gaussian"] - distribution.divergence
    of_draw = of_gaussian(rows["mean"], rows["std"]) + distribution.shape - distribution.divergence
    return Errors(whole, of_draw, whole - of_draw)


def mean_and_most(found: np.ndarray) -> str:
    return f"{found.mean():+.3f} ({np.quantile(np.abs(found), 0.95):.3f})".replace("-", "−")


def root_mean_square(found: np.ndarray) -> str:
    return f"{math.sqrt(np.mean(found**2)):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    most = parser.parse_args().draws
    torch.manual_seed(0)
    titles = {
        "whole": "error of kl_unit_gaussian: mean (95 % are below)",
        "of_draw": "of it, the draw's: mean and spread of the tensor are not the distribution's",
        "shape": "error of the shape alone: root mean square",
    }
    tables = {part: Table("elements", "tensors", title=title) for part, title in titles.items()}
    for table in tables.values():
        for one in DISTRIBUTIONS:
            table.add_column(one.name, justify="right")
    for part in ("whole", "of_draw"):
        tables[part].add_row("right value", "", *(f"{one.divergence:.3f}" for one in DISTRIBUTIONS))
    for size in SIZES:
        draws = min(most, max(FEWEST_DRAWS, MOST_NUMBERS // size))
        row = [errors(one, size, draws) for one in DISTRIBUTIONS]
        head = f"{size:,}", f"{draws:,}"
        tables["whole"].add_row(*head, *(mean_and_most(cell.whole) for cell in row))
        tables["of_draw"].add_row(*head, *(mean_and_most(cell.of_draw) for cell in row))
        tables["shape"].add_row(*head, *(root_mean_square(cell.shape) for cell in row))
    for table in tables.values():
        CONSOLE.print(table)


if __name__ == "__main__":
    main()

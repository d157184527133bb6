"""statsbridge beside your own SummaryWriter: both write below one folder, and TensorBoard shows both.

python examples/tensorboard_alongside.py
tensorboard --logdir runs
"""

from pathlib import Path

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import statsbridge


def main(steps: int = 60) -> None:
    """Train a small network, with one curve of your own and those of statsbridge."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(256, 8)
    targets = 2 * inputs[:, :1] - inputs[:, 1:2] + 0.1 * torch.randn(256, 1)

    writer = SummaryWriter("runs/mine")
    run = statsbridge.init(model, backend="tensorboard:runs", every=5, histograms=True, name="tensorboard")
    for step in range(steps):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        writer.add_scalar("my/loss", loss.item(), step)
        run.step(loss=loss)
    run.finish()
    writer.close()

    print(run.path)
    for file in sorted(Path("runs").rglob("*tfevents*")):
        print(file)


if __name__ == "__main__":
    main()

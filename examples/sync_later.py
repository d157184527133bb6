"""A run recorded locally, delivered to a tracker later, from another process and perhaps another machine.

python examples/sync_later.py            # needs tensorboard
"""

from pathlib import Path

import torch
from torch import nn

import statsbridge
from statsbridge.cli import app


def main(steps: int = 60) -> None:
    """Record on a machine without network, say; then deliver it with `statsbridge sync`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, targets = torch.randn(256, 8), torch.randn(256, 1)
    run = statsbridge.init(model, every=10, name="local first")
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
    run.finish()

    # Weeks later: all of it to a tracker that the run had never heard of. In a shell:
    #   statsbridge sync "local first" --to tensorboard:dashboard
    app(["sync", "local first", "--to", f"tensorboard:{Path('dashboard').absolute()}"], standalone_mode=False)
    # From then on it is a mirror of the run: what a later sync would send is only what is new.
    app(["sync", "local first"], standalone_mode=False)
    print(f"\ntensorboard --logdir dashboard      # shows {run.path}")


if __name__ == "__main__":
    main()

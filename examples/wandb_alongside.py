"""Your own W&B code, and statsbridge beside it: W&B gets a second run, in the group of yours.

python examples/wandb_alongside.py       # needs no account: it runs offline, `wandb sync` would upload both runs
"""

import torch
import wandb
from torch import nn

import statsbridge


def main(steps: int = 200) -> None:
    """Train a small network; your code logs to your run as ever, and statsbridge to its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs = torch.randn(1024, 20)
    targets = inputs[:, :1] * inputs[:, 1:2]

    # Your tracking code. statsbridge.init() comes after it, to find the run's project, group, mode and folder.
    yours = wandb.init(project="demo", group="alongside", mode="offline", settings=wandb.Settings(silent=True))

    run = statsbridge.init(model, backend="wandb", every=10, name="wandb alongside")
    for step in range(steps):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
        yours.log({"train/loss": loss.item()}, step=step)  # your names, your steps: statsbridge touches neither
    run.finish()
    yours.finish()

    print("the record:", run.path)
    print("both W&B runs are in ./wandb; upload them with: wandb sync")
    print(f"\nstatsbridge verify {run.path} --against wandb")


if __name__ == "__main__":
    main()

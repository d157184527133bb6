"""A restricted run: a policy file says where it may go; everywhere else is refused before a tracker is imported.

python examples/restricted_run.py            # needs scikit-learn and tensorboard
"""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import statsbridge
from statsbridge.mirror.audit import read_audit

POLICY = """\
names = "hashed"                          # modules, types and tensors leave as keyed hashes

[[destinations]]
backend = "tensorboard"
path = "mirror"                           # the folder next to this file, and nowhere else
channels = ["metrics"]
sites = ["activation", "update"]
scalars = ["loss", "lr/*"]
"""


def main(epochs: int = 2) -> None:
    """Write a policy, see what it refuses, train under it, and look at what has left."""
    Path("statsbridge-policy.toml").write_text(POLICY)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    try:
        statsbridge.init(model, backend="wandb:https://api.wandb.ai", restricted=True)
    except statsbridge.PolicyError as error:
        print(f"refused: {error}\n")

    folder = Path("mirror").absolute()
    run = statsbridge.init(model, backend=f"tensorboard:{folder}", restricted=True, every=10, name="restricted run")
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
    run.finish()

    print("the record has everything, in plain words:")
    print(statsbridge.load(run.path))
    print("\nwhat has left:")
    for row in read_audit(run.path).to_pylist():
        print(f"  {row['rows']} {row['channel']} of steps {row['first_step']} to {row['last_step']}: {row['fields']}")
    print(f"\nstatsbridge policy {run.path}")


if __name__ == "__main__":
    main()

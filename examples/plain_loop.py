"""A plain PyTorch training loop with statsbridge: the four lines to add are marked.

python examples/plain_loop.py            # needs scikit-learn for its handwritten digits
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import statsbridge  # 1


def main(epochs: int = 5) -> None:
    """Train a small network on 8x8 images of digits, and look at what was recorded."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    run = statsbridge.init(model, every=10, name="plain loop", config={"lr": 3e-3, "epochs": epochs})  # 2
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)  # 3
    run.finish()  # 4

    data = statsbridge.load(run.path)
    print(data)
    print("\nupdate ratio of the first layer's weight (about 1e-3 is usual):")
    for row in data.series("0", "update", "update_ratio", tensor="weight").to_pylist():
        print(f"  step {row['step']:4d}  {row['value']:.2e}")
    print(f"\nstatsbridge show {run.path}")


if __name__ == "__main__":
    main()

"""Where each module stands in the flow of data: before training, and in the record of one.

python examples/order_and_depth.py        # the query needs duckdb: pip install "statsbridge[sql]"
"""

import torch
from torch import nn

import statsbridge


class TwoBranches(nn.Module):
    """A deep branch and a shallow one, declared the wrong way round."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 1)
        self.shallow = nn.Linear(8, 16)
        self.deep = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, x):
        return self.head(self.deep(x) + self.shallow(x))


def main(steps: int = 20) -> None:
    """Print the order table of an untrained model, then train it and ask the record for spread by depth."""
    torch.manual_seed(0)
    model = TwoBranches()
    inputs = torch.randn(256, 8)

    table = statsbridge.trace(model, inputs)  # nothing of the model changes
    for row in table.select(["depth", "order", "module", "type"]).to_pylist():
        print(row)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = statsbridge.init(model, every=10, name="order and depth")
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
    run.finish()

    spread = statsbridge.load(run.path).query(
        """
        SELECT s.step, s.depth, m.parent, s.module, s.std
        FROM stats s ASOF JOIN modules m  -- the last trace that is not after the step
          ON s.rank = m.rank AND s.attempt = m.attempt AND s.module = m.module AND s.call = m.call AND s.step >= m.step
        WHERE s.site = 'activation' ORDER BY s.step, s."order"
        """
    )
    for row in spread.to_pylist():
        print(row)
    print(f"recorded in {run.path}")


if __name__ == "__main__":
    main()

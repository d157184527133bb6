"""Your own Aim code, and statsbridge beside it: the repository gets a second run, next to yours.

python examples/aim_local.py             # needs aim (Python 3.12 at most), and no server
"""

import aim
import torch
from torch import nn

import statsbridge


def main(steps: int = 60) -> None:
    """Train a small network; your code tracks in your run as ever, and statsbridge in its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs = torch.randn(1024, 20)
    targets = inputs[:, :1] * inputs[:, 1:2]

    yours = aim.Run(experiment="yours", capture_terminal_logs=False, system_tracking_interval=None)

    run = statsbridge.init(model, backend="aim", every=10, name="aim local")  # the repository that yours is in
    for step in range(steps):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
        yours.track(loss.item(), name="train/loss", step=step)
    run.finish()
    yours.close()

    query = "run.name == 'aim local' and metric.name == 'activation/std' and metric.context.depth == 2"
    for found in aim.Repo.default_repo().query_metrics(query, report_mode=0).iter():
        step_numbers, (values, *_) = found.data.items_list()
        print(f"{found.name} of {found.context['module']} ({found.context['type']}):")
        for step, value in zip(step_numbers, values, strict=True):
            print(f"  step {step:3d}  {value:.4f}")
    print(f"\naim up\nstatsbridge verify {run.path} --against aim")


if __name__ == "__main__":
    main()

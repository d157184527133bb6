"""MLflow tracking code that a team already has, and statsbridge beside it, in the same MLflow run.

python examples/mlflow_alongside.py      # needs mlflow, and scikit-learn for its handwritten digits
mlflow ui --backend-store-uri sqlite:///mlflow.db
"""

import logging

import mlflow
import torch
from sklearn.datasets import load_digits
from torch import nn

import statsbridge
from statsbridge.mirror.verify import verify

logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells at length how it makes its tables


def main(epochs: int = 3) -> None:
    """Train a small network, log as ever, and compare what MLflow holds with what was recorded."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.set_experiment("digits")
    with mlflow.start_run(run_name="alongside") as mlflow_run:
        mlflow.log_param("lr", 3e-3)
        # Where a run is active, statsbridge writes into it, under names that begin with statsbridge/.
        run = statsbridge.init(model, backend="mlflow", every=10)
        step = 0
        for _ in range(epochs):
            for batch in torch.randperm(len(images)).split(64):
                loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                mlflow.log_metric("train_loss", loss.item(), step=step)
                run.step(loss=loss)
                step += 1
        run.finish()
        mlflow.log_metric("accuracy", (model(images).argmax(1) == labels).float().mean().item())

    metrics = mlflow.get_run(mlflow_run.info.run_id).data.metrics
    ours = [name for name in metrics if name.startswith("statsbridge/")]
    print(f"the MLflow run has {len(metrics) - len(ours)} metrics of this script's and {len(ours)} of statsbridge's")
    for found in verify(run.path, "mlflow"):
        print(f"{found.same} of {found.compared} values in MLflow are just as they were recorded")
    print(f"\nstatsbridge verify {run.path} --against mlflow")


if __name__ == "__main__":
    main()

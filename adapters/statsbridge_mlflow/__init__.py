"""The MLflow adapter of statsbridge: `backend="mlflow"`, or `MLflow(…)` for its settings."""

from .adapter import MLflow

__all__ = ["MLflow"]

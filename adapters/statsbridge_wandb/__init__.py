"""The wandb adapter of statsbridge: a run of its own beside the user's, or rows inside the user's run."""

from .adapter import WandB

__all__ = ["WandB"]

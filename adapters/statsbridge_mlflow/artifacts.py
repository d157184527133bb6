"""Files of a run: figures and the copy of the record, at the run's artifact URI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from statsbridge.errors import PolicyError, Reject, StatsBridgeError

from .store import RunState, Store


def upload(store: Store, run: RunState, files: Sequence[tuple[Path, str]], *, restricted: bool) -> None:
    """Store each file under its path.

    Raises PolicyError where a restricted run's files would go to a place that the policy was not asked about,
    Reject where they cannot be stored, whatever becomes of the values.
    """
    if restricted and not store.own_artifacts(run):
        raise PolicyError(
            f"MLflow would keep this run's files at {run.artifacts}, which is not the address that the policy allows: "
            "let the server take the artifacts itself, or leave the channels figures and artifacts out of the policy"
        )
    for file, path in files:
        try:
            store.upload(run, file, path)
        except StatsBridgeError:
            raise
        except Exception as error:
            # Each kind of artifact store has errors of its own.
            raise Reject(f"{path} cannot be stored at {run.artifacts}: {error!r}", points=()) from error

"""Opening the store: which kind it is, what a restricted run turns off, and who is not told."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from statsbridge.errors import MirrorError, PolicyError
from statsbridge.mirror import Destination

from . import places
from .store import Store

_SERVERS = ("http:", "https:")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep MLflow's log of this thread's calls off the user's terminal: errors are raised as well, and said once."""
    from mlflow.utils import logging_utils

    # Versions before it had this function say what they say.
    with getattr(logging_utils, "suppress_logs_in_thread", nullcontext)():
        yield


def connect(target: str | None, destination: Destination, *, restricted: bool) -> Store:
    """The store at `destination`, with the credentials that `target` or the user's own tracking URI hold for it.

    Raises MirrorError where it cannot be used, PolicyError where a restricted run may not use it.
    """
    address = destination.address
    if address.startswith("file:") or os.path.isabs(address):
        raise MirrorError(
            f"{address} is a folder: MLflow's file store keeps a value twice when it is sent again after a crash. "
            "Use a database, such as sqlite:///mlflow.db, or a server"
        )
    if address in {"sqlite://", "sqlite:///:memory:"}:
        raise MirrorError(f"{address} is gone when this process ends: use a file, such as sqlite:///mlflow.db")
    server = address.startswith(_SERVERS)
    uri = address
    if restricted:
        if not server and places.sqlite_path(address) is None:
            raise PolicyError(f"a restricted run goes to an MLflow server or an sqlite file only, not to {address}")
        _turn_telemetry_off()
    else:
        for known in (target, places.absolute(places.user_tracking_uri())):
            if known is not None and places.without_secrets(known) == address:
                uri = known
                break
    try:
        import mlflow  # noqa: F401 - the first import takes a second; what fails is told apart from the rest
    except ImportError as error:
        raise MirrorError(f"MLflow cannot be imported ({error}): pip install 'statsbridge[mlflow]'") from error
    with quiet():
        if server:
            from .rest import RestStore

            return RestStore(uri, address, restricted=restricted)
        from .client import ClientStore

        return ClientStore(uri, address, restricted=restricted)


def _turn_telemetry_off() -> None:
    """Usage reports of MLflow's own makers: before its import, which starts them, or after."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    telemetry = sys.modules.get("mlflow.telemetry")
    if telemetry is not None:
        telemetry.set_telemetry_client()  # reads the variable again and drops what waits to be sent

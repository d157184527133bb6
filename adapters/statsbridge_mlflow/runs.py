"""The run that a mirror writes to: the user's, or one of its own, and what is said about it there."""

from __future__ import annotations

from collections.abc import Mapping

from statsbridge import __version__
from statsbridge.errors import MirrorError
from statsbridge.mirror import RunInfo

from . import names
from .store import NotFoundError, Refused, RunState, Store

DEFAULT_EXPERIMENT = "0"

_RUN_ID = "statsbridge.run_id"
_OWN = "statsbridge.own_run"


def existing(store: Store, run_id: str) -> RunState:
    """The run. Raises MirrorError where there is none, or where it lies in MLflow's trash."""
    try:
        run = store.run(run_id)
    except (NotFoundError, Refused) as error:
        raise MirrorError(f"MLflow has no run {run_id}: {error}") from error
    if run.deleted:
        raise MirrorError(
            f"the MLflow run {run_id} is deleted: bring it back with `mlflow runs restore --run-id {run_id}`"
        )
    return run


def own_run(store: Store, info: RunInfo, details: Mapping[str, str]) -> str:
    """The id of a run that is ours alone: made now, or already made by a process that died before it was noted."""
    try:
        if name := details.get("experiment"):
            experiment = store.experiment(name)
        else:
            experiment = details.get("experiment_id", DEFAULT_EXPERIMENT)
        tags = {_RUN_ID: info.id, _OWN: "true"}
        start = int(info.created.timestamp() * 1000)
        return store.find_run(experiment, tags) or store.create_run(
            experiment, info.name or info.id, start=start, tags=tags
        )
    except (NotFoundError, Refused) as error:
        raise MirrorError(f"MLflow makes no run: {error}") from error


def describe(store: Store, run: RunState, info: RunInfo) -> None:
    """Set tags and parameters: those of the policy's choice, beside the user's and never in their place."""
    tags = {_RUN_ID: info.id, "statsbridge.version": __version__, "statsbridge.attempt": str(info.attempt)}
    tags |= {f"statsbridge.versions.{name}": version for name, version in info.versions.items()}
    news = {names.plain(name): text for name, text in tags.items() if run.tags.get(names.plain(name)) != text}
    if news:
        store.set_tags(run.id, news)
    # MLflow refuses another value for a parameter that a run has: the first attempt's stay.
    parameters = {name: text for name, text in names.parameters(info.config).items() if name not in run.parameters}
    try:
        if parameters:
            store.log_parameters(run.id, parameters)
    except Refused as error:
        raise MirrorError(f"MLflow refuses the configuration: {error}") from error

"""An MLflow store by MLflow's own client: databases that this process opens itself, and whatever has no plain URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

from mlflow import MlflowClient
from mlflow.entities import Metric as MlflowMetric
from mlflow.entities import Param, RunTag
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import OperationalError

from statsbridge.errors import MirrorError, Retry

from .names import plain
from .places import sqlite_path
from .store import Metric, NotFoundError, Refused, RunState, tag_filter

_BAD_REQUEST = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"}
_NO_ACCESS = {"UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED"}
_PARAMETERS_PER_CALL = 100

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _translated(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Turn MLflow's errors into ours, by their code."""

    @wraps(method)
    def call(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        try:
            return method(*arguments, **keywords)
        except MlflowException as error:
            text = str(error.message)[:500]
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise NotFoundError(text) from error
            if error.error_code in _BAD_REQUEST:
                raise Refused(text) from error
            if error.error_code in _NO_ACCESS:
                raise MirrorError(text) from error
            raise Retry(text) from error

    return call


class ClientStore:
    """The store at the tracking URI `uri`. `restricted`: a new database is made without this process's own folder."""

    # A database locks its rows, sqlite its file: a second request would only wait for the first.
    at_once = 1

    def __init__(self, uri: str, address: str, *, restricted: bool) -> None:
        file = sqlite_path(uri)
        self._artifacts = None
        if file is not None:
            _check_sqlite(file)
            if restricted:
                self._artifacts = file.with_name("mlruns").as_posix()
                _make_database(uri, file, self._artifacts)
        self._uri = uri
        try:
            self._client = MlflowClient(uri)
        except Exception as error:
            text = f"{address} cannot be opened: {' '.join(str(error).split())[:500]}"
            raise Retry(text) if isinstance(error, OperationalError) else MirrorError(text) from error

    @_translated
    def run(self, run_id: str) -> RunState:
        run = self._client.get_run(run_id)
        return RunState(
            id=run.info.run_id,
            status=run.info.status,
            deleted=run.info.lifecycle_stage == "deleted",
            artifacts=run.info.artifact_uri or "",
            tags=dict(run.data.tags),
            parameters=dict(run.data.params),
            metrics=frozenset(run.data.metrics),
        )

    @_translated
    def experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        location = None if self._artifacts is None else f"{self._artifacts}/{plain(name)}"
        return str(self._client.create_experiment(name, artifact_location=location))

    @_translated
    def find_run(self, experiment: str, tags: Mapping[str, str]) -> str | None:
        runs = self._client.search_runs([experiment], tag_filter(tags), max_results=1)
        return str(runs[0].info.run_id) if runs else None

    @_translated
    def create_run(self, experiment: str, name: str, *, start: int, tags: Mapping[str, str]) -> str:
        # The low-level client adds nothing of its own: no user, no source file, no commit.
        run = self._client.create_run(experiment, start_time=start, tags=dict(tags), run_name=name)
        return str(run.info.run_id)

    @_translated
    def log_metrics(self, run_id: str, metrics: Sequence[Metric]) -> None:
        self._log(run_id, metrics=[MlflowMetric(*metric) for metric in metrics])

    @_translated
    def log_parameters(self, run_id: str, parameters: Mapping[str, str]) -> None:
        rows = [Param(*pair) for pair in parameters.items()]
        for start in range(0, len(rows), _PARAMETERS_PER_CALL):
            self._log(run_id, params=rows[start : start + _PARAMETERS_PER_CALL])

    @_translated
    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._log(run_id, tags=[RunTag(*pair) for pair in tags.items()])

    @_translated
    def set_status(self, run_id: str, status: str, *, end: int | None) -> None:
        if end is None:
            self._client.update_run(run_id, status=status)
        else:
            self._client.set_terminated(run_id, status, end)

    @_translated
    def history(self, run_id: str, key: str) -> Iterator[Metric]:
        rows = self._client.get_metric_history(run_id, key)
        return iter([Metric(row.key, float(row.value), row.timestamp, row.step) for row in rows])

    def upload(self, run: RunState, file: Path, path: str) -> None:
        self._client.log_artifact(run.id, str(file), path.rpartition("/")[0] or None)

    def own_artifacts(self, run: RunState) -> bool:
        database, place = sqlite_path(self._uri), urlsplit(run.artifacts)
        if database is None or place.scheme not in {"", "file"}:
            return False
        return Path(os.path.realpath(place.path)).is_relative_to(os.path.realpath(database.parent))

    def _log(self, run_id: str, **rows: Any) -> None:
        # Said here, because $MLFLOW_ENABLE_ASYNC_LOGGING would make it return before anything is stored.
        self._client.log_batch(run_id, **rows, synchronous=True)


def _check_sqlite(file: Path) -> None:
    """Raise MirrorError where MLflow would try for minutes to open what is no database."""
    try:
        with file.open("rb") as content:
            begin = content.read(16)
    except FileNotFoundError:
        return
    except OSError as error:
        raise MirrorError(f"{file} cannot be read: {error}") from error
    if begin not in {b"", b"SQLite format 3\0"}:
        raise MirrorError(f"{file} is no sqlite database")


def _make_database(uri: str, file: Path, artifacts: str) -> None:
    """Make the database so that artifacts lie beside it: MLflow's default would write down the working folder."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    make: Any = SqlAlchemyStore  # which has no types
    if not file.exists() or not file.stat().st_size:
        make(uri, artifacts)

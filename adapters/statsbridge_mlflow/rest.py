"""An MLflow server by its REST API, with MLflow's own credentials but with time limits of our own.

MLflow's client waits for minutes where a server does not answer, by settings that hold for the whole process, the
user's own calls included. These requests give up soon, and the relay tries again.
"""

from __future__ import annotations

import json
import math
import mimetypes
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from mlflow import MlflowClient
from mlflow.exceptions import InvalidUrlException, MlflowException
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from requests.exceptions import SSLError
from requests.utils import get_environ_proxies, select_proxy

from statsbridge.errors import MirrorError, PolicyError, Retry

from .store import Metric, NotFoundError, Refused, RunState, Slow, TooLarge, tag_filter

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
UPLOAD_SECONDS = 120.0

LARGEST_BODY = 900_000
"""Bytes of one request: MLflow's limit is 1 MB, and so is the usual one of a proxy."""

_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
_API = "/api/2.0/mlflow/"
_ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts/"
_METRICS_PER_PAGE = 25_000
_PARAMETERS_PER_CALL = 100

# MLflow types little of what it offers.
_request: Any = http_request
_credentials: Any = get_default_host_creds


class RestStore:
    """The server at `uri`, which may hold credentials; messages call it `address`."""

    # One request leaves a server with several workers idle for most of the time.
    at_once = 4

    def __init__(self, uri: str, address: str, *, restricted: bool) -> None:
        self._uri = uri
        self._address = address
        self._restricted = restricted
        if restricted and select_proxy(uri, get_environ_proxies(uri)):
            raise PolicyError(
                f"requests to {address} would pass through the proxy that the environment names, which no policy has "
                f"allowed: add {urlsplit(address).hostname} to NO_PROXY"
            )

    def run(self, run_id: str) -> RunState:
        run = self._get("runs/get", run_id=run_id)["run"]
        info, data = run["info"], run.get("data", {})
        return RunState(
            id=info["run_id"],
            status=info["status"],
            deleted=info.get("lifecycle_stage") == "deleted",
            artifacts=info.get("artifact_uri", ""),
            tags={tag["key"]: tag.get("value", "") for tag in data.get("tags", ())},
            parameters={parameter["key"]: parameter.get("value", "") for parameter in data.get("params", ())},
            metrics=frozenset(metric["key"] for metric in data.get("metrics", ())),
        )

    def experiment(self, name: str) -> str:
        try:
            found = self._get("experiments/get-by-name", experiment_name=name)["experiment"]
        except NotFoundError:
            return str(self._post("experiments/create", {"name": name})["experiment_id"])
        return str(found["experiment_id"])

    def find_run(self, experiment: str, tags: Mapping[str, str]) -> str | None:
        request = {"experiment_ids": [experiment], "filter": tag_filter(tags), "max_results": 1}
        runs = self._post("runs/search", request).get("runs", ())
        return str(runs[0]["info"]["run_id"]) if runs else None

    def create_run(self, experiment: str, name: str, *, start: int, tags: Mapping[str, str]) -> str:
        request = {"experiment_id": experiment, "run_name": name, "start_time": start, "tags": _pairs(tags)}
        return str(self._post("runs/create", request)["run"]["info"]["run_id"])

    def log_metrics(self, run_id: str, metrics: Sequence[Metric]) -> None:
        rows = ",".join(
            f'{{"key":{_quoted(key)},"value":{_number(value)},"timestamp":{time},"step":{step}}}'
            for key, value, time, step in metrics
        )
        body = f'{{"run_id":{_quoted(run_id)},"metrics":[{rows}]}}'.encode()
        if len(body) > LARGEST_BODY and len(metrics) > 1:
            raise TooLarge(f"{len(body)} bytes")
        self._call("POST", f"{_API}runs/log-batch", data=body)

    def log_parameters(self, run_id: str, parameters: Mapping[str, str]) -> None:
        self._log_pairs(run_id, "params", parameters)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._log_pairs(run_id, "tags", tags)

    def set_status(self, run_id: str, status: str, *, end: int | None) -> None:
        self._post("runs/update", {"run_id": run_id, "status": status} | ({} if end is None else {"end_time": end}))

    def history(self, run_id: str, key: str) -> Iterator[Metric]:
        request: dict[str, Any] = {"run_id": run_id, "metric_key": key, "max_results": _METRICS_PER_PAGE}
        while True:
            page = self._get("metrics/get-history", **request)
            for row in page.get("metrics", ()):
                yield Metric(key, float(row["value"]), int(row["timestamp"]), int(row.get("step", 0)))
            if not (token := page.get("next_page_token")):
                return
            request["page_token"] = token

    def upload(self, run: RunState, file: Path, path: str) -> None:
        if not self.own_artifacts(run):
            MlflowClient(self._uri).log_artifact(run.id, str(file), path.rpartition("/")[0] or None)
            return
        root = urlsplit(run.artifacts).path.strip("/").removeprefix(_ARTIFACTS.strip("/")).strip("/")
        kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
        with file.open("rb") as content:
            self._call("PUT", _ARTIFACTS + quote(f"{root}/{path}"), data=content, kind=kind, seconds=UPLOAD_SECONDS)

    def own_artifacts(self, run: RunState) -> bool:
        parts = urlsplit(run.artifacts)
        return parts.scheme == "mlflow-artifacts" and parts.netloc in {"", urlsplit(self._address).netloc}

    def _log_pairs(self, run_id: str, kind: str, pairs: Mapping[str, str]) -> None:
        rows = _pairs(pairs)
        for start in range(0, len(rows), _PARAMETERS_PER_CALL):
            self._post("runs/log-batch", {"run_id": run_id, kind: rows[start : start + _PARAMETERS_PER_CALL]})

    def _get(self, path: str, **parameters: Any) -> dict[str, Any]:
        return self._call("GET", _API + path, params=parameters)

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("POST", _API + path, data=json.dumps(body).encode())

    def _call(
        self, method: str, path: str, *, kind: str = "application/json", seconds: float = ANSWER_SECONDS, **content: Any
    ) -> dict[str, Any]:
        if _TIMEOUT in os.environ:  # the user knows how slow this server is
            seconds = float(os.environ[_TIMEOUT])
        if self._restricted:
            content["allow_redirects"] = False
        try:
            response = _request(
                _credentials(self._uri),
                path,
                method,
                max_retries=0,
                retry_codes=(),
                raise_on_status=False,
                timeout=(CONNECT_SECONDS, seconds),
                extra_headers={"Content-Type": kind} if method != "GET" else None,
                **content,
            )
        except InvalidUrlException as error:
            raise MirrorError(f"{self._address} is no address of an MLflow server") from error
        except MlflowException as error:
            raise self._unreachable(error) from error
        if response.status_code == 200:
            return self._parsed(response)
        raise self._failure(response)

    def _unreachable(self, error: MlflowException) -> Exception:
        cause = error.__cause__ or error.__context__
        text = str(cause or error).replace(self._uri, self._address)
        if isinstance(cause, SSLError):
            return MirrorError(
                f"{self._address} shows no certificate that is trusted here ({text}): "
                "set MLFLOW_TRACKING_SERVER_CERT_PATH"
            )
        if "timed out" in text and "connect timeout" not in text:
            return Slow(f"{self._address} did not answer in time ({text})")
        return Retry(f"{self._address} cannot be reached ({text})")

    def _parsed(self, response: Any) -> dict[str, Any]:
        try:
            answer = response.json() if response.content else {}
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise MirrorError(f"{self._address} does not answer as an MLflow server does: is the address right?")
        return answer

    def _failure(self, response: Any) -> Exception:
        """What an answer other than 200 means."""
        status: int = response.status_code
        try:
            answer = response.json()
            text, code = str(answer["message"])[:500], answer.get("error_code")
        except (ValueError, KeyError, TypeError):
            text, code = " ".join(response.text.split())[:200], None
        said = f"{self._address} answers {status}" + (f": {text}" if text else "")
        if 300 <= status < 400:
            return PolicyError(
                f"{self._address} redirects to {response.headers.get('Location', 'another address')!r}: a restricted "
                "run follows no redirect; name the final address, and allow it in the policy"
            )
        if status in {408, 425, 429} or status >= 500:
            after = response.headers.get("Retry-After", "")
            return Retry(said, after=float(after) if after.isdigit() else None)
        return _refusal(status, code, said)


def _refusal(status: int, code: str | None, said: str) -> Exception:
    if status in {401, 403}:
        return MirrorError(
            f"{said}: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )
    if status == 413:
        return TooLarge(said)
    if code == "RESOURCE_DOES_NOT_EXIST":
        return NotFoundError(said)
    if status in {404, 405}:
        return MirrorError(f"{said}: there is no MLflow server at this address")
    return Refused(said)


def _pairs(mapping: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in mapping.items()]


@lru_cache(maxsize=65536)
def _quoted(text: str) -> str:
    return json.dumps(text)


def _number(value: float) -> str:
    """A float64 as protobuf's JSON has it: exact, and the three that JSON lacks as text."""
    if math.isfinite(value):
        return repr(value)
    return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'

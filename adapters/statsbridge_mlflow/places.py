"""Where MLflow would send to, found without importing it: the tracking URI, the run and the experiment."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from statsbridge.errors import ConfigError

_SQLITE = re.compile(r"sqlite(\+\w+)?:///(?P<path>[^?]*)(?P<query>\?.*)?", re.DOTALL)
_HAS_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


def user_tracking_uri() -> str:
    """The tracking URI that the user's own calls of MLflow would use now."""
    # Another thread may be in the middle of importing MLflow: then it has no such function yet.
    if get_tracking_uri := getattr(sys.modules.get("mlflow"), "get_tracking_uri", None):
        return str(get_tracking_uri())
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    # As MLflow decides: a folder of its old file store goes on being used where there is one.
    if any(Path("mlruns").glob("[0-9]*/meta.yaml")):
        return str(Path("mlruns").absolute())
    return "sqlite:///mlflow.db"


def user_run() -> str | None:
    """The run that is active in the calling thread, or that `$MLFLOW_RUN_ID` names."""
    active_run = getattr(sys.modules.get("mlflow"), "active_run", None)
    if active_run and (run := active_run()) is not None:
        return str(run.info.run_id)
    return os.environ.get("MLFLOW_RUN_ID") or None


def user_experiment() -> dict[str, str]:
    """The experiment that the user has set: `experiment_id`, or its name as `experiment`."""
    fluent = sys.modules.get("mlflow.tracking.fluent")
    # Set by mlflow.set_experiment, which wins over the environment.
    if active := getattr(fluent, "_active_experiment_id", None):
        return {"experiment_id": str(active)}
    if name := os.environ.get("MLFLOW_EXPERIMENT_NAME"):
        return {"experiment": name}
    if identity := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return {"experiment_id": identity}
    return {}


def absolute(uri: str) -> str:
    """`uri` in one spelling: local paths absolute and without needless escapes, no slash at its end."""
    if (found := _SQLITE.fullmatch(uri)) and found["path"] not in {"", ":memory:"}:
        path = Path(os.path.abspath(unquote(found["path"]))).as_posix()
        escaped = path.replace("%", "%25").replace("?", "%3F")
        return f"sqlite:///{escaped}{found['query'] or ''}"
    if uri in {"databricks", "databricks-uc", "uc"}:
        return uri
    if uri.startswith("file:"):
        return os.path.abspath(unquote(urlsplit(uri).path))
    if not _HAS_SCHEME.match(uri):
        return os.path.abspath(uri)
    return uri.rstrip("/")


def without_secrets(uri: str) -> str:
    """`uri` without user, password and query. Raises ConfigError where readers of URLs may disagree on its host."""
    parts = urlsplit(uri)
    if _SQLITE.fullmatch(uri) or not parts.netloc:
        return uri.partition("?")[0]
    authority = uri.partition("://")[2].partition("/")[0]
    if "@" in authority and not re.fullmatch(r"[!-\[\]-~]+", authority):
        raise ConfigError(
            "the tracking URI holds a user or password with a backslash, a space or letters beyond ASCII: give them "
            "as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
        )
    if _hides_credentials(uri, parts):
        raise ConfigError(
            "the tracking URI holds an '@' after a '/', '?' or '#': where those belong to a password, write them as "
            "%2F, %3F and %23"
        )
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _hides_credentials(uri: str, parts: SplitResult) -> bool:
    """Whether a password may go on behind what is the host by the rules, as SQLAlchemy for one reads it."""
    behind = uri.partition("://")[2][len(parts.netloc) :]
    if "@" not in behind:
        return False
    try:
        _ = parts.port
    except ValueError:
        return True
    return "@" not in parts.netloc and parts.scheme not in {"http", "https"}


def sqlite_path(uri: str) -> Path | None:
    """The file of a `sqlite:` URI made by `absolute`; None for other URIs."""
    found = _SQLITE.fullmatch(uri)
    return Path(unquote(found["path"])) if found else None

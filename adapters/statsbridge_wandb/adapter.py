"""W&B: by default a run of ours beside the user's, in their group, project, entity, mode and folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from statsbridge.errors import ConfigError, MirrorError, PolicyError, Reject, Retry
from statsbridge.mirror import Batch, Destination, Event, Reading, RunInfo, Series

from .attached import AttachedRun
from .keys import alert_text, alert_title, figure_key, series_key
from .process import Worker
from .rows import Rows, parts
from .runfiles import rows, run_files, settled
from .target import DEFAULT_PROJECT, Named, active_run, find

if TYPE_CHECKING:
    import plotly.graph_objects as go

_LEVELS = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}
_CONNECTION = (
    "api_key", "app_url_override", "credentials_file", "http_proxy", "https_proxy", "identity_token_file",
    "insecure_disable_ssl", "x_extra_http_headers",
)  # fmt: skip
"""Settings of the user's run that our client needs to reach the same server."""

CONNECT = 30.0
"""Seconds that W&B's client may take to reach its server when a run begins."""

UPLOAD = 30.0
"""Seconds that W&B's client may take at the end of a run for what it has not uploaded yet."""

_ANSWER = 60.0  # seconds in which a worker must answer
_FILES = 600.0  # seconds for hashing a folder


class WandB:
    """Mirror to Weights & Biases: `backend="wandb"`, `"wandb:offline"`, `"wandb:https://wandb.example.org"`.

    `target`: "offline", or the URL of a W&B server. What is None is as in the user's open run, else as in the
    environment, else W&B's default. `dir` holds the folder `wandb`, as in `wandb.init`. `attach=True`: write into the
    user's own run, see the limits in the docs; it takes no `target` and nothing else, for the run is the user's.

    Raises ConfigError where these contradict each other.
    """

    backend = "wandb"
    lacks: frozenset[str] = frozenset()
    requires = "wandb"

    def __init__(
        self,
        target: str | None = None,
        *,
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        dir: str | None = None,
        attach: bool = False,
    ) -> None:
        self._named = Named(
            target=target, project=project, entity=entity, group=group, mode=mode, dir=None if dir is None else str(dir)
        )
        self._attach = attach
        # A row of ours is a step; in the user's run each value of a step can have a row of theirs.
        self.keeps: Literal["all", "last"] = "all" if attach else "last"
        if attach and self._named != Named():
            raise ConfigError("WandB(attach=True) goes where your run goes: give it nothing else")
        self._worker: Worker | None = None
        self._attached: AttachedRun | None = None
        self._rows = Rows()

    def options(self) -> dict[str, Any]:
        """Keywords that make this adapter again."""
        named = {name: getattr(self._named, name) for name in Named.__dataclass_fields__}
        return {name: value for name, value in {**named, "attach": self._attach or None}.items() if value is not None}

    def destination(self) -> Destination:
        """The server's URL; offline, the folder that holds W&B's run folders. Pure: it asks the user's open run."""
        return find(self._named, active_run())

    def open(self, run: RunInfo, destination: Destination, memory: MutableMapping[str, str]) -> None:
        """Start our own run, or take it up again; with `attach`, find the user's.

        Raises Retry where the server cannot be reached, MirrorError where W&B is disabled or refuses the
        credentials, PolicyError for a restricted run that would go online or into the user's run.
        """
        self._run, self._destination, self._memory = run, destination, memory
        mode = destination.details["mode"]
        if mode == "disabled":
            raise MirrorError("W&B is disabled (its mode is `disabled`), so nothing is sent there")
        if run.restricted and self._attach:
            raise PolicyError(
                "a restricted run cannot use WandB(attach=True): what W&B captures in your run cannot be turned off"
            )
        if run.restricted and mode != "offline":
            raise PolicyError(
                "a restricted run goes to W&B only offline, WandB('offline', dir=…): its client follows redirects and"
                " uploads files to whatever address the server names"
            )
        if self._attach:
            self._attached = AttachedRun(active_run(), destination, memory)
        else:
            memory.setdefault("id", _identity(run, destination))
            self._start()

    def key(self, series: Series) -> str:
        """The name of the series; "~" before those that would clash, `statsbridge/` where it is the user's run."""
        return series_key(series.name, attached=self._attach)

    def stored(self, value: float) -> float:
        """The value itself: W&B's file keeps every double, NaN and the infinities too."""
        return value

    def send(self, batch: Batch) -> None:
        """One row a step; returns when the rows are in W&B's run file on the disk.

        Raises Reject for values of a step that W&B has passed, and Retry where the client was lost: the next call
        starts another.
        """
        if self._attached is not None:
            self._attached.send(batch)
            return
        if batch.attempt > int(self._memory.get("attempt", 0)):
            self._begin_attempt(batch.attempt)
        worker = self._working()
        rows_, late = self._rows.sort(batch)
        for some in parts(rows_):
            worker.ask("rows", timeout=_ANSWER, rows=some)
            self._rows.last = some[-1].step
        self._memory["step"] = str(self._rows.last)
        if late:
            raise Reject(f"W&B takes nothing for a step before the one it is at, {self._rows.last + 1}", late)

    def alert(self, event: Event) -> None:
        """One of W&B's alerts; an event that was delivered before is not repeated."""
        if event.seq <= int(self._memory.get("alert", -1)):
            return
        title, text, level = alert_title(event), alert_text(event), _LEVELS.get(event.severity, "INFO")
        if self._attached is not None:
            self._attached.alert(title, text, level)
        else:
            self._working().ask("alert", timeout=_ANSWER, title=title, text=text, level=level)
        self._memory["alert"] = str(event.seq)

    def figure(self, name: str, figure: go.Figure, step: int) -> None:
        """A Plotly panel. It joins the row of the next step that is sent, or the last one when the run ends."""
        key = figure_key(name, attached=self._attach)
        if self._attached is not None:
            self._attached.figure(key, figure)
        else:
            self._working().ask("figure", timeout=_ANSWER, key=key, figure=figure.to_json())

    def artifact(self, path: Path) -> None:
        """An artifact of type `statsbridge` with the files of `path`, copied to W&B's staging folder first.

        Raises Reject for a restricted run.
        """
        if self._run.restricted:
            raise Reject("W&B's client writes a path of this machine for each file: no artifact of a restricted run")
        name = f"statsbridge-{self._memory['id']}"
        if self._attached is not None:
            self._attached.artifact(name, path)
        else:
            self._working().ask("artifact", timeout=_FILES, name=name, path=str(path))

    def read_back(self, run: RunInfo, destination: Destination, memory: Mapping[str, str]) -> Iterator[Reading]:
        """The values in W&B's run files on this machine: what an online run was, or will be, uploaded from.

        Raises MirrorError where there is no such file; damage is named at the end, after all that could be read.
        """
        if self._attach:
            files = [Path(memory["file"])] if "file" in memory and Path(memory["file"]).is_file() else []
        else:
            ids = [*memory.get("earlier", "").split(), memory.get("id") or _identity(run, destination)]
            files = [file for one in ids for file in run_files(Path(destination.details["folder"]), one)]
        if not files:
            raise MirrorError(f"there is no run file of this mirror below {destination.details['folder']}")
        settled(files[-1])
        damaged: list[str] = []
        for file in files:
            for row in rows(file, damaged):
                if self._attach:
                    yield from AttachedRun.readings(row)
                else:
                    own = ((key, value) for key, value in row.values.items() if not key.startswith("_"))
                    yield from (Reading(key, row.step, None, value) for key, value in own)
        if damaged:
            raise MirrorError("W&B's run file is damaged: " + "; ".join(damaged))

    def close(self, status: str) -> None:
        """Finish our run and wait a bounded time for its upload; a run of the user's is left as it is.

        Raises MirrorError where W&B's server has not taken everything: it says how to upload the rest.
        """
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            worker.ask("close", timeout=UPLOAD + _ANSWER, exit_code=0 if status == "finished" else 1)
        except Retry as error:
            raise MirrorError(
                f"W&B's server has not taken everything ({error}); it is all in {self._folder}:"
                f" `wandb sync --include-online {self._folder}` uploads it"
            ) from error
        finally:
            if not worker.join(10.0):
                worker.kill()

    def _working(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            self._start()
        assert self._worker is not None
        return self._worker

    def _begin_attempt(self, attempt: int) -> None:
        """A resumed record goes back to an earlier step; as W&B's run cannot, each attempt has one of its own."""
        self.close("stopped")
        memory = self._memory
        memory["earlier"] = " ".join([*memory.get("earlier", "").split(), memory["id"]])
        first = memory["earlier"].split()[0]
        memory.update(id=f"{first}-attempt-{attempt}", attempt=str(attempt), step="-1")
        self._rows = Rows()
        self._start()

    def _start(self) -> None:
        """Start a worker and our run in it; what earlier ones wrote beyond the last acknowledgement is remembered."""
        details, run, attempt = self._destination.details, self._run, self._memory.get("attempt", "0")
        worker = Worker(bare=run.restricted)
        answer = worker.ask(
            "open",
            timeout=CONNECT + _ANSWER,
            **{name: details[name] for name in ("mode", "mode_from", "url", "url_from", "folder")},
            **{name: details[name] for name in ("project", "entity", "group")},
            default_project=DEFAULT_PROJECT,
            id=self._memory["id"],
            name=f"{run.name} attempt {attempt}" if run.name and attempt != "0" else run.name,
            config=_config(run, details["user_run"]),
            settings={} if run.restricted else _connection(details["url"]),
            step=int(self._memory.get("step", -1)),
            connect=CONNECT,
            upload=UPLOAD,
        )
        self._worker = worker
        self._folder = answer["folder"]
        self._rows = Rows(last=max(answer["last"], answer["next"] - 1, self._rows.last), held=answer["held"])
        if answer["url"]:
            self._memory["url"] = answer["url"]


def _identity(run: RunInfo, destination: Destination) -> str:
    """W&B's id of our run: follows from the record and where it goes, so that one begun and lost is found again.

    Where it goes is part of it, because the run files of several mirrors may lie in one folder.
    """
    where = [destination.details[name] for name in ("mode", "url", "entity", "project")]
    digest = hashlib.blake2b(json.dumps([run.id, *where]).encode(), digest_size=4).hexdigest()
    return re.sub(r"[^A-Za-z0-9_-]", "-", run.id)[:64] + "-" + digest


def _config(run: RunInfo, user_run: str) -> dict[str, Any]:
    """The user's config, and what ties W&B's run to the record; nothing of a restricted run that it does not give."""
    config: dict[str, Any] = json.loads(json.dumps(dict(run.config), default=str))
    if not run.restricted:
        config["statsbridge"] = {"run": run.id, "versions": dict(run.versions), "beside": user_run or None}
    return config


def _connection(url: str) -> dict[str, Any]:
    """How the user's open run reaches the server `url`: held in memory, never written down."""
    settings = getattr(active_run(), "settings", None)
    if settings is None or settings.base_url.rstrip("/") != url:
        return {}
    found = {name: getattr(settings, name, None) for name in _CONNECTION}
    return {name: value for name, value in found.items() if value not in (None, "", False, {})}

"""Where a mirror would go: pure, from what the code names, the user's run, the environment and W&B's defaults."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from statsbridge.errors import ConfigError
from statsbridge.mirror import Destination

DEFAULT_URL = "https://api.forge.coreweave.com"
"""Where wandb 0.31 sends to by itself; `open` refuses where the installed client has another default."""

DEFAULT_PROJECT = "statsbridge"
_MODES = {"online": "online", "run": "online", "shared": "online", "offline": "offline", "dryrun": "offline"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What the code names itself; None: as the user's run has it, else the environment, else W&B's default."""

    target: str | None = None  # "offline", "offline:<folder>", or the URL of a server
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    mode: str | None = None
    dir: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError where these mean nothing, or contradict each other."""
        if self.target is not None and not self._offline:
            address = urlsplit(self.target)
            if address.scheme not in {"http", "https"} or not address.hostname or "@" in address.netloc:
                raise ConfigError(
                    f"{self.target!r} is no target of the wandb adapter: give 'offline', 'offline:<folder>', or the URL"
                    " of a W&B server, such as 'https://wandb.example.org' (no user or key in it)"
                )
        if self.mode not in {None, "online", "offline", "disabled"}:
            raise ConfigError(f"mode is {self.mode!r}: one of online, offline, disabled")
        if self.mode is not None and self.target is not None and (self.mode == "online") == self._offline:
            raise ConfigError(f"the target {self.target!r} and mode={self.mode!r} contradict each other")
        if self.dir is not None and (self.target or "").startswith("offline:"):
            raise ConfigError("the target names a folder and so does dir: give one of them")

    @property
    def _offline(self) -> bool:
        return self.target is not None and (self.target == "offline" or self.target.startswith("offline:"))

    @property
    def url(self) -> str | None:
        """The server that is named."""
        return None if self.target is None or self._offline else self.target.rstrip("/")

    @property
    def folder(self) -> str | None:
        """The folder that is named: the one that holds `wandb`."""
        inside = (self.target or "").partition("offline:")[2] if self._offline else ""
        return self.dir or inside or None

    @property
    def wanted(self) -> str | None:
        """The mode that is named."""
        return "offline" if self._offline else self.mode or ("online" if self.url else None)


def active_run() -> Any:
    """The run that the user's code has open in this process, or None; imports nothing."""
    return getattr(sys.modules.get("wandb"), "run", None)


def find(named: Named, run: Any) -> Destination:
    """The destination for what `named` says, beside the user's `run` (None where there is none)."""
    settings = getattr(run, "settings", None)
    environment = os.environ

    def first(given: str | None, attribute: str, variable: str) -> str:
        found = given or getattr(settings, attribute, None) or environment.get(variable)
        return str(found) if found else ""

    mode, origin = _mode(named, settings, environment)
    folder = _folder(named, settings, environment)
    url = named.url or getattr(settings, "base_url", None) or environment.get("WANDB_BASE_URL")
    details = {
        "mode": mode,
        "mode_from": origin,
        "url": str(url or DEFAULT_URL).rstrip("/"),
        "url_from": "named" if url else "default",
        "folder": folder,
        "project": first(named.project, "project", "WANDB_PROJECT"),
        "entity": first(named.entity, "entity", "WANDB_ENTITY"),
        "group": first(named.group, "run_group", "WANDB_RUN_GROUP"),
        "user_run": str(getattr(run, "id", None) or ""),
    }
    online = mode == "online"
    return Destination(
        backend="wandb",
        address=details["url"] if online else folder,
        explicit=named.url is not None if online else named.folder is not None,
        details=details,
    )


def _mode(named: Named, settings: Any, environment: Mapping[str, str]) -> tuple[str, str]:
    """What the client is to do (online, offline or disabled), and who says so: "named" or "default"."""
    found = named.wanted or getattr(settings, "mode", None) or environment.get("WANDB_MODE")
    return (_MODES.get(str(found), "disabled"), "named") if found else ("online", "default")


def _folder(named: Named, settings: Any, environment: Mapping[str, str]) -> str:
    """The absolute path of the folder that holds W&B's run folders."""
    if named.folder is None and settings is not None:
        return os.path.abspath(str(settings.wandb_dir))
    root = Path(named.folder or environment.get("WANDB_DIR") or ".").expanduser()
    return os.path.abspath(root / "wandb")

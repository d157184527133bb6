"""Which backends there are: the local record, and adapters found by their entry point."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from .errors import ConfigError, UnknownBackendError

ENTRY_POINT_GROUP = "statsbridge.adapters"
LOCAL = "local"


def installed_adapters() -> dict[str, EntryPoint]:
    """Adapters by backend name. Nothing is imported."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def check_backends(backend: object) -> None:
    """Raise UnknownBackendError for a backend that cannot be had, ConfigError for what is no backend at all."""
    names = [backend] if isinstance(backend, str) else backend
    if not isinstance(names, Iterable) or not (names := list(names)) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"backend={backend!r}: give a name such as 'local', or a list of names")
    for name in names:
        if name == LOCAL:
            continue
        found = ", ".join([LOCAL, *installed_adapters()])
        raise UnknownBackendError(
            f"backend {name!r} is not known here. Installed: {found}. An adapter comes with the extra of its name "
            f"(pip install 'statsbridge[{name}]'), which this version does not have yet: it writes the local "
            "record only, so use backend='local'"
        )

"""Which backends there are: the local record, and adapters found by their entry point."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, metadata
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, StatsBridgeError, UnknownBackendError

if TYPE_CHECKING:
    from .mirror.contract import Adapter

ENTRY_POINT_GROUP = "statsbridge.adapters"
LOCAL = "local"

Backend = "str | Adapter"
"""A name, `"name:target"`, or an adapter."""


def installed_adapters() -> dict[str, EntryPoint]:
    """Adapters by backend name. Nothing is imported."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def extras() -> frozenset[str]:
    """What `pip install 'statsbridge[…]'` knows; nothing where statsbridge runs without having been installed."""
    try:
        return frozenset(metadata("statsbridge").get_all("Provides-Extra") or ())
    except PackageNotFoundError:
        return frozenset()


def make_adapters(backend: object) -> list[Adapter]:
    """The adapters that `backend` asks for, made but not opened; none for the local record, which is always kept.

    `backend`: a name, `"name:target"` or an adapter, or several of them.

    Raises UnknownBackendError for a backend that cannot be had, ConfigError for what is no backend at all.
    """
    given: list[object] = [backend]
    # A dict's values would be lost without a word, and bytes are numbers one by one.
    if isinstance(backend, Iterable) and not isinstance(backend, str | bytes | Mapping):
        try:
            given = list(backend)
        except TypeError:  # a tensor or an array without dimensions only looks as if it held something
            given = [backend]
    if not given:
        raise ConfigError(f"backend={backend!r}: give a name such as 'local', an adapter, or a list of these")
    return [_adapter(one) for one in given if one != LOCAL]


def make_adapter(name: str, target: str | None = None, options: Mapping[str, Any] | None = None) -> Adapter:
    """The adapter of the backend `name`, for `target` or with what its `options()` once gave.

    Raises UnknownBackendError where it, or its tracker, is not installed, ConfigError where it does not take
    what it is given.
    """
    known = installed_adapters()
    if name not in known:
        raise UnknownBackendError(_not_known(name, [LOCAL, *known]))
    try:
        kind = known[name].load()
    except Exception as error:
        raise UnknownBackendError(f"backend {name!r} is installed, but cannot be imported: {error!r}") from error
    _check_installed(kind, name)
    try:
        adapter: Adapter = kind(**(options or {})) if target is None else kind(target)
    except StatsBridgeError:
        raise
    except Exception as error:
        told = f"{name}:{target}" if target is not None else name
        raise ConfigError(f"backend {told!r} cannot be had: {error}") from error
    return adapter


def _not_known(name: str, known: list[str]) -> str:
    """What to say of a name that no adapter has. An extra is named only where there is one: pip ignores all others."""
    likely = get_close_matches(name.strip().lower(), known, n=1)
    meant = likely[0] if likely else name
    hint = f": did you mean {meant!r}?" if likely else "."
    extra = f" Its tracker comes with pip install 'statsbridge[{meant}]'." if likely and meant in extras() else ""
    return (
        f"backend {name!r} is not known here{hint}{extra} Installed: {', '.join(known)}. "
        "Any other adapter comes with a package of its own"
    )


def _adapter(one: object) -> Adapter:
    if isinstance(one, str):
        name, separator, target = one.partition(":")
        if not name or name == LOCAL or (separator and not target):
            raise ConfigError(f"backend={one!r}: write 'name' or 'name:target'; the local record has no target")
        return make_adapter(name, target if separator else None)
    missing = [name for name in ("backend", "destination", "open", "send") if not hasattr(one, name)]
    if missing or isinstance(one, type):
        raise ConfigError(
            f"backend={one!r}: give a name such as 'local', 'name:target', an adapter, or a list of these"
        )
    adapter: Adapter = one  # type: ignore[assignment]
    _check_installed(adapter, adapter.backend)
    return adapter


def _check_installed(adapter: object, name: str) -> None:
    """Raise UnknownBackendError where the tracker is missing, which is looked for but not imported."""
    package = getattr(adapter, "requires", "")
    if package and importlib.util.find_spec(package.partition(".")[0]) is None:
        point = installed_adapters().get(name)
        ours = point is not None and point.value.startswith("statsbridge_") and name in extras()
        extra = f"'statsbridge[{name}]'" if ours else package
        raise UnknownBackendError(
            f"backend {name!r} needs the package {package}, which is not installed: pip install {extra}"
        )

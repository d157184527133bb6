"""One policy file: what it may say, and what is wrong with it."""

from __future__ import annotations

import difflib
import errno
import hashlib
import os
import stat
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from ..errors import PolicyError
from ..log.schema import SCHEMAS, SITES
from .contract import CHANNELS
from .destinations import Address, parse_folder, parse_url

T = TypeVar("T")

TABLES = ("scalars", "stats", "events")
_COLUMNS = SCHEMAS["stats"].names
STATISTICS: tuple[str, ...] = tuple(_COLUMNS[_COLUMNS.index("count") : _COLUMNS.index("status")])
"""The columns of `stats` that hold measured numbers: what `statistics = […]` chooses from."""

_LIMITS = ("channels", "tables", "sites", "statistics", "scalars", "names")
_FILE_KEYS = ("applies_to", "destinations", "key_file", *_LIMITS)
_DESTINATION_KEYS = ("backend", "url", "path", *_LIMITS)
_DEFAULT_CHANNELS = ("metrics",)
_LARGEST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may leave. A list is None where it limits nothing; `sites`, `statistics` and `scalars` are globs."""

    channels: tuple[str, ...] | None = None
    tables: tuple[str, ...] | None = None
    sites: tuple[str, ...] | None = None
    statistics: tuple[str, ...] | None = None
    scalars: tuple[str, ...] | None = None
    names: Literal["plain", "hashed"] = "plain"
    key_file: str | None = None


@dataclass(frozen=True, slots=True)
class DestinationRule:
    """One `[[destinations]]` of a file: the `number`-th, counted from 1."""

    number: int
    backend: str  # a glob
    address: Address
    limits: Limits


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """What one file says. `destinations` is None where the file leaves that to others."""

    path: str
    place: Literal["environment", "system", "project"]
    digest: str  # SHA-256 of the file
    restricted_only: bool
    limits: Limits
    destinations: tuple[DestinationRule, ...] | None


def read_policy_file(path: Path, place: Literal["environment", "system", "project"]) -> PolicyFile | None:
    """The policy in the file `path`; None where there is no such file.

    Raises PolicyError, naming the file and the key, where it is a symbolic link or no regular file, cannot be
    read, or says anything that is not understood.
    """
    data = _read(path)
    if data is None:
        return None
    try:
        content = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise PolicyError(f"policy {path} is no TOML: {error}") from None
    try:
        return _policy_file(content, path, place, hashlib.sha256(data).hexdigest())
    except ValueError as error:
        raise PolicyError(f"policy {path}: {error}") from None


def _read(path: Path) -> bytes | None:
    # Not Path.exists: it takes a folder that may not be looked into for one without a policy.
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            raise PolicyError(f"policy {path} is a symbolic link, which others may turn: put the file itself there")
        if not stat.S_ISREG(mode):
            raise PolicyError(f"policy {path} is no regular file")
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags), "rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            return None
        raise PolicyError(
            f"policy {path} cannot be read ({error.strerror or error}), so nothing may leave: make it readable"
        ) from error
    if len(data) > _LARGEST:
        raise PolicyError(f"policy {path} is larger than {_LARGEST} bytes")
    return data


def _policy_file(
    content: Mapping[str, Any], path: Path, place: Literal["environment", "system", "project"], digest: str
) -> PolicyFile:
    _refuse_unknown(content, _FILE_KEYS, "")
    applies_to = _choice(content, "applies_to", ("restricted", "all"), "restricted", "")
    key_file = _get(content, "key_file", str, "a path", "")
    if key_file is not None:
        key_file = _folder(key_file, path, "key_file")
    limits = _limits(content, Limits(key_file=key_file), "")
    tables = _get(content, "destinations", list, "an array of tables: [[destinations]]", "")
    destinations = None
    if tables is not None:
        destinations = tuple(_destination(table, number, path, limits) for number, table in enumerate(tables, start=1))
    return PolicyFile(str(path), place, digest, applies_to == "restricted", limits, destinations)


def _destination(table: object, number: int, path: Path, defaults: Limits) -> DestinationRule:
    where = f"[[destinations]] {number}: "
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}must be a table")
    _refuse_unknown(table, _DESTINATION_KEYS, where)
    backend = _get(table, "backend", str, 'a text such as "mlflow"', where)
    url = _get(table, "url", str, 'a text such as "https://mlflow.lab.example"', where)
    folder = _get(table, "path", str, "the path of a folder", where)
    if not backend:
        raise ValueError(f'{where}lacks backend: the name of an adapter, or a glob such as "*"')
    if (url is None) == (folder is None):
        raise ValueError(f"{where}needs one of url and path")
    address: Address
    if url is not None:
        try:
            address = parse_url(url)
        except ValueError as error:
            raise ValueError(f"{where}url = {url!r}: {error}") from None
    else:
        address = parse_folder(_folder(cast(str, folder), path, f"{where}path"))
    limits = _limits(table, defaults, where)
    return DestinationRule(number, backend, address, limits)


def _folder(text: str, file: Path, what: str) -> str:
    """`text` as an absolute path; a relative one begins at the folder of the policy file."""
    if text.startswith("~"):
        raise ValueError(f"{what} = {text!r}: write the home folder out")
    try:
        return str(parse_folder(os.path.join(file.parent, text) if text else text))
    except ValueError as error:
        raise ValueError(f"{what} = {text!r}: {error}") from None


def _limits(table: Mapping[str, Any], defaults: Limits, where: str) -> Limits:
    """The limits in `table`; what it does not say is as in `defaults`."""
    channels = _list(table, "channels", CHANNELS, where, globs=False)
    if channels is None:
        channels = defaults.channels
    if channels is None and where:
        channels = _DEFAULT_CHANNELS
    return Limits(
        channels=channels,
        tables=_or(_list(table, "tables", TABLES, where, globs=False), defaults.tables),
        sites=_or(_list(table, "sites", SITES, where), defaults.sites),
        statistics=_or(_list(table, "statistics", STATISTICS, where), defaults.statistics),
        scalars=_or(_list(table, "scalars", None, where), defaults.scalars),
        names=cast(Literal["plain", "hashed"], _choice(table, "names", ("plain", "hashed"), defaults.names, where)),
        key_file=defaults.key_file,
    )


def _or(value: tuple[str, ...] | None, default: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return default if value is None else value


def _refuse_unknown(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{where}unknown key {key!r}{_suggestion(key, known)}")


def _get(table: Mapping[str, Any], key: str, kind: type[T], what: str, where: str) -> T | None:
    value = table.get(key)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{where}{key} = {value!r}: give {what}")
    return value


def _choice(table: Mapping[str, Any], key: str, choices: Collection[str], default: str, where: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{where}{key} = {value!r}{_suggestion(value, choices)}")
    return value


def _list(
    table: Mapping[str, Any], key: str, known: Collection[str] | None, where: str, *, globs: bool = True
) -> tuple[str, ...] | None:
    value = _get(table, key, list, 'an array of texts, such as ["a", "b"]', where)
    if value is None:
        return None
    for item in value:
        if not isinstance(item, str):
            raise ValueError(f"{where}{key} holds {item!r}, which is no text")
        if known is not None and not any(fnmatchcase(name, item) if globs else name == item for name in known):
            raise ValueError(f"{where}{key} holds {item!r}{_suggestion(item, known)}")
    return tuple(value)


def _suggestion(given: object, choices: Collection[str]) -> str:
    close = difflib.get_close_matches(str(given), choices, n=1, cutoff=0.5)
    hint = f" did you mean {close[0]!r}?" if close else ""
    return f":{hint} Choices: {', '.join(choices)}"

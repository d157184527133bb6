"""Outages of a disk, for adapters that write files: real ones, which root meets as well."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def full_disk(folder: Path, room: int = 100) -> Iterator[None]:
    """No file of this process can grow `room` bytes larger than the newest below `folder`: writes break off."""
    newest = max((path.stat() for path in folder.rglob("*") if path.is_file()), key=lambda status: status.st_mtime_ns)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (newest.st_size + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def unmounted(folder: Path) -> Iterator[None]:
    """The folder is not there, and then it is again."""
    away = folder.with_name(folder.name + "-unmounted")
    folder.rename(away)
    try:
        yield
    finally:
        away.rename(folder)

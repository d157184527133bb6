"""The run files that W&B wrote for one run, in one folder: one for each process that had the run open."""

from __future__ import annotations

import glob
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from .records import RecordFile, Row, history, parse

_QUIET = 1.5  # seconds without growth after which a file with no end has been left by a process that is gone
_PATIENCE = 20.0


def run_files(folder: Path, identity: str) -> list[Path]:
    """The run files of the run `identity`, oldest first (W&B's folder names begin with the time)."""
    name = glob.escape(identity)
    found = [path for path in folder.glob(f"*run-*-{name}*/run-{name}.wandb") if path.is_file()]
    return sorted(found, key=lambda path: (_begun(path), path.parent.name))


def _begun(path: Path) -> str:
    return path.parent.name.removeprefix("offline-").removeprefix("run-")


def written(files: Iterable[Path]) -> list[Row]:
    """All rows with numbers in `files`, one after the other, as far as they can be read."""
    return [row for file in files for row in rows(file, []) if row.values]


def rows(path: Path, damaged: list[str]) -> Iterator[Row]:
    """The rows of one file; what is damaged in it is added to `damaged` at the end."""
    file = RecordFile(path)
    for record in file.read():
        parsed = parse(record)
        if parsed.HasField("history"):
            yield history(parsed)
    damaged += [f"{path}: {what}" for what in file.damaged]
    if file.cut:
        damaged.append(f"{path}: ends in the middle of a record, {file.cut} bytes after the last whole one")


def settled(path: Path) -> bool:
    """Wait until nobody writes `path` any more: it ends with W&B's exit record, or does not grow; False if it does."""
    file, size, ended = RecordFile(path), -1, False
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        for record in file.read():
            ended = parse(record).HasField("exit")
        if ended or path.stat().st_size == size:
            return True
        size = path.stat().st_size
        time.sleep(_QUIET)
    return False

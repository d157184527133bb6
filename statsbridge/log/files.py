"""Every change that the log makes to the disk goes through this module.

Files are whole or absent: written under a temporary name that no `*.parquet` glob matches, fsynced, renamed,
and the folder fsynced after that. Permissions are the user's umask.
"""

import errno
import os
import secrets
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

# What file systems without fsync of a folder (some network and user-space ones) answer.
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Write `data` to `path`, replacing what was there; on return it survives a power cut.

    Raises OSError, with nothing changed at `path` (unless only the fsync of the folder failed). Call again
    with the same data: each attempt uses a new file, for after a failed fsync a second one on the same file
    may succeed though the data are gone.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        try:
            _write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:  # an interrupt too must not leave half a file behind
        with suppress(OSError):
            remove(temporary)
        raise
    sync_folder(path.parent)


class DurableFile:
    """A file that is written piece by piece and appears whole, under a name chosen at the end, or never.

    A context manager; what was not committed at its end is gone. `checksum`: the CRC32 of what was written.
    Every method raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        self._temporary = folder / f".{secrets.token_hex(8)}.tmp"
        self._descriptor = os.open(
            self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666
        )
        self._position = 0
        self.checksum = 0
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`, whole."""
        rest = memoryview(data).cast("B")
        self.checksum = zlib.crc32(rest, self.checksum)
        _write_all(self._descriptor, rest)
        self._position += len(rest)
        return len(rest)

    def tell(self) -> int:
        """How many bytes were written."""
        return self._position

    def flush(self) -> None:
        """Nothing waits: every write goes to the system at once."""

    def commit(self, path: Path) -> None:
        """Give the file its name, durably."""
        os.fsync(self._descriptor)
        self.close()
        os.replace(self._temporary, path)
        sync_folder(path.parent)

    def close(self) -> None:
        """Write no more."""
        if not self.closed:
            self.closed = True
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self.close()
        with suppress(OSError):
            remove(self._temporary)


def create(path: Path, data: bytes) -> None:
    """Write `data` to `path`, which nobody else has made. Raises FileExistsError where somebody has, OSError.

    Others may see it empty or in part for a moment.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        _write_all(descriptor, memoryview(data))
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, rest: memoryview) -> None:
    while rest:
        # Close to a limit the system writes a part, and only then fails.
        rest = rest[os.write(descriptor, rest) :]


def remove(path: Path) -> None:
    """Delete the file at `path`, if it is there. It may come back after a power cut until its folder is synced."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def make_folder(path: Path) -> None:
    """Make the folder `path` and the missing ones above it, durably. Raises OSError."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in the folder `path` survive a power cut. Raises OSError."""
    if os.name == "nt":  # Windows opens no folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)

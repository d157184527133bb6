"""Every change that the log makes to the disk goes through this module.

Files are whole or absent: written under a temporary name that no `*.parquet` glob matches, fsynced, renamed,
and the folder fsynced after that. Permissions are the user's umask.
"""

import errno
import os
import secrets
from pathlib import Path

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
            rest = memoryview(data)
            while rest:
                # Close to a limit the system writes a part, and only then fails.
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:  # an interrupt too must not leave half a file behind
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make the folder `path` and the missing ones above it, durably. Raises OSError."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
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

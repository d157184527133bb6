"""Keyed hashes in place of names: the same name gives the same hash, and nobody without the key can tell which."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import PolicyError
from ..log.files import make_folder, sync_folder

KEY_FILE = "policy.key"
"""Name, in the folder `mirrors` of a run, of the key that its names are hashed with."""

_USED_FILE = "policy.keys-used"  # beside it: a line for each key that names of the run left under
_KEY_BYTES = 32
_HASH_BYTES = 8  # one in 10¹³ that two of 1,000 modules collide

#: Scalars that statsbridge names itself.
OWN_SCALARS = frozenset(
    {
        "loss",
        "grad_norm",
        "grad_norm_applied",
        "param_norm",
        "update_ratio",
        "update_norm",
        "param_norm_before",
        "step_time",
        "samples",
        "samples_per_second",
    }
)


class Namer:
    """Turns names into hashes with one key: HMAC-like, by BLAKE2b's own keyed mode (RFC 7693)."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: dict[tuple[str, str], str] = {}

    def name(self, kind: Literal["module", "type", "tensor", "scalar", "group"], text: str) -> str:
        """`<kind>-<16 hexadecimal digits>`; "" stays "". The same text of another kind has another hash."""
        if not text:
            return text
        known = self._known.get((kind, text))
        if known is None:
            data = text.encode(errors="surrogatepass")
            digest = hashlib.blake2b(data, digest_size=_HASH_BYTES, key=self._key, person=kind.encode()).hexdigest()
            known = self._known[kind, text] = f"{kind}-{digest}"
        return known

    def scalar(self, text: str) -> str:
        """Names of our own stay; of `lr/<optimizer>/<group>` the parts that are no numbers are hashed.

        `shard/<name>`, one rank's part of a norm, stays one of what the whole is called.
        """
        part = "shard/" if text.startswith("shard/") else ""
        return part + self._scalar(text.removeprefix(part))

    def _scalar(self, text: str) -> str:
        if text in OWN_SCALARS:
            return text
        first, *rest = text.split("/")
        if first == "lr" and 1 <= len(rest) <= 2:
            return "/".join(
                [first, *(part if re.fullmatch(r"[0-9]+", part) else self.name("group", part) for part in rest)]
            )
        return self.name("scalar", text)


def load_key(path: Path) -> bytes:
    """The key in the file `path`, made there where there is none, for its owner's eyes only.

    Raises PolicyError where the file holds no key or others may read it, OSError where it cannot be made.
    """
    try:
        information = os.lstat(path)
    except FileNotFoundError:
        _make_key(path)
        information = os.lstat(path)
    if not stat.S_ISREG(information.st_mode):
        raise PolicyError(f"{path} must hold the key that names are hashed with, and is no regular file")
    if os.name != "nt" and information.st_mode & 0o077:
        raise PolicyError(f"{path} holds the key that names are hashed with, and others may read it: chmod 600 it")
    text = path.read_bytes()
    if not re.fullmatch(rb"[0-9a-f]{64}\n?", text):
        raise PolicyError(
            f"{path} does not hold the key that names are hashed with (64 hexadecimal digits): put it back from a "
            "copy, or delete it; then names get other hashes than before"
        )
    return bytes.fromhex(text.decode())


def note_key(run: Path, file: Path, key: bytes, mirror: str | None = None) -> str | None:
    """Write down that names of `run` leave under the key of `file`; what to say where it was another before, or None.

    Before: to the same `mirror` (by name); where none has left to it, from the same file. That another mirror has a
    key of its own is no change. Of the key itself nothing is kept: a hash of it tells two apart and cannot be turned
    back.
    """
    used = _keys_used(run)
    own = file == run / "mirrors" / KEY_FILE  # the run's own key moves with the run
    now = _Use(_mark(key), KEY_FILE if own else str(file.absolute()), mirror)
    same_mirror = [one for one in used if mirror is None or one.mirror in (mirror, None)]
    same_file = [one for one in used if one.file == now.file]
    changed = any(one.mark != now.mark for one in (same_mirror or same_file)[-1:])
    if same_mirror and not changed:
        return None
    with suppress(OSError):  # where nothing can be written, names leave all the same
        make_folder(run / "mirrors")
        with open(run / "mirrors" / _USED_FILE, "a", encoding="utf-8") as lines:
            lines.write(json.dumps({name: value for name, value in now._asdict().items() if value}) + "\n")
    if not changed:
        return None
    return (
        f"names leave under another key than before ({file} was lost or replaced): the same module has another hash "
        "now, and curves do not go on where they ended"
    )


def key_trouble(run: Path) -> str | None:
    """What is wrong with the key that names of `run` leave under, in a sentence; None where nothing is."""
    used = _keys_used(run)
    # Of what left once, such as a report, only the last counts; a mirror goes on.
    going_on = {one.mirror: one for one in used if one.mirror and (run / "mirrors" / f"{one.mirror}.json").is_file()}
    for use in (*going_on.values(), *used[-1:]):
        file = Path(run, "mirrors", use.file)
        try:
            there = _mark(bytes.fromhex(file.read_text("ascii"))) == use.mark
        except (OSError, ValueError):
            there = False
        if not there:
            return (
                f"{file} does not hold the key that names left under: put it back from a copy, or they get other hashes"
            )
    for use in used:
        keys = len({one.mark for one in used if one.file == use.file or (one.mirror and one.mirror == use.mirror)})
        if keys > 1:
            file = Path(run, "mirrors", use.file)
            return f"names left under {keys} keys, so one module has {keys} hashes: {file} was replaced"
    return None


class _Use(NamedTuple):
    """Names left under a key. `mirror`: None where an older version wrote it down."""

    mark: str
    file: str
    mirror: str | None


def _keys_used(run: Path) -> list[_Use]:
    """In the order of leaving. What cannot be read of them is passed over."""
    try:
        lines = (run / "mirrors" / _USED_FILE).read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return []
    used = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            one = json.loads(line)
            mirror = one.get("mirror") if isinstance(one, dict) else None
            used.append(_Use(str(one["mark"]), str(one["file"]), None if mirror is None else str(mirror)))
    return used


def _mark(key: bytes) -> str:
    return hashlib.blake2b(digest_size=_HASH_BYTES, key=key, person=b"mark").hexdigest()


def _make_key(path: Path) -> None:
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_hex(_KEY_BYTES).encode() + b"\n")
            file.flush()
            os.fsync(descriptor)
        try:
            os.link(temporary, path)  # unlike a rename it never replaces the key that another process made just now
        except FileExistsError:
            return
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)

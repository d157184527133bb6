"""Keyed hashes in place of names: the same name gives the same hash, and nobody without the key can tell which."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Literal

from ..errors import PolicyError
from ..log.files import make_folder, sync_folder

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

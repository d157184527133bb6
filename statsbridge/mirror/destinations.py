"""Addresses of destinations, compared by their parts: what only looks like an allowed one is refused.

An address must be written in its plain form: lower-case scheme and host, no user, no escapes, no `..`, no
symbolic link on the way. Every other spelling is refused, and the reason tells the plain one, for two programs
that read one odd spelling differently are how data end up elsewhere.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass

_DEFAULT_PORTS = {"http": 80, "https": 443}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?")
_SEGMENT = re.compile(r"[A-Za-z0-9._~!$&'()*+,=:@-]+")
# Characters that URL readers disagree about, and what they are called.
_AMBIGUOUS = {
    "\\": "a backslash",
    "%": "a percent-encoded character",
    "?": "a query",
    "#": "a fragment",
    ";": "a path parameter",
}


@dataclass(frozen=True, slots=True)
class Url:
    """A network address. `port` is None where the scheme's own is meant; `path` holds the path's segments."""

    scheme: str
    host: str
    port: int | None
    path: tuple[str, ...]

    def __str__(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        return "/".join((f"{self.scheme}://{self.host}{port}", *self.path))


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder or file of this machine, by its absolute path."""

    path: str

    def __str__(self) -> str:
        return self.path


Address = Url | Folder


def parse_address(text: str) -> Address:
    """The address `text`: a URL, an absolute path, or a path as `file:///…` or `sqlite:////…`.

    Raises ValueError with the reason where it is none of these, or not in its plain form.
    """
    found = _SCHEME.match(text)
    if found is None or (os.name == "nt" and _DRIVE.match(text)):
        return parse_folder(text)
    scheme = found[1].lower()
    if scheme == "file":
        return parse_folder(_local_part(text, found[1], prefix="//"))
    if scheme.split("+")[0] == "sqlite":
        return parse_folder(_local_part(text, found[1], prefix="///" if os.name != "nt" else "//"))
    return parse_url(text)


def parse_url(text: str) -> Url:
    """The URL `text`: scheme://host[:port][/path]. Raises ValueError with the reason where it is not plain."""
    _refuse_odd_characters(text)
    scheme, separator, rest = text.partition("://")
    if not separator or not _SCHEME.fullmatch(f"{scheme}:"):
        raise ValueError("it is no URL: write scheme://host[:port][/path]")
    _refuse_upper_case(scheme, "scheme")
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        raise ValueError("it names a user before the host: what comes before @ can look like the host")
    host, port = _host_and_port(authority)
    segments = tuple(path.removesuffix("/").split("/")) if slash and path else ()
    for segment in segments:
        if segment in {"", ".", ".."} or not _SEGMENT.fullmatch(segment):
            raise ValueError(f"its path has the part {segment!r}, which servers may read as another path")
    return Url(scheme, _plain_host(host), None if port == _DEFAULT_PORTS.get(scheme) else port, segments)


def parse_folder(text: str) -> Folder:
    """The absolute path `text`, judged as text alone. Raises ValueError with the reason where it is not plain."""
    if not text or not text.isprintable():
        raise ValueError("it is empty or holds characters that cannot be printed")
    if os.name != "nt" and "\\" in text:
        raise ValueError("it holds a backslash")
    if not os.path.isabs(text):
        raise ValueError("it is neither a URL nor an absolute path")
    if text.startswith(("//", "\\\\")):
        raise ValueError("a path that begins with two slashes may be on another machine")
    if ".." in re.split(r"[\\/]", text):
        raise ValueError(f"it holds '..': write {os.path.realpath(text)}")
    return Folder(os.path.normpath(text))


def outside(wanted: Address, allowed: Address) -> str | None:
    """Why `wanted` does not lie in `allowed`; None where it does. Looks for symbolic links on the disk."""
    if isinstance(wanted, Url):
        return _outside_url(wanted, allowed) if isinstance(allowed, Url) else "it is a URL, no folder"
    if isinstance(allowed, Url):
        return "it is a folder, no URL"
    for folder in (allowed, wanted):
        real = os.path.realpath(folder.path)
        if os.path.normcase(real) != os.path.normcase(folder.path):
            return f"{folder} leads through a symbolic link to {real}: name the real path"
    inside, root = (os.path.normcase(folder.path) for folder in (wanted, allowed))
    if inside == root or inside.startswith(root.rstrip(os.sep) + os.sep):
        return None
    return "it is another folder"


def without_secrets(address: str) -> str:
    """`address` without the user, the password and the query that it may hold, fit for a message or a file."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address
    shown = re.sub(r"\A[^/]*@", "***@", rest)
    return f"{scheme}://" + re.sub(r"\?.*", "?***", shown, flags=re.DOTALL)


def _outside_url(wanted: Url, allowed: Url) -> str | None:
    for part in ("scheme", "host", "port"):
        given, expected = getattr(wanted, part), getattr(allowed, part)
        if given != expected:
            return f"its {part} is {given or 'the default'}, not {expected or 'the default'}"
    if wanted.path[: len(allowed.path)] != allowed.path:
        return f"its path does not begin with /{'/'.join(allowed.path)}"
    return None


def _local_part(text: str, scheme: str, *, prefix: str) -> str:
    """The absolute path in a URL of this machine's own files."""
    _refuse_upper_case(scheme, "scheme")
    rest = text[len(scheme) + 1 :]
    for character in "%?#":
        if character in rest:
            raise ValueError(f"it holds {_AMBIGUOUS[character]}")
    path = rest.removeprefix(prefix)
    if os.name == "nt" and path.startswith("/"):
        path = path[1:]
    if not rest.startswith(prefix) or not os.path.isabs(path):
        raise ValueError(f"it names no absolute path: write {scheme}:{prefix}/path")
    return path


def _refuse_odd_characters(text: str) -> None:
    if not all("!" <= character <= "~" for character in text):
        if text.isascii():
            raise ValueError("it holds a space or a control character")
        raise ValueError("it holds a character beyond ASCII, which may only look like the one that is meant")
    for character, name in _AMBIGUOUS.items():
        if character in text:
            raise ValueError(f"it holds {name}")


def _refuse_upper_case(text: str, what: str) -> None:
    if text != text.lower():
        raise ValueError(f"its {what} is not in lower case: write {text.lower()}")


def _host_and_port(authority: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*)(?::(.*))?", authority)
    if found is None:
        raise ValueError("its host cannot be told from its port: write an IPv6 address in [brackets]")
    host, port = found[1], found[2]
    if port is None:
        return host, None
    if not re.fullmatch(r"[1-9][0-9]{0,4}", port) or int(port) > 65535:
        raise ValueError(f"its port {port!r} is no number from 1 to 65535")
    return host, int(port)


def _plain_host(host: str) -> str:
    _refuse_upper_case(host, "host")
    if host.startswith("["):
        return _plain_ipv6(host)
    labels = host.split(".")
    if host.endswith("."):
        raise ValueError("its host ends in a dot")
    if not all(len(label) <= 63 and _LABEL.fullmatch(label) for label in labels):
        raise ValueError("it has no host" if not host else f"its host {host!r} is no host's name")
    # Whatever ends like a number is read as an IPv4 address, by some in octal, in hexadecimal or in one piece.
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise ValueError(f"its host {host!r} is not four decimal numbers") from None
    return host


def _plain_ipv6(host: str) -> str:
    try:
        address = ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        raise ValueError(f"its host {host!r} is no IPv6 address") from None
    if address.ipv4_mapped is not None:
        raise ValueError(f"its host is an IPv4 address in disguise: write {address.ipv4_mapped}")
    if address.scope_id is not None or f"[{address.compressed}]" != host:
        raise ValueError(f"its host is not in its shortest spelling: write [{address.compressed}]")
    return host

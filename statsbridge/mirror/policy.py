"""The policy in force: what may leave, to where. Files only ever add conditions, so the strictest wins.

A policy is the set of its files, and something may leave where every file that applies lets it. Reading it
imports no tracker and opens no socket.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from ..errors import PolicyError
from .contract import CHANNELS, Destination
from .destinations import Address, outside, parse_address, without_secrets
from .policy_file import DestinationRule, Limits, PolicyFile, read_policy_file

VARIABLE = "STATSBRIDGE_POLICY"
"""Names a policy file, which must then be there."""

PROJECT_FILE = "statsbridge-policy.toml"
"""Looked for in the working folder and in every folder above it."""

List = Literal["tables", "sites", "statistics", "scalars"]
LISTS: tuple[List, ...] = ("tables", "sites", "statistics", "scalars")

_FILES = ("figures", "artifacts")  # the channels that a tracker may keep elsewhere than its numbers
_PLACES = ("environment", "system", "project")


@dataclass(frozen=True, slots=True)
class Grant:
    """What may leave to one destination: what every one of `limits` lets.

    `policy`: digest of the files that apply, "" where none does. `withheld`: sentences on what was taken away
    beyond what the files list.
    """

    channels: frozenset[str]
    limits: tuple[Limits, ...] = ()
    policy: str = ""
    withheld: tuple[str, ...] = ()

    def admits(self, kind: List, name: str) -> bool:
        """Whether this table, site, statistic or scalar may leave."""
        lists = (getattr(limits, kind) for limits in self.limits)
        return all(allowed is None or any(fnmatchcase(name, glob) for glob in allowed) for allowed in lists)

    def limited(self, kind: List) -> bool:
        """Whether some may not leave."""
        return any(getattr(limits, kind) is not None for limits in self.limits)

    @property
    def hashed(self) -> bool:
        """Whether names leave as hashes only."""
        return any(limits.names == "hashed" for limits in self.limits)

    @property
    def key_file(self) -> str | None:
        """Where the key of the hashes is; None for a key of the run's own, also where the files disagree."""
        files = {limits.key_file for limits in self.limits if limits.names == "hashed"}
        return files.pop() if len(files) == 1 else None

    def spelled_out(self, scalar: str) -> bool:
        """Whether every file that wants names hashed has itself written this scalar's name down."""
        return all(scalar in (limits.scalars or ()) for limits in self.limits if limits.names == "hashed")


@dataclass(frozen=True, slots=True)
class Policy:
    """All policy files that were found."""

    files: frozenset[PolicyFile] = frozenset()

    def combine(self, other: Policy) -> Policy:
        """Both at once: what either forbids is forbidden."""
        return Policy(self.files | other.files)

    def ordered(self) -> list[PolicyFile]:
        """The files, in one order whatever the way they were found."""
        return sorted(self.files, key=lambda file: (_PLACES.index(file.place), file.path))

    def applying(self, *, restricted: bool) -> list[PolicyFile]:
        """The files that bind such a run."""
        return [file for file in self.ordered() if restricted or not file.restricted_only]

    def judge(self, destination: Destination, *, restricted: bool) -> Grant:
        """What a run may send to `destination`; it need not be reachable, nor its tracker installed.

        Raises PolicyError, with the rule and its file, where that is nothing.
        """
        files = self.applying(restricted=restricted)
        where = f"{destination.backend} at {without_secrets(destination.address)}"
        if restricted and not any(file.destinations is not None for file in files):
            raise PolicyError(
                f"a restricted run may not be mirrored to {where}: no policy file lists any destination. To allow "
                f"it, write {_example(destination)} into {PROJECT_FILE}, or use backend='local'"
            )
        if restricted and not destination.explicit:
            raise PolicyError(
                f"a restricted run must name its destination: {where} was found in a default or in the environment. "
                f"Write backend={f'{destination.backend}:{without_secrets(destination.address)}'!r}, or use 'local'"
            )
        if not files:
            return Grant(frozenset(CHANNELS))
        channels, limits = _granted(files, destination.backend, destination.address)
        withheld: list[str] = []
        if destination.artifacts is not None and destination.artifacts != destination.address:
            channels, limits, withheld = _with_files(files, destination, channels, limits)
        if "figures" in channels and "metrics" not in channels:
            withheld.append("figures: they are made of metrics, which may not leave")
            channels -= {"figures"}
        grant = Grant(channels, limits)
        if "artifacts" in channels and (reason := _cannot_go_whole(grant)):
            withheld.append(f"artifacts: the folder of the run holds everything, and {reason}")
            channels -= {"artifacts"}
        if not channels:
            raise PolicyError(
                f"{where}: {_names(files)} leave{'s' if len(files) == 1 else ''} no channel open"
                + "".join(f"; {sentence}" for sentence in withheld)
            )
        return Grant(channels, limits, _digest(files), tuple(withheld))


def load_policy() -> Policy:
    """The policy of this process now: the files of the environment, the system and the project together.

    Raises PolicyError where a file cannot be read or understood, or `$STATSBRIDGE_POLICY` names none.
    """
    found = [read_policy_file(system_file(), "system")]
    named = os.environ.get(VARIABLE)
    if named is not None:
        if not named.strip():
            raise PolicyError(f"${VARIABLE} is set to nothing: unset it, or let it name a policy file")
        file = read_policy_file(Path(named).absolute(), "environment")
        if file is None:
            raise PolicyError(f"policy {named}, named by ${VARIABLE}, is not there, so nothing may leave")
        found.append(file)
    try:
        here = Path.cwd()
    except OSError as error:
        raise PolicyError(f"no {PROJECT_FILE} can be looked for: the working folder is gone ({error})") from error
    # Not just the nearest one: a file deeper down would else lift what one further up forbids.
    found += [read_policy_file(folder / PROJECT_FILE, "project") for folder in (here, *here.parents)]
    return Policy(frozenset(file for file in found if file is not None))


def system_file() -> Path:
    """Where an administrator puts the policy of a machine."""
    if os.name == "nt":
        return Path(os.environ.get("PROGRAMDATA", r"C:\ProgramData"), "statsbridge", "policy.toml")
    return Path("/etc/statsbridge/policy.toml")


def _granted(files: Iterable[PolicyFile], backend: str, address: str) -> tuple[frozenset[str], tuple[Limits, ...]]:
    try:
        wanted = parse_address(address)
    except ValueError as error:
        raise PolicyError(
            f"{_names(files)} must judge the destination {without_secrets(address)!r} of {backend}, and it is not "
            f"written plainly: {error}"
        ) from None
    channels, limits = frozenset(CHANNELS), []
    for file in files:
        chosen = file.limits if file.destinations is None else _rule(file, file.destinations, backend, wanted).limits
        limits.append(chosen)
        if chosen.channels is not None:
            channels &= frozenset(chosen.channels)
    return channels, tuple(limits)


def _rule(file: PolicyFile, rules: Collection[DestinationRule], backend: str, wanted: Address) -> DestinationRule:
    """The first rule of the file that the destination fits."""
    reasons = []
    for rule in rules:
        if not fnmatchcase(backend, rule.backend):
            continue
        reason = outside(wanted, rule.address)
        if reason is None:
            return rule
        reasons.append(f"not by [[destinations]] {rule.number} ({rule.backend} at {rule.address}): {reason}")
    told = "; ".join(reasons) if reasons else f"none of its {len(rules)} [[destinations]] is for {backend}"
    raise PolicyError(f"{backend} at {wanted} is not allowed by policy {file.path}: {told}")


def _with_files(
    files: Collection[PolicyFile], destination: Destination, channels: frozenset[str], limits: tuple[Limits, ...]
) -> tuple[frozenset[str], tuple[Limits, ...], list[str]]:
    """The grant, where figures and artifacts go to an address of their own."""
    wanted = channels & set(_FILES)
    try:
        there, more = _granted(files, destination.backend, str(destination.artifacts))
    except PolicyError as error:
        there, more, reason = frozenset[str](), (), str(error)
    else:
        reason = "other channels are listed for it"
    if wanted <= there:
        return channels, limits + more, []
    lost = sorted(wanted - there)
    told = f"{', '.join(lost)}: they would go to {without_secrets(str(destination.artifacts))}, and {reason}"
    return channels - set(lost), limits + more, [told]


def _cannot_go_whole(grant: Grant) -> str:
    if grant.hashed:
        return "names are to be hashed"
    if limited := [kind for kind in LISTS if grant.limited(kind)]:
        return f"{', '.join(limited)} are limited"
    if missing := sorted(set(CHANNELS) - grant.channels):
        return f"{', '.join(missing)} may not leave"
    return ""


def _digest(files: Iterable[PolicyFile]) -> str:
    return hashlib.sha256("".join(sorted({file.digest for file in files})).encode()).hexdigest()[:16]


def _names(files: Iterable[PolicyFile]) -> str:
    return "policy " + " and ".join(file.path for file in files)


def _example(destination: Destination) -> str:
    address = without_secrets(destination.address)
    key = "url" if "://" in address else "path"
    return f'destinations = [{{backend = "{destination.backend}", {key} = "{address}"}}]'

"""What `statsbridge policy` says, as data: the rules in force, their verdict on a destination, what has left."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statsbridge.mirror.contract import Destination
    from statsbridge.mirror.policy import List, Policy
    from statsbridge.mirror.policy_file import Limits


def files_of(found: "Policy") -> list[dict[str, Any]]:
    """The policy files in force, each with its rules."""
    return [
        {
            "path": file.path,
            "place": file.place,
            "applies_to": "restricted" if file.restricted_only else "all",
            "sha256": file.digest,
            "limits": _limits(file.limits),
            "destinations": None
            if file.destinations is None
            else [
                {
                    "number": rule.number,
                    "backend": rule.backend,
                    "address": str(rule.address),
                    "limits": _limits(rule.limits),
                }
                for rule in file.destinations
            ],
        }
        for file in found.ordered()
    ]


def _limits(limits: "Limits") -> dict[str, Any]:
    names = ("channels", "tables", "sites", "statistics", "scalars", "names", "key_file")
    return {name: getattr(limits, name) for name in names}


def of_backend(found: "Policy", subject: str, *, restricted: bool) -> list[dict[str, Any]]:
    """What may leave to the tracker `subject`; nothing for the local record. Raises ConfigError."""
    from statsbridge.backends import make_adapters
    from statsbridge.mirror.mirrors import destination_of

    return [_verdict(found, destination_of(adapter), restricted) for adapter in make_adapters(subject)]


def of_report(found: "Policy", subject: str, *, restricted: bool) -> dict[str, Any]:
    """What may leave into the report `subject`. Raises ConfigError for one that names no file."""
    from statsbridge.errors import ConfigError
    from statsbridge.mirror.released import report_destination

    _, colon, file = subject.partition(":")
    if colon and not file:
        raise ConfigError(f"{subject!r}: write 'report', or 'report:FILE' with the file that is to be written")
    # Without a file: where `statsbridge report` would write it from here.
    return _verdict(found, report_destination(Path(file or "<run id>.html").absolute()), restricted)


def of_run(found: "Policy", subject: str, directory: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run and what has left it; and what may leave to each of its mirrors now. Raises LogError."""
    from statsbridge.backends import installed_adapters
    from statsbridge.errors import LogError
    from statsbridge.log import resolve_run
    from statsbridge.log.runs import read_info
    from statsbridge.mirror.state import readable_states

    try:
        run = resolve_run(subject, directory)
    except LogError as error:
        known = ", ".join(sorted(installed_adapters()))
        raise LogError(f"{error}. Nor is it an installed tracker: {known or 'there is none'}") from error
    info = read_info(run)
    restricted = bool(info.get("restricted"))
    states, damaged = readable_states(run)
    facts = {
        "id": info["id"],
        "name": info["name"],
        "path": str(run),
        "restricted": restricted,
        "left": _left(run),
        "damaged_mirrors": [one.reason for one in damaged],
    }
    return facts, [_verdict(found, state.destination, restricted) for state in states]


def _verdict(found: "Policy", destination: "Destination", restricted: bool) -> dict[str, Any]:
    from statsbridge.errors import PolicyError
    from statsbridge.log import SITES
    from statsbridge.mirror.destinations import without_secrets
    from statsbridge.mirror.policy import LISTS
    from statsbridge.mirror.policy_file import STATISTICS, TABLES

    verdict: dict[str, Any] = {
        "backend": destination.backend,
        "address": without_secrets(destination.address),
        "explicit": destination.explicit,
        "restricted": restricted,
    }
    try:
        grant = found.judge(destination, restricted=restricted)
    except PolicyError as error:
        return {**verdict, "allowed": False, "reason": str(error)}
    known: dict[List, Sequence[str]] = {"tables": TABLES, "sites": SITES, "statistics": STATISTICS}
    return {
        **verdict,
        "allowed": True,
        "channels": sorted(grant.channels),
        **{kind: [name for name in names if grant.admits(kind, name)] for kind, names in known.items()},
        "scalars": [limits.scalars for limits in grant.limits if limits.scalars is not None],
        "limited": [kind for kind in LISTS if grant.limited(kind)],
        "names": "hashed" if grant.hashed else "plain",
        "key_file": grant.key_file,
        "withheld": grant.withheld,
        "policy": grant.policy,
    }


def _left(run: Path) -> list[dict[str, Any]]:
    """What has left, one entry a destination and channel, in the order in which they began."""
    from statsbridge.mirror.audit import read_audit

    left: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in read_audit(run).to_pylist():
        key = (row["backend"], row["destination"], row["channel"])
        when = row["time"].isoformat()
        entry = left.setdefault(
            key,
            {
                "backend": key[0],
                "destination": key[1],
                "channel": key[2],
                "deliveries": 0,
                "rows": 0,
                "first": when,
                "last": when,
                "first_step": None,
                "last_step": None,
                "fields": [],
                "policies": [],
            },
        )
        entry["deliveries"] += 1
        entry["rows"] += row["rows"]
        entry["last"] = when
        for name, best in (("first_step", min), ("last_step", max)):
            steps = [step for step in (entry[name], row[name]) if step is not None]
            entry[name] = best(steps, default=None)
        entry["fields"] = sorted({*entry["fields"], *row["fields"]})
        entry["policies"] = sorted({*entry["policies"], row["policy"]})
    return list(left.values())

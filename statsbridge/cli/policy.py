"""`statsbridge policy`: which rules are in force, what they would let out, and what has left."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .ls import DEFAULT_DIRECTORY
from .output import Column, as_json, command, page, print_line, print_table, show_page

if TYPE_CHECKING:
    from rich.console import Console

    from statsbridge.mirror.contract import Destination
    from statsbridge.mirror.policy import List, Policy
    from statsbridge.mirror.policy_file import Limits

EXIT_FORBIDDEN = 1


def policy(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|BACKEND[:TARGET]]", help="A run, or a tracker such as mlflow:https://mlflow.lab.example."
        ),
    ] = None,
    unrestricted: Annotated[
        bool, typer.Option("--unrestricted", help="Of a tracker: ask for a run that is not restricted.")
    ] = False,
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = DEFAULT_DIRECTORY,
    output: Annotated[str, typer.Option("--format", help="table or json.")] = "table",
) -> None:
    """Say which policy is in force, what it lets leave to a tracker, or what has left a run; status 1 if forbidden."""
    with command():
        from statsbridge.analyze.choices import unknown_choice
        from statsbridge.backends import LOCAL, installed_adapters
        from statsbridge.mirror.policy import load_policy

        if output not in {"table", "json"}:
            raise unknown_choice("format", output, ("table", "json"))
        found = load_policy()
        facts: dict[str, Any] = {"files": _files(found)}
        if subject is None:
            verdicts = []
        elif subject.partition(":")[0] in {LOCAL, *installed_adapters()}:
            verdicts = _backend(found, subject, restricted=not unrestricted)
        else:
            facts["run"], verdicts = _run(found, subject, directory)
        facts["destinations"] = verdicts
        if output == "json":
            sys.stdout.write(as_json(facts) + "\n")
        else:
            _print(facts)
            if subject == LOCAL:
                sys.stdout.write("\nthe local record is no tracker: it is written whole, and stays where it is\n")
        if not all(verdict["allowed"] for verdict in verdicts):
            raise typer.Exit(EXIT_FORBIDDEN)


# ---- facts -----------------------------------------------------------------------------------------------------


def _files(found: "Policy") -> list[dict[str, Any]]:
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


def _backend(found: "Policy", subject: str, *, restricted: bool) -> list[dict[str, Any]]:
    from statsbridge.backends import make_adapters
    from statsbridge.mirror.mirrors import destination_of

    return [_verdict(found, destination_of(adapter), restricted) for adapter in make_adapters(subject)]


def _run(found: "Policy", subject: str, directory: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from statsbridge.backends import installed_adapters
    from statsbridge.errors import LogError
    from statsbridge.log import resolve_run
    from statsbridge.log.runs import read_info
    from statsbridge.mirror.state import load_states

    try:
        run = resolve_run(subject, directory)
    except LogError as error:
        known = ", ".join(sorted(installed_adapters()))
        raise LogError(f"{error}. Nor is it an installed tracker: {known or 'there is none'}") from error
    info = read_info(run)
    restricted = bool(info.get("restricted"))
    facts = {"id": info["id"], "name": info["name"], "path": str(run), "restricted": restricted, "left": _left(run)}
    return facts, [_verdict(found, state.destination, restricted) for state in load_states(run)]


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


# ---- text ------------------------------------------------------------------------------------------------------


def _print(facts: Mapping[str, Any]) -> None:
    console = page()
    _print_files(console, facts["files"])
    run = facts.get("run")
    if run is not None:
        print_line(console, "")
        kind = "restricted" if run["restricted"] else "not restricted"
        print_line(console, f"run {run['id']} ({run['name']}), {kind}")
    for verdict in facts["destinations"]:
        print_line(console, "")
        _print_verdict(console, verdict)
    if run is not None:
        print_line(console, "")
        _print_left(console, run["left"])
    show_page(console)


def _print_files(console: "Console", files: Sequence[Mapping[str, Any]]) -> None:
    from statsbridge.mirror.policy import PROJECT_FILE, VARIABLE, system_file

    if not files:
        print_line(console, "no policy is in force: a run goes anywhere, a restricted one to the local record only")
        print_line(
            console,
            f"looked for ${VARIABLE}, {system_file()}, and {PROJECT_FILE} in the working folder and those above it",
        )
        return
    rows = []
    for file in files:
        runs = "restricted runs" if file["applies_to"] == "restricted" else "all runs"
        if file["destinations"] is None:
            rows.append((file["place"], file["path"], "", runs, "any", _in_words(file["limits"])))
        elif not file["destinations"]:
            rows.append((file["place"], file["path"], "", runs, "none", ""))
        else:
            for rule in file["destinations"]:
                where = f"{rule['backend']} at {rule['address']}"
                number = str(rule["number"])
                rows.append((file["place"], file["path"], number, runs, where, _in_words(rule["limits"])))
    headers = ("place", "file", "rule", "for", "destination", "lets out")
    columns = [
        Column(header, [(row[number], "") for row in rows], folds=header in {"file", "destination", "lets out"})
        for number, header in enumerate(headers)
    ]
    print_table(console, columns)
    print_line(console, "what every file lets out may leave")


def _in_words(limits: Mapping[str, Any]) -> str:
    lists = ("channels", "tables", "sites", "statistics", "scalars")
    told = [f"{name}: {', '.join(limits[name]) or 'none'}" for name in lists if limits[name] is not None]
    return "; ".join([*told, f"names: {limits['names']}"])


def _print_verdict(console: "Console", verdict: Mapping[str, Any]) -> None:
    kind = "a restricted run" if verdict["restricted"] else "a run that is not restricted"
    where = f"{kind} to {verdict['backend']} at {verdict['address']}"
    if not verdict["allowed"]:
        print_line(console, f"{where}: forbidden", "critical")
        print_line(console, f"  {verdict['reason']}")
        return
    print_line(console, f"{where}: allowed")
    for kind in ("channels", "tables", "sites", "statistics"):
        everything = kind != "channels" and kind not in verdict["limited"]
        print_line(console, f"  {kind}: {'all' if everything else ', '.join(verdict[kind]) or 'none'}")
    scalars = " and among ".join(", ".join(names) or "none" for names in verdict["scalars"])
    print_line(console, f"  scalars: {scalars or 'all'}")
    print_line(console, f"  names: {verdict['names']}")
    for sentence in verdict["withheld"]:
        print_line(console, f"  withheld: {sentence}")


def _print_left(console: "Console", left: Sequence[Mapping[str, Any]]) -> None:
    if not left:
        print_line(console, "nothing has left")
        return

    def cells(name: str) -> list[tuple[str, str]]:
        return [("" if entry[name] is None else str(entry[name]), "") for entry in left]

    print_line(console, "what has left, or was about to:")
    columns = [
        Column("destination", [(f"{entry['backend']} at {entry['destination']}", "") for entry in left], folds=True),
        Column("channel", cells("channel")),
        Column("rows", cells("rows"), "right"),
        Column("first step", cells("first_step"), "right", optional=3),
        Column("last step", cells("last_step"), "right", optional=4),
        Column("last (UTC)", [(entry["last"][:19].replace("T", " "), "") for entry in left], optional=2),
        Column("fields", [(", ".join(entry["fields"]), "") for entry in left], folds=True, optional=1),
    ]
    left_out = print_table(console, columns)
    if left_out:
        print_line(console, f"left out at this width: {', '.join(left_out)} (piped output has it all)")

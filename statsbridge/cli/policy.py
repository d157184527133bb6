"""`statsbridge policy`: which rules are in force, what they would let out, and what has left."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .ls import DEFAULT_DIRECTORY
from .output import Column, as_json, command, page, print_line, print_table, show_page

if TYPE_CHECKING:
    from rich.console import Console

EXIT_FORBIDDEN = 1


def policy(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|BACKEND[:TARGET]]",
            help="A run, a tracker such as mlflow:https://mlflow.lab.example, or a report such as report:FILE.",
        ),
    ] = None,
    unrestricted: Annotated[
        bool, typer.Option("--unrestricted", help="Of a tracker or report: ask for a run that is not restricted.")
    ] = False,
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = DEFAULT_DIRECTORY,
    output: Annotated[str, typer.Option("--format", help="table or json.")] = "table",
) -> None:
    """Say which policy is in force, what it lets leave to a tracker or into a report, or what has left a run.

    The status is 1 where something is forbidden, or where a mirror of the run cannot be read.
    """
    with command():
        from statsbridge.analyze.choices import unknown_choice
        from statsbridge.backends import LOCAL, installed_adapters
        from statsbridge.mirror.policy import load_policy
        from statsbridge.mirror.released import BACKEND as REPORT

        from .policy_facts import files_of, of_backend, of_report, of_run

        if output not in {"table", "json"}:
            raise unknown_choice("format", output, ("table", "json"))
        found = load_policy()
        facts: dict[str, Any] = {"files": files_of(found)}
        if subject is None:
            verdicts = []
        elif subject.partition(":")[0] == REPORT:
            verdicts = [of_report(found, subject, restricted=not unrestricted)]
        elif subject.partition(":")[0] in {LOCAL, *installed_adapters()}:
            verdicts = of_backend(found, subject, restricted=not unrestricted)
        else:
            facts["run"], verdicts = of_run(found, subject, directory)
        facts["destinations"] = verdicts
        if output == "json":
            sys.stdout.write(as_json(facts) + "\n")
        else:
            _print(facts)
            if subject == LOCAL:
                sys.stdout.write("\nthe local record is no tracker: it is written whole, and stays where it is\n")
        damaged = facts.get("run", {}).get("damaged_mirrors")
        if damaged or not all(verdict["allowed"] for verdict in verdicts):
            raise typer.Exit(EXIT_FORBIDDEN)


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
        for reason in run["damaged_mirrors"]:
            print_line(console, "")
            print_line(console, f"a mirror that nothing can be said of: {reason}", "critical")
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

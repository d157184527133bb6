"""`statsbridge report`: one or several runs as one HTML file to keep or to send."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .ls import DEFAULT_DIRECTORY, size
from .output import command, one_line

if TYPE_CHECKING:
    from statsbridge.mirror.released import Release
    from statsbridge.view.report import Subject


def report(
    runs: Annotated[
        list[str] | None, typer.Argument(help="Folders, ids, unique beginnings of ids, or names; the latest if none.")
    ] = None,
    *,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Where to; <run id>.html if not given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE even if it is no report.")] = False,
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = DEFAULT_DIRECTORY,
) -> None:
    """Write runs as one HTML file that needs no network: findings first, pictures, modules, events, policy.

    Several runs are laid over each other first. Of a restricted run only what its policy lets out is in it.
    """
    with command():
        from statsbridge.log import resolve_run
        from statsbridge.log.runs import run_state
        from statsbridge.mirror.policy import load_policy
        from statsbridge.mirror.released import released
        from statsbridge.view.report import refuse_to_replace, write_report

        folders = [resolve_run(run, directory) for run in runs or ["latest"]]
        file = Path(output or _name(folders)).absolute()
        refuse_to_replace(file, force=force)
        policy = load_policy()
        with ExitStack() as opened:
            subjects = [
                _subject(opened.enter_context(released(folder, file, policy)), run_state(folder)) for folder in folders
            ]
            write_report(subjects, file, force=force)
        limited = sum(bool(subject.policy.left_out) for subject in subjects)
        sys.stdout.write(f"{one_line(str(file))}  {size(file.stat().st_size)}\n")
        if limited:
            which = "the run" if len(folders) == 1 else f"{limited} of {len(folders)} runs"
            sys.stdout.write(f"only what the policy lets out of {which} is in it; the report says what is not\n")


def _name(folders: list[Path]) -> str:
    more = f"-and-{len(folders) - 1}-more" if len(folders) > 1 else ""
    return f"{folders[0].name}{more}.html"


def _subject(release: "Release", state: str) -> "Subject":
    from statsbridge.view.report import PolicyFacts, Subject

    facts = PolicyFacts(
        restricted=release.restricted,
        files=release.files,
        left_out=release.left_out,
        deliveries=release.deliveries,
        pictures="figures" in release.channels,
        alerts="alerts" in release.channels,
    )
    return Subject(release.data, state, facts)

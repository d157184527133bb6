"""Aim's repositories: made once whatever runs beside, opened, and read without a change. For the worker process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from .labels import key

INSIDE = "__AIM_REPO_NAME__"
"""The variable by which Aim lets the folder `.aim` be called otherwise."""


class Busy(Exception):  # noqa: N818
    """Somebody else is at work on the repository; it will pass."""


def inside_name() -> str:
    """What the folder is called that a repository keeps everything in."""
    return os.environ.get(INSIDE) or ".aim"


def open_repository(address: str, *, create: bool) -> Any:
    """The `aim.Repo` at an `aim://` address or in a folder, which becomes the working folder of this process.

    Raises Busy while another process is making it, and FileNotFoundError where there is none to read.
    """
    aim_repo = import_module("aim.sdk.repo")
    if "://" in address:
        return aim_repo.Repo(address)
    folder = Path(address)
    if create:
        _make(folder)
    # Aim's files hold the path by which it was opened: the shortest one says nothing of where the run was.
    os.chdir(folder)
    if not os.path.isdir(inside_name()):
        raise FileNotFoundError(f"there is no Aim repository in {address}")
    status = aim_repo.Repo.check_repo_status(".")
    if not os.path.exists(os.path.join(inside_name(), "VERSION")):
        raise Busy(f"the Aim repository in {address} is being made by another process (it has no VERSION yet)")
    if status is not aim_repo.RepoStatus.UPDATED:
        raise RuntimeError(f"the Aim repository in {address} is of an older version: run `aim storage upgrade` there")
    return aim_repo.Repo(".")


def _make(folder: Path) -> None:
    """Make a repository where there is none, complete at once: two that make one in place break each other."""
    target = folder / inside_name()
    if target.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix=".statsbridge-aim-", dir=folder)
    try:
        os.chdir(scratch)
        import_module("aim").Repo(".", init=True)
        os.chdir(folder)
        try:
            os.rename(os.path.join(scratch, inside_name()), target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_values(repository: Any, hash: str) -> Iterator[list[tuple[str, int, float]]]:
    """Every number of a run, a sequence at a time, as (key, step, value); what is not indexed yet too.

    Raises ValueError at the end, naming the sequences that could not be read.
    """
    series = _tree(repository, "seqs", hash).subtree(("seqs", "v2", "chunks", hash))
    # Opened after the values: a sequence is announced here before its first value is written.
    about = _tree(repository, "meta", hash).subtree(("meta", "chunks", hash))
    contexts = about.subtree("contexts")
    damaged = []
    for number, sequences in about.subtree("traces").items():
        context = contexts[number]
        for name, facts in sequences.items():
            if facts.get("version", 1) != 2:
                continue  # a figure, a histogram, a message
            label = key(name, dict(context))
            try:
                steps = dict(series.subtree((number, name, "step")).items())
                values = dict(series.subtree((number, name, "val")).items())
            except Exception as error:
                damaged.append(f"{label} ({error})")
                continue
            yield sorted((label, int(steps[place]), float(value)) for place, value in values.items() if place in steps)
    if damaged:
        raise ValueError("damaged sequences: " + ", ".join(damaged))


def _tree(repository: Any, part: str, hash: str) -> Any:
    # Without the option, Aim would open the run for writing to tidy it up.
    return repository.request_tree(part, hash, read_only=True, skip_read_optimization=True)

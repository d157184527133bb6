"""`statsbridge doctor`: is everything that statsbridge needs here, and does it work?"""

import importlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

import statsbridge
from statsbridge.backends import ENTRY_POINT_GROUP, installed_adapters, make_adapter
from statsbridge.errors import LogError, PolicyError, StatsBridgeError

from .facts import size_line
from .output import Column, command, page, print_line, print_table, show_page

OLDEST_TORCH = (2, 6)
# Package → the extra that brings it; None where statsbridge cannot work without it.
PACKAGES = {"numpy": None, "pyarrow": None, "torch": "torch", "duckdb": "sql", "sklearn": "demo"}
SYMBOLS = {"ok": "ok", "missing": "-", "warning": "!", "critical": "!!"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. What is `critical` makes the command end with status 1."""

    subject: str
    state: Literal["ok", "missing", "warning", "critical"]
    text: str


def doctor(
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = "statsbridge-runs",
) -> None:
    """Report versions, adapters, write access and policy; status 1 if something needed is broken."""
    with command():
        findings = list(_findings(Path(directory)))
        console = page()
        styles = {"ok": "", "missing": "missing", "warning": "warning", "critical": "critical"}
        columns = [
            Column("", [(SYMBOLS[one.state], styles[one.state]) for one in findings]),
            Column("what", [(one.subject, "") for one in findings]),
            Column("finding", [(one.text, styles[one.state]) for one in findings], folds=True),
        ]
        print_table(console, columns)
        broken = sum(one.state == "critical" for one in findings)
        print_line(console, "")
        if broken:
            print_line(console, f"{broken} of {len(findings)} checks failed (marked !!)", "critical")
        else:
            print_line(console, "everything that is needed works")
        show_page(console)
        if broken:
            raise typer.Exit(1)


def _findings(directory: Path) -> Iterator[Finding]:
    yield Finding("statsbridge", "ok", statsbridge.__version__)
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package, extra in PACKAGES.items():
        yield _package(package, extra)
    yield _adapters()
    yield _write_access(directory)
    yield from _newest_run(directory)
    yield _policy()
    yield from _key(directory)
    yield _disabled(os.environ.get("STATSBRIDGE_DISABLED"))


def _package(package: str, extra: str | None) -> Finding:
    try:
        version = str(importlib.import_module(package).__version__)
    except ModuleNotFoundError as error:
        if extra is None or error.name != package:
            return Finding(package, "critical", f"cannot be imported: {error}")
        return Finding(package, "missing", f"not installed: pip install 'statsbridge[{extra}]' brings it")
    # A broken shared library is an OSError, an incompatible one may be anything.
    except Exception as error:
        return Finding(package, "critical", f"installed, but cannot be imported: {error}")
    if package == "torch" and release(version) < OLDEST_TORCH:
        return Finding(package, "critical", f"{version} is too old: statsbridge.init needs 2.6 or later")
    return Finding(package, "ok", version)


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; vendors' suffixes such as 2.6.0a0+nv25.1 do not matter."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _adapters() -> Finding:
    names = sorted(installed_adapters())
    if not names:
        return Finding("adapters", "ok", f"none (group {ENTRY_POINT_GROUP}); runs go to Parquet only")
    usable, unusable = [], []
    for name in names:
        try:
            make_adapter(name)
        except (StatsBridgeError, ImportError, OSError) as error:  # the latter of a package it stands on
            unusable.append(str(error))
        else:
            usable.append(name)
    return Finding("adapters", "ok", "; ".join([f"can be used: {', '.join(usable) or 'none'}", *unusable]))


def _write_access(directory: Path) -> Finding:
    """Write and delete a file where a run would be written; leaves nothing behind."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".statsbridge-doctor-", dir=existing) as folder:
            with open(Path(folder, "probe"), "wb") as file:
                file.write(b"statsbridge")
                file.flush()
                os.fsync(file.fileno())
            free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        return Finding("run folder", "critical", f"{directory} cannot be written: {error}; give another --dir")
    made = "can be written" if existing == directory.absolute() else "can be made"
    return Finding("run folder", "ok", f"{directory} {made}, {free:.3g} GB free")


def _newest_run(directory: Path) -> Iterator[Finding]:
    """What the newest run takes on disk; nothing where there is none."""
    try:
        from statsbridge.log import load, resolve_run
        from statsbridge.log.size import growth

        data = load(resolve_run("latest", directory))
        grown = growth(data)
        free = shutil.disk_usage(data.path).free
    except (LogError, ImportError, OSError):  # the lines before say what is wrong
        return
    a_day = grown.bytes_a_day
    lasts = f", and there is room for {free / a_day:.3g} days" if a_day else ""
    yield Finding("newest run", "ok", f"{data.id}: {size_line(grown)}{lasts}; max_bytes= sets a limit")


def _policy() -> Finding:
    try:
        from statsbridge.mirror.policy import load_policy

        files = load_policy().files
    except (PolicyError, ImportError, OSError) as error:
        return Finding("policy", "critical", str(error))
    if not files:
        return Finding("policy", "ok", "none: unrestricted runs may be mirrored anywhere, restricted ones nowhere")
    named = ", ".join(sorted(file.path for file in files))
    return Finding("policy", "ok", f"{named} (statsbridge policy explains)")


def _key(directory: Path) -> Iterator[Finding]:
    """Whether the newest run's names can go on leaving as the hashes they had; nothing where none has left so."""
    try:
        from statsbridge.log import resolve_run
        from statsbridge.mirror.hashing import key_trouble

        run = resolve_run("latest", directory)
    except (LogError, ImportError, OSError):
        return
    trouble = key_trouble(run)
    if trouble is not None:
        yield Finding("key", "warning", f"{run.name}: {trouble}")


def _disabled(value: str | None) -> Finding:
    if value == "1":
        return Finding("switch", "warning", "$STATSBRIDGE_DISABLED=1: statsbridge.init records nothing")
    shown = "is not set" if value is None else f"is {value!r}"
    return Finding("switch", "ok", f"$STATSBRIDGE_DISABLED {shown}: statsbridge.init records")

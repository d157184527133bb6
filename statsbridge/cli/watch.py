"""`statsbridge watch`: a run in the terminal while it trains, findings first."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from statsbridge.wording import counted

from .ls import DEFAULT_DIRECTORY, size
from .output import STYLES, command, number, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from rich.text import Text

    from statsbridge.analyze.findings import Finding
    from statsbridge.mirror.state import MirrorState

    from .following import Follower, Situation

EXIT_NOT_FINISHED = 1
LATEST = "latest"
_SECONDS, _SECONDS_PIPED = 1.0, 10.0
_FINDINGS_SHOWN = 6
_CURVES_SHOWN = 6
_CURVE_CELLS = 48
_REMEMBERED = 200  # lines that are not written again
_DULL = ("step_time", "samples", "grad_norm_applied")
_MARKS = {"critical": "!!", "warning": "!"}


def watch(
    run: Annotated[str, typer.Argument(help="A run's folder, id, unique beginning of an id, or name.")] = LATEST,
    *,
    directory: Annotated[str, typer.Option("--dir", help="The folder that holds the runs.")] = DEFAULT_DIRECTORY,
    interval: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Between two looks; 1 in a terminal, 10 where output is piped."),
    ] = None,
) -> None:
    """Follow a run while it trains, findings first, until it ends; status 1 if it did not finish.

    Only reads, and only what is new. Ctrl-C ends the watching, not the training.
    """
    with command():
        from .following import Follower

        path = _resolve(run, directory)
        follower = Follower(path)
        terminal = sys.stdout.isatty()
        seconds = interval or (_SECONDS if terminal else _SECONDS_PIPED)
        last = _on_screen(follower, seconds) if terminal else _as_lines(follower, seconds)
        if last.state != "finished":
            raise typer.Exit(EXIT_NOT_FINISHED)


def _resolve(run: str, directory: str) -> "Path":
    """The run's folder; the latest one is waited for where there is none yet."""
    from pathlib import Path

    from statsbridge.log import resolve_run
    from statsbridge.log.runs import runs_in

    if run == LATEST and not runs_in(Path(directory)):
        typer.echo(f"no run in {one_line(directory)} yet: waiting for one (Ctrl-C ends that)", err=True)
        while not runs_in(Path(directory)):
            time.sleep(_SECONDS)
    return resolve_run(run, directory)


def _situations(follower: "Follower", seconds: float) -> "Iterator[Situation]":
    """Look, again and again, until the run has ended; without a pause while there is more to read."""
    while True:
        situation = follower.look()
        yield situation
        if situation.ended:
            return
        if not situation.behind or situation.trouble:
            time.sleep(seconds)


# ---- a terminal ------------------------------------------------------------------------------------------------


def _on_screen(follower: "Follower", seconds: float) -> "Situation":
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, markup=False, emoji=False)
    situation = None
    with Live(console=console, auto_refresh=False) as live:
        for situation in _situations(follower, seconds):
            live.update(screen(situation), refresh=True)
    assert situation is not None
    return situation


def screen(situation: "Situation") -> "Text":
    """All of it as lines: the run, findings, alerts, steps and curves, mirrors."""
    from rich.text import Text

    lines = [Text(one_line(_title(situation)), style="bold")]
    if situation.findings:
        for finding in situation.findings[:_FINDINGS_SHOWN]:
            lines.append(Text(one_line(told(finding)), style=STYLES.get(finding.severity, "")))
            if finding.suggestions:
                lines.append(Text(f"   try: {one_line(finding.suggestions[0])}"))
        if len(situation.findings) > _FINDINGS_SHOWN:
            more = len(situation.findings) - _FINDINGS_SHOWN
            lines.append(Text(f"and {more} more: statsbridge diagnose {one_line(situation.id)}"))
    else:
        lines.append(Text("nothing found so far", style="dim"))
    lines += [Text(one_line(_told_alert(alert)), style=STYLES.get(alert["severity"], "")) for alert in situation.alerts]
    lines += [Text(), Text(_progress(situation)), *_curves(situation)]
    lines += [Text(one_line(_told_mirror(mirror))) for mirror in situation.mirrors]
    if situation.trouble:
        lines.append(Text(one_line(situation.trouble), style=STYLES["warning"]))
    lines.append(Text(one_line(_last_line(situation)), style="dim"))
    return Text("\n").join(lines)


def _title(situation: "Situation") -> str:
    called = "" if situation.name == situation.id else f"  name {situation.name}"
    return f"run {situation.id}{called}  {situation.state}"


def told(finding: "Finding") -> str:
    """A finding in one line."""
    where = "" if finding.module is None else f" in {finding.module or '(model)'}"
    mark = _MARKS.get(finding.severity, "·")
    return f"{mark} {finding.kind.replace('_', ' ')} at step {finding.step}{where}: {finding.message}"


def _told_alert(alert: "Mapping[str, Any]") -> str:
    from .following import RANK

    where = f" {alert['module']}" if alert["module"] else ""
    when = "" if alert["step"] is None else f" at step {alert['step']}"
    rank = "" if alert["rank"] == RANK else f" (rank {alert['rank']})"
    return f"{_MARKS.get(alert['severity'], '·')} {alert['kind']}{when}{where}{rank}: {alert['message']}"


def _progress(situation: "Situation") -> str:
    if situation.step is None:
        return "no step has been recorded yet"
    parts = [f"step {situation.step}"]
    if situation.state == "running" and situation.last_time is not None:
        parts.append(f"closed {max(0.0, time.time() - situation.last_time):.0f} s ago")
    if situation.rate is not None:
        parts.append(f"{situation.rate:.3g} steps/s")
    parts += [f"{situation.sampled} sampled", f"{size(situation.bytes)} on disk"]
    if situation.behind:
        parts.append(f"{counted(situation.behind, 'row')} to read")
    return "  ".join(parts)


def _curves(situation: "Situation") -> "list[Text]":
    from rich.text import Text

    from statsbridge.view.sparkline import sparkline

    names = [name for name in situation.curves if name not in _DULL][:_CURVES_SHOWN]
    width = max((len(one_line(name)) for name in names), default=0)
    return [
        Text(
            f"{one_line(name):<{width}}  {number(situation.curves[name][-1]):>9}  "
            f"{sparkline(situation.curves[name], _CURVE_CELLS)}",
            no_wrap=True,
            overflow="ellipsis",
        )
        for name in names
        if situation.curves[name]
    ]


def _told_mirror(mirror: "MirrorState") -> str:
    state = mirror.status
    if state == "running" and (mirror.owner is None or not mirror.owner.alive):
        state = "its process is gone; deliver the rest with statsbridge sync"
    reason = f" ({mirror.reason})" if mirror.reason else ""
    rejected = f", {mirror.counts.rejected} rejected" if mirror.counts.rejected else ""
    points = counted(mirror.counts.points, "point")
    return f"{mirror.backend} at {mirror.destination.address}: {state}{reason}, {points}{rejected}"


def _last_line(situation: "Situation") -> str:
    if situation.state == "crashed":
        return f"the writer is gone: {situation.writer}. What is on disk stays"
    if situation.ended:
        return f"the run has ended: {situation.state}"
    return "Ctrl-C ends the watching, not the training"


# ---- a pipe or a file ------------------------------------------------------------------------------------------


def _as_lines(follower: "Follower", seconds: float) -> "Situation":
    said: deque[str] = deque(maxlen=_REMEMBERED)
    situation = None

    def say(line: str) -> None:
        if line not in said:
            said.append(line)
            sys.stdout.write(f"{one_line(line)}\n")

    for situation in _situations(follower, seconds):
        say(_title(situation))
        for finding in situation.findings:
            say(told(finding))
        for alert in situation.alerts:
            say(_told_alert(alert))
        if situation.trouble:
            say(situation.trouble)
        if situation.step is not None and not situation.behind:
            say(_numbers(situation))
        sys.stdout.flush()
    assert situation is not None
    for mirror in situation.mirrors:
        say(_told_mirror(mirror))
    say(_last_line(situation))
    return situation


def _numbers(situation: "Situation") -> str:
    curves = {name: values for name, values in situation.curves.items() if values and name not in _DULL}
    told_curves = [f"{name} {number(values[-1])}" for name, values in list(curves.items())[:_CURVES_SHOWN]]
    rate = [] if situation.rate is None else [f"{situation.rate:.3g} steps/s"]
    return "  ".join([f"step {situation.step}", *told_curves, f"{situation.sampled} sampled", *rate])

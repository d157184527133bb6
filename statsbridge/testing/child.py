"""What a check runs in a process of its own: `python -m statsbridge.testing.child REQUEST`, a JSON object."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from statsbridge.errors import Retry
from statsbridge.mirror.contract import Adapter, Batch, Destination, RunInfo

from .crash import MARK
from .made import made_batches, made_event, made_histogram


def send(adapter: Adapter, request: dict[str, Any]) -> None:
    """Open and send, with the memory printed after each acknowledgement; then wait to be killed."""
    memory = dict(request["memory"])
    adapter.open(_run(request), Destination(**request["destination"]), memory)
    print(MARK + json.dumps(memory), flush=True)
    for batch in made_batches(request["end"], series=request["series"])[request["first"] :]:
        while True:
            try:
                adapter.send(batch)
                break
            except Retry:
                time.sleep(0.1)
        print(MARK + json.dumps(memory), flush=True)
    time.sleep(600)


def restricted(adapter: Adapter, request: dict[str, Any]) -> None:
    """Record a restricted run in a process whose host, arguments and printed text can be told from all others."""
    marks = request["marks"]
    sys.argv = [marks["argument"], "--option", marks["argument"]]
    for module, name in ((socket, "gethostname"), (socket, "getfqdn"), (platform, "node")):
        setattr(module, name, lambda *_: marks["host"])
    names = os.uname()
    os.uname = lambda: os.uname_result((names.sysname, marks["host"], names.release, names.version, names.machine))
    run, memory = _run(request), dict[str, str]()
    adapter.open(run, adapter.destination(), memory)
    print(marks["printed"], flush=True)
    print(marks["printed"], file=sys.stderr, flush=True)
    for batch in made_batches(3):
        histograms = [made_histogram(batch.points[-1].step)] if request["channels"] else []
        adapter.send(Batch(batch.points, histograms))
    if request["channels"]:
        adapter.alert(made_event(3))
    adapter.close("finished")
    print("{}")


def main() -> None:
    """Do the one task that the request names."""
    request = json.loads(sys.argv[1])
    kind: Any = import_module(request["module"])
    for name in request["name"].split("."):
        kind = getattr(kind, name)
    if request["task"] == "destination":
        destination(kind, request)
    else:
        {"send": send, "restricted": restricted}[request["task"]](kind(**request["options"]), request)


def destination(kind: type[Adapter], request: dict[str, Any]) -> None:
    """Make the adapter while every import, connection and written file is noted."""
    done: list[str] = []
    watched = ("socket.", "subprocess.", "os.mkdir", "os.remove", "os.rename", "os.system", "sqlite3.")

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(watched):
            done.append(event)
        elif event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
            done.append(f"open {arguments[0]}")

    sys.addaudithook(note)
    adapter = kind(**request["options"])
    adapter.destination()
    adapter.options()
    found = list(done)
    print(json.dumps({"imported": [name for name in request["trackers"] if name in sys.modules], "done": found}))


def _run(request: dict[str, Any]) -> RunInfo:
    run = request["run"]
    return RunInfo(**{**run, "path": Path(run["path"]), "created": datetime.fromisoformat(run["created"])})


if __name__ == "__main__":
    main()

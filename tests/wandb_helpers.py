"""A stand-in for W&B's server on loopback, and readers of what W&B's client wrote: shared by the adapter's tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from statsbridge_wandb.records import RecordFile, parse

KEY = "0123456789abcdef0123456789abcdef01234567"
"""An API key of the form that W&B's client accepts."""


class StubServer:
    """Takes W&B's real client through an online run, and fails as told.

    `state`: "up", "hang" (accepts and never answers), "reset" (closes the connection), or an HTTP status such as
    "503". What arrives is kept: `rows` of wandb-history.jsonl as they were streamed, `runs` (the variables of each
    UpsertBucket), `uploads` (path → body), `finished` (exit codes), `requests` (how many).
    """

    def __init__(self) -> None:
        self.state = "up"
        self.history: dict[int, dict[str, Any]] = {}
        self.runs: list[dict[str, Any]] = []
        self.uploads: dict[str, bytes] = {}
        self.finished: list[int] = []
        self.requests = 0
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _do(self) -> None:
                stub.requests += 1
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if stub.state == "hang":
                    while stub.state == "hang":
                        time.sleep(0.05)
                    self.close_connection = True
                elif stub.state == "reset":
                    self.close_connection = True
                elif stub.state.isdigit():
                    self._answer(int(stub.state), {"errors": [{"message": f"told to answer {stub.state}"}]})
                else:
                    self._answer(200, stub._handle(self.command, self.path, body))

            do_GET = do_POST = do_PUT = do_HEAD = _do  # noqa: N815 - the names that the base class looks for

            def _answer(self, status: int, answer: Any) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # a client that hangs up

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The history as the server has it, in order."""
        return [self.history[number] for number in sorted(self.history)]

    def close(self) -> None:
        """Stop serving."""
        self.state = "reset"
        self._server.shutdown()
        self._server.server_close()

    def _known(self) -> dict[str, Any] | None:
        """What a client that takes up the run is told of it; None for a new run."""
        if not self.runs:
            return None
        return {
            "name": self.runs[0]["name"], "displayName": "", "config": "{}", "summaryMetrics": "{}", "tags": [],
            "historyLineCount": len(self.history), "eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]",
            "historyTail": json.dumps([json.dumps(row) for row in self.rows[-1:]]), "wandbConfig": '{"t": 1}',
        }  # fmt: skip

    def _handle(self, method: str, path: str, body: bytes) -> Any:
        if method == "PUT":
            self.uploads[path] = body
            return {}
        if path.endswith("/graphql"):
            return self._graphql(json.loads(body))
        if path.endswith("/file_stream"):
            self._stream(json.loads(body))
        return {}

    def _stream(self, sent: dict[str, Any]) -> None:
        lines = (sent.get("files") or {}).get("wandb-history.jsonl")
        if lines:
            for number, line in enumerate(lines["content"], lines["offset"]):
                self.history[number] = json.loads(line)
        if sent.get("complete"):
            self.finished.append(sent.get("exitcode", -1))

    def _graphql(self, request: dict[str, Any]) -> Any:
        query, variables = request["query"], request.get("variables") or {}
        if "upsertBucket" in query:
            self.runs.append(variables)
            project = {"name": variables["project"], "entity": {"name": variables.get("entity") or "me"}}
            bucket = {
                "id": "UnVu", "name": variables["name"], "displayName": variables.get("displayName"), "config": None,
                "sweepName": None, "historyLineCount": 0, "project": project,
            }  # fmt: skip
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            made = {"runID": "UnVu", "uploadHeaders": [], "files": files}
            return {"data": {"createRunFiles": made}}
        if "RunResumeStatus" in query:
            return {"data": {"model": {"id": "p", "name": "p", "entity": {"name": "me"}, "bucket": self._known()}}}
        if "viewer" in query:
            return {"data": {"viewer": {"id": "VXNlcg", "entity": "me", "username": "me", "flags": "{}"}}}
        if "serverInfo" in query:
            return {"data": {"serverInfo": {"features": []}}}
        return {"data": {}}


@contextmanager
def stub_server() -> Iterator[StubServer]:
    """A stub that is up inside the block."""
    server = StubServer()
    try:
        yield server
    finally:
        server.close()


def client_rows(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """(step, key → value) of each history record in W&B's run file, in order, without W&B's own keys."""
    found = []
    for record in RecordFile(file).read():
        parsed = parse(record)
        if parsed.HasField("history"):
            items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in parsed.history.item}
            values = {key: value for key, value in items.items() if not key.startswith("_")}
            found.append((parsed.history.step.num, values))
    return found


def client_records(file: Path, kind: str) -> list[Any]:
    """The records of one kind in W&B's run file."""
    parsed = [parse(record) for record in RecordFile(file).read()]
    return [getattr(record, kind) for record in parsed if record.HasField(kind)]


def run_file(folder: Path, identity: str = "*") -> Path:
    """The one run file below `folder`."""
    (file,) = folder.glob(f"wandb/*run-*/run-{identity}.wandb")
    return file


def run_script(code: str, folder: Path, **variables: str) -> str:
    """What a script prints that runs in `folder`, in a process of its own, with W&B offline and quiet."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", **variables}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout

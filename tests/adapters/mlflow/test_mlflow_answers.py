"""What a server may answer, from a stub that answers so: each becomes the error that says what to do."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from statsbridge_mlflow import MLflow

from statsbridge import MirrorError, PolicyError, Reject, Retry, testing
from statsbridge.mirror import Batch, Destination

RUN = {"info": {"run_id": "r1", "status": "RUNNING", "artifact_uri": "mlflow-artifacts:/0/r1/artifacts"}, "data": {}}
Answer = tuple[int, dict[str, str], Any]


@dataclass
class Stub:
    """A server that answers `log-batch` by `answer`, and everything else as if there were a run."""

    port: int = 0
    answer: Callable[[list[dict[str, Any]]], Answer | None] = lambda metrics: None
    taken: list[dict[str, Any]] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    authorization: set[str | None] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def respond(self, path: str, body: dict[str, Any]) -> Answer:
        if not path.startswith("/api/2.0/mlflow/runs/log-batch") or "metrics" not in body:
            return 200, {}, {"run": RUN}
        with self.lock:
            self.requests.append(len(body["metrics"]))
            answer = self.answer(body["metrics"])
            if answer is None:
                self.taken += body["metrics"]
        return answer or (200, {}, {})


@contextmanager
def serving(stub: Stub) -> Iterator[Stub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

        def answer(self, body: dict[str, Any]) -> None:
            stub.authorization.add(self.headers["Authorization"])
            status, headers, content = stub.respond(self.path, body)
            text = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign] # who gave up does not read the answer
    stub.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving(Stub()) as made:
        yield made


@pytest.fixture
def session(stub: Stub, tmp_path: Path) -> testing.Session:
    return opened(f"http://127.0.0.1:{stub.port}", tmp_path)


def opened(uri: str, folder: Path, *, restricted: bool = False) -> testing.Session:
    return testing.Session(MLflow(uri, run_id="r1"), testing.made_run(folder, restricted=restricted))


def batch(count: int) -> Batch:
    return Batch([testing.made_point(testing.made_series(f"m{number}"), 0, float(number)) for number in range(count)])


def error(code: str, message: str = "because") -> dict[str, str]:
    return {"error_code": code, "message": message}


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ((401, {}, "You are not authenticated."), MirrorError, "401: You are not.*MLFLOW_TRACKING_USERNAME"),
        ((403, {}, error("PERMISSION_DENIED")), MirrorError, "403: because: set MLFLOW_TRACKING"),
        ((404, {}, error("RESOURCE_DOES_NOT_EXIST")), MirrorError, "because"),
        ((404, {}, "<html>no such page</html>"), MirrorError, "there is no MLflow server at this address"),
        ((200, {}, "<html>log in here</html>"), MirrorError, "does not answer as an MLflow server does"),
        ((429, {"Retry-After": "7"}, error("REQUEST_LIMIT_EXCEEDED")), Retry, "429: because"),
        ((500, {}, error("INTERNAL_ERROR")), Retry, "500: because"),
        ((503, {}, "upstream is away"), Retry, "503: upstream is away"),
    ],
)
def test_answers(answer: Answer, kind: type[MirrorError], message: str, stub: Stub, session: testing.Session) -> None:
    stub.answer = lambda metrics: answer
    with pytest.raises(kind, match=message) as caught:
        session.call("send", session.adapter.send, batch(3))
    assert isinstance(caught.value, Retry) == (kind is Retry)
    if isinstance(caught.value, Retry):
        assert caught.value.after == (7.0 if "Retry-After" in answer[1] else None)
    assert stub.requests == [3]


def test_bad_points_are_found_and_all_others_are_stored(stub: Stub, session: testing.Session) -> None:
    bad = {"statsbridge/m3", "statsbridge/m1500", "statsbridge/m1501"}

    def refuse(metrics: list[dict[str, Any]]) -> Answer | None:
        if bad.isdisjoint(metric["key"] for metric in metrics):
            return None
        return 400, {}, error("INVALID_PARAMETER_VALUE", "that name")

    stub.answer = refuse
    sent = batch(2000)
    with pytest.raises(Reject, match=r"refuses 3 of 2000 values.*that name") as caught:
        session.call("send", session.adapter.send, sent)
    assert caught.value.points == [sent.points[number] for number in (3, 1500, 1501)]
    taken = sorted(metric["value"] for metric in stub.taken)
    assert taken == sorted(point.value for n, point in enumerate(sent.points) if n not in {3, 1500, 1501})
    assert len(stub.requests) < 60  # by halves, not one by one


def test_requests_too_large_for_a_proxy_are_made_smaller(stub: Stub, session: testing.Session) -> None:
    stub.answer = lambda metrics: (413, {}, "too large") if len(metrics) > 100 else None
    session.call("send", session.adapter.send, batch(1000))
    assert sorted(metric["value"] for metric in stub.taken) == [float(number) for number in range(1000)]


def test_a_batch_that_comes_again_goes_on_where_it_was(stub: Stub, session: testing.Session) -> None:
    """Else a long one would never get through to a server that fails now and then."""
    away = {"statsbridge/m1500"}
    stub.answer = lambda metrics: None if away.isdisjoint(one["key"] for one in metrics) else (503, {}, "away")
    sent = batch(3000)
    with pytest.raises(Retry):
        session.call("send", session.adapter.send, sent)
    assert stub.taken
    away.clear()
    session.call("send", session.adapter.send, sent)
    assert sorted(metric["value"] for metric in stub.taken) == [float(number) for number in range(3000)]
    # Another batch starts from the beginning.
    session.call("send", session.adapter.send, batch(2))
    assert len(stub.taken) == 3002


def test_redirects(stub: Stub, tmp_path: Path) -> None:
    """Followed as MLflow does, but not by a restricted run: nothing arrives where it points to."""
    with serving(Stub()) as target:
        location = {"Location": f"http://127.0.0.1:{target.port}/api/2.0/mlflow/runs/log-batch"}
        stub.answer = lambda metrics: (307, location, "")
        uri = f"http://127.0.0.1:{stub.port}"
        opened(uri, tmp_path).send(batch(2))
        assert len(target.taken) == 2
        restricted = opened(uri, tmp_path, restricted=True)
        with pytest.raises(PolicyError, match=f"redirects to 'http://127.0.0.1:{target.port}"):
            restricted.call("send", restricted.adapter.send, batch(3))
        assert len(target.taken) == 2


def test_a_restricted_run_goes_through_no_proxy(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.elsewhere.example:3128")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(PolicyError, match=r"through the proxy.*NO_PROXY"):
        opened(f"http://127.0.0.1:{stub.port}", tmp_path, restricted=True)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    opened(f"http://127.0.0.1:{stub.port}", tmp_path, restricted=True).send(batch(1))
    monkeypatch.delenv("http_proxy")
    monkeypatch.setenv("no_proxy", "elsewhere.example")
    opened(f"http://127.0.0.1:{stub.port}", tmp_path, restricted=True).send(batch(1))
    assert len(stub.taken) == 2


def test_a_slow_server_gets_smaller_requests(
    stub: Stub, session: testing.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that takes longer than the limit would take as long the next time: so it must become smaller."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")

    def slow(metrics: list[dict[str, Any]]) -> Answer | None:
        if len(metrics) > 300:
            time.sleep(1.5)
        return None

    stub.answer = slow
    session.send(batch(1000))  # repeats while it raises Retry
    assert {metric["value"] for metric in stub.taken} == {float(number) for number in range(1000)}
    assert stub.requests[0] == 1000
    assert max(stub.requests[-4:]) <= 250


def test_nobody_there(tmp_path: Path) -> None:
    """At once, not after the minutes that MLflow's client would try."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        adapter = MLflow(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(Retry, match="cannot be reached"):
            adapter.open(testing.made_run(tmp_path), adapter.destination(), {})


def test_credentials_are_used_and_never_shown(stub: Stub, tmp_path: Path) -> None:
    run = testing.made_run(tmp_path)
    adapter = MLflow(f"http://me:secret@127.0.0.1:{stub.port}", run_id="r1")
    destination = adapter.destination()
    assert destination == Destination("mlflow", f"http://127.0.0.1:{stub.port}", True, details={"run_id": "r1"})
    memory: dict[str, str] = {}
    adapter.open(run, destination, memory)
    assert stub.authorization == {"Basic " + base64.b64encode(b"me:secret").decode()}
    stub.answer = lambda metrics: (503, {}, "away")
    with pytest.raises(Retry) as caught:
        adapter.send(batch(1))
    gone = MLflow("http://me:secret@127.0.0.1:9")
    with pytest.raises(Retry) as unreachable:
        gone.open(run, gone.destination(), {})
    assert "secret" not in repr((destination, adapter.options(), memory, caught.value, unreachable.value))

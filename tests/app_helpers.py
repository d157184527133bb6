"""Helpers for the tests of the live page: runs to look at, a server in a thread, and requests to it."""

import http.client
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import statsbridge
from statsbridge.view.app.page import Page
from statsbridge.view.app.serve import make_server

MARKUP = "<img src=x onerror=pwned=1>"
"""A module's and a run's name that does something where it is taken for markup."""


class Marked(nn.Module):
    """A network with a block, a module that is called twice, and one whose name is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh())
        self.shared = nn.ReLU()
        self.add_module(MARKUP, nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.stem(x))
        x = self.shared(x + self.block(x))
        return self.get_submodule(MARKUP)(x)


def record(folder: Path, name: str, *, steps: int = 24, rate: float = 1e-2, nan_at: int | None = None) -> Path:
    """Train `Marked` and record every second step; from step `nan_at` on one weight of `block.1` is NaN."""
    torch.manual_seed(0)
    model = Marked()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    run = statsbridge.init(model, every=2, dir=folder, name=name, histograms=True, config={"lr": rate, "kind": "test"})
    for step in range(steps):
        if step == nan_at:
            with torch.no_grad():
                model.block[1].weight[0, 0] = math.nan
        x = torch.randn(32, 8)
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss, accuracy=step / steps)
    run.finish()
    assert run.path is not None
    return run.path


@contextmanager
def served(folder: Path) -> Iterator[tuple[Page, int]]:
    """The page of the runs in `folder`, served in a thread, and its port."""
    page = Page(folder)
    server = make_server(page)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield page, server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def ask(
    port: int, path: str, *, method: str = "GET", body: str | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    """Status, headers (lower case) and text of an answer. `headers`: `_` stands for `-`; `Host` is the server's own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.putrequest(method, path, skip_host="Host" in given)
        for name, value in given.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
            connection.putheader("Content-Type", "application/json")
        connection.endheaders(body.encode() if body is not None else None)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()

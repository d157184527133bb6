"""Our own run online: W&B's real client against a stand-in for its server on loopback, with outages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from statsbridge_wandb import WandB
from statsbridge_wandb import adapter as adapter_module
from wandb_helpers import KEY, StubServer, run_script, stub_server

from statsbridge import MirrorError, PolicyError, Retry
from statsbridge.testing import Session, made_batches, made_run
from statsbridge.testing.session import compare, expected, read


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubServer]:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with stub_server() as server:
        yield server


def test_outages_lose_nothing_and_what_the_server_gets_is_what_was_sent(server: StubServer, tmp_path: Path) -> None:
    def make() -> WandB:
        return WandB(server.url, dir=str(tmp_path), project="p", entity="me", group="g")

    run, batches = made_run(tmp_path), made_batches(8)
    session = Session(make(), run)
    for batch, state in zip(batches, ("up", "503", "up", "hang", "up", "reset", "up", "up"), strict=True):
        server.state = state
        session.send(batch)  # an acknowledgement is the row in W&B's file: it needs no server
    session.close()

    points = [point for batch in batches for point in batch.points]
    assert session.acknowledged == points
    streamed = {(key, row["_step"]): value for row in server.rows for key, value in row.items() if key[0] != "_"}
    assert streamed == {(point.series.name, point.step): point.value for point in points}
    assert [row["_timestamp"] * 1e6 for row in server.rows] == [
        pytest.approx(point.time, abs=1) for point in points[::5]
    ]  # five curves a step; the row has the time of its first
    assert server.finished == [0]
    first = server.runs[0]
    assert (first["project"], first["entity"], first["groupName"], first["jobType"]) == ("p", "me", "g", "statsbridge")
    assert (first["host"], first["program"], first["commit"], first["repo"]) == (None, None, None, None)
    assert session.memory["url"] == f"{server.url}/me/p/runs/{session.memory['id']}"
    assert {Path(path).name for path in server.uploads} == {"wandb-summary.json", "config.yaml"}
    compare(read(make(), run, session.destination, session.memory), expected(session.adapter, points))


@pytest.mark.slow
def test_what_the_server_has_not_taken_at_the_end_is_said_with_the_command(
    server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_module, "UPLOAD", 2.0)
    session = Session(WandB(server.url, dir=str(tmp_path)), made_run(tmp_path))
    server.state = "503"
    session.send(made_batches(1)[0])
    with pytest.raises(MirrorError, match=r"has not taken everything .*`wandb sync --include-online .*made-up"):
        session.close()


@pytest.mark.slow
def test_wrong_credentials_and_a_server_that_is_down_are_told_apart(
    server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_module, "CONNECT", 3.0)
    server.state = "503"
    with pytest.raises(Retry):
        Session(WandB(server.url, dir=str(tmp_path)), made_run(tmp_path))
    for server.state in ("401", "403", "404"):
        with pytest.raises(MirrorError, match="refuses the API key, entity or project") as refused:
            Session(WandB(server.url, dir=str(tmp_path)), made_run(tmp_path))
        assert not isinstance(refused.value, Retry)
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(MirrorError, match="No API key configured") as refused:
        Session(WandB(server.url, dir=str(tmp_path)), made_run(tmp_path))
    assert not isinstance(refused.value, Retry)


def test_a_restricted_run_does_not_go_online(server: StubServer, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="only offline"):
        Session(WandB(server.url, dir=str(tmp_path)), made_run(tmp_path, restricted=True))
    assert server.requests == 0


@pytest.mark.slow
def test_a_settings_file_that_names_another_server_is_no_destination(
    server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    settings = tmp_path / "config" / "settings"
    settings.write_text(f"[default]\nbase_url = {server.url}\n")
    with pytest.raises(MirrorError, match="settings file names the server"):
        Session(WandB(dir=str(tmp_path)), made_run(tmp_path))
    settings.write_text("[default]\nmode = disabled\n")
    with pytest.raises(MirrorError, match="disabled in this folder"):
        Session(WandB(dir=str(tmp_path)), made_run(tmp_path))
    settings.write_text("[default]\nmode = offline\n")
    session = Session(WandB(dir=str(tmp_path)), made_run(tmp_path))
    session.send(made_batches(1)[0])
    session.close()
    assert list(tmp_path.glob("wandb/offline-run-*"))
    assert server.requests == 0


@pytest.mark.slow
def test_it_goes_where_the_users_run_goes_with_the_users_key(server: StubServer, tmp_path: Path) -> None:
    code = """
    import json, wandb
    from statsbridge_wandb import WandB
    from statsbridge.testing import Session, made_batches, made_run
    from pathlib import Path
    url, key = URL_AND_KEY
    settings = wandb.Settings(base_url=url, api_key=key, silent=True)
    theirs = wandb.init(project="p", group="team", mode="online", settings=settings)
    session = Session(WandB(), made_run(Path(".")))
    for batch in made_batches(3):
        session.send(batch)
        theirs.log({"x": 1})
    session.close()
    theirs.finish()
    print(json.dumps(dict(session.memory)))
    """.replace("URL_AND_KEY", repr((server.url, KEY)))
    variables = {"WANDB_CONFIG_DIR": str(tmp_path / "config"), "NETRC": str(tmp_path / "netrc"), "WANDB_API_KEY": ""}
    memory = json.loads(run_script(code, tmp_path, **variables))
    assert memory["url"].startswith(server.url)
    assert KEY not in json.dumps(memory)
    assert [run["groupName"] for run in server.runs if run["groupName"]] == ["team", "team"]
    assert "statsbridge" in {run["jobType"] for run in server.runs}
    assert sorted(server.finished) == [0, 0]


@pytest.mark.slow
def test_a_run_taken_up_again_goes_on_where_the_server_is(server: StubServer, tmp_path: Path) -> None:
    def make() -> WandB:
        return WandB(server.url, dir=str(tmp_path))

    run, batches = made_run(tmp_path), made_batches(4)
    session = Session(make(), run)
    for batch in batches[:2]:
        session.send(batch)
    session.close("stopped")
    assert len(server.rows) == 4
    again = Session(make(), run, destination=session.destination, memory=session.memory)
    for batch in batches[1:]:
        again.send(batch)
    again.close()
    points = [point for batch in batches for point in batch.points]
    streamed = {(key, row["_step"]): value for row in server.rows for key, value in row.items() if key[0] != "_"}
    assert streamed == {(point.series.name, point.step): point.value for point in points}
    assert len(server.rows) == 8
    compare(read(make(), run, session.destination, session.memory), expected(again.adapter, points))


@pytest.mark.slow
def test_wandb_sync_uploads_all_run_files_of_one_run_in_order(server: StubServer, tmp_path: Path) -> None:
    run, batches = made_run(tmp_path), made_batches(4)
    session = Session(WandB("offline", dir=str(tmp_path)), run)
    for batch in batches[:2]:
        session.send(batch)
    session.close("stopped")
    again = Session(WandB("offline", dir=str(tmp_path)), run, destination=session.destination, memory=session.memory)
    for batch in batches[1:]:
        again.send(batch)
    again.close()
    command = [sys.executable, "-m", "wandb", "sync", "--yes"]
    environment = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["_step"] for row in server.rows] == list(range(8))
    streamed = {(key, row["_step"]): value for row in server.rows for key, value in row.items() if key[0] != "_"}
    assert streamed == {(p.series.name, p.step): p.value for batch in batches for p in batch.points}

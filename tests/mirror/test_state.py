"""What is kept of a mirror, and that one process at a time serves it."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from log_rows import new_run, start_program

from statsbridge import ConfigError, LogError, MirrorError, Selection
from statsbridge.log.folder import STALE
from statsbridge.mirror import Destination, Point, Series
from statsbridge.mirror.dead_letters import DeadLetters, read_dead_letters
from statsbridge.mirror.state import Counts, MirrorState, Owner, claim, load_state, load_states, mirror_name, state_file
from statsbridge.mirror.tail import Cursor


def made(address: str = "http://host:5000", **changes: object) -> MirrorState:
    return replace(
        MirrorState(
            backend="mlflow",
            options={"experiment": "é"},
            destination=Destination("mlflow", address, explicit=True, details={"run": "7"}),
            selection=Selection(max_series=7, modules=["a*", "b"], smoothing=None),
            cursor=Cursor(1, 2, 3, 4),
            memory={"id": "x"},
            counts=Counts(points=5, rejected=1),
        ),
        **changes,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = new_run(tmp_path)
    (run / "mirrors").mkdir()
    return run


def test_what_is_saved_is_loaded(run: Path) -> None:
    state = made()
    state.save(run)
    assert load_states(run) == [state]
    json.loads(state_file(run, state.name).read_text())


def test_one_file_a_destination(run: Path) -> None:
    names = {mirror_name(Destination("mlflow", f"http://host:{port}", explicit=True)) for port in range(5000, 5010)}
    assert len(names) == 10
    assert all(name.startswith("mlflow-") for name in names)
    assert mirror_name(Destination("aim", "/a", explicit=True)) != mirror_name(
        Destination("tensorboard", "/a", explicit=True)
    )
    # A password changes no name: it is not kept.
    assert made("http://me:one@host").name == made("http://me:two@host").name
    with pytest.raises(ConfigError, match="cannot name a backend"):
        mirror_name(Destination("../x", "/a", explicit=True))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"backend": 3}', '{"destination": 1}'])
def test_a_damaged_file_is_named(text: str, run: Path) -> None:
    (run / "mirrors" / "mlflow-1.json").write_text(text)
    with pytest.raises(LogError, match=r"mlflow-1\.json cannot be read"):
        load_states(run)


def test_a_mirror_has_one_owner(run: Path) -> None:
    state = made()
    mine = claim(run, state.name, lambda: state)
    assert mine.owner is not None
    assert (mine.owner.pid, mine.status) == (os.getpid(), "running")
    assert mine.cursor == state.cursor
    with pytest.raises(MirrorError, match=f"served by process {os.getpid()} on "):
        claim(run, state.name, lambda: state)
    replace(mine, owner=None, cursor=Cursor(9, 9, 9, 9)).save(run)
    assert claim(run, state.name, lambda: state).cursor == Cursor(9, 9, 9, 9)


def test_an_owner_that_is_gone_or_silent_is_followed(run: Path) -> None:
    program = start_program("import os; print(os.getpid())")
    pid = int(program.communicate()[0])
    state = made()
    now = datetime.now(UTC)
    me = Owner.this_process()
    gone = replace(me, pid=pid, heartbeat=now.isoformat())
    silent = replace(me, host="elsewhere", heartbeat=(now - timedelta(seconds=STALE + 5)).isoformat())
    alive = replace(me, host="elsewhere", heartbeat=(now - timedelta(seconds=STALE - 30)).isoformat())
    assert [owner.alive for owner in (gone, silent, alive, replace(me, heartbeat="long ago"))] == [
        False,
        False,
        True,
        False,
    ]
    for owner in (gone, silent):
        file = state_file(run, state.name)
        state.save(run)
        raw = json.loads(file.read_text())
        raw["owner"] = {"host": owner.host, "pid": owner.pid, "token": "t", "heartbeat": owner.heartbeat}
        file.write_text(json.dumps(raw))
        taken = claim(run, state.name, lambda: state)
        assert taken.owner is not None
        assert taken.owner.token != "t"


def test_of_many_that_want_it_one_gets_it(run: Path) -> None:
    state, got, refused = made(), [], []
    begin = threading.Barrier(8)

    def want() -> None:
        begin.wait()
        try:
            got.append(claim(run, state.name, lambda: state))
        except MirrorError as error:
            refused.append(error)

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)
    owner = load_state(state_file(run, state.name)).owner
    assert owner is not None
    assert owner.token == got[0].owner.token
    assert not list((run / "mirrors").glob("*.claim"))


def test_a_claim_whose_maker_died_does_not_bar_the_way_for_ever(run: Path) -> None:
    state = made()
    file = state_file(run, state.name).with_suffix(".claim")
    file.touch()
    os.utime(file, (1, 1))
    assert claim(run, state.name, lambda: state).owner is not None


def test_addresses_and_reasons_that_are_no_utf8(tmp_path: Path) -> None:
    folder = os.fsdecode(b"/data/caf\xe9")
    names = {mirror_name(Destination("tensorboard", one, explicit=True)) for one in (folder, "/data/caf", "/data/café")}
    assert len(names) == 3
    run = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        run.mkdir()
    except OSError:
        pytest.skip("this file system wants UTF-8")
    letters = DeadLetters()
    letters.add([Point(Series("loss", "scalar"), 3, 1_700_000_000_000_000, 0.5)], f"{folder} is full")
    letters.write(run, "lines-1", Cursor())
    assert read_dead_letters(run, "lines-1").select(["series", "step", "value", "reason"]).to_pylist() == [
        {"series": "loss", "step": 3, "value": 0.5, "reason": "/data/caf\\udce9 is full"}
    ]

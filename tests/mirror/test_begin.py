"""A mirror that does not get its turn: what is said of it, and how to deliver later."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from log_rows import new_run, scalar_rows, write_run
from mirror_helpers import JsonLines, install

from statsbridge import Selection
from statsbridge.log.resume import next_attempt
from statsbridge.log.writer import Writer
from statsbridge.mirror.mirrors import Mirrors, ask_policy
from statsbridge.mirror.state import load_states, state_file

Said = list[tuple[str, str]]


def mirrors(run: Path, adapter: Any, said: Said) -> Mirrors:
    def report(kind: str, message: str, *, cause: str, warn: bool) -> None:
        said.append((kind, message))

    allowed = ask_policy([adapter], restricted=False)
    return Mirrors(run, allowed, Selection(), report, interval=0.01, close_writer=lambda: None)


def spoken_of(run: Path, adapter: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is said where the disk is full when the mirror begins."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    said: Said = []
    with monkeypatch.context() as patched:
        patched.setattr("statsbridge.mirror.state.write_json", full)
        mirrors(run, adapter, said).start()
    ((kind, message),) = said
    assert kind == "mirror_stopped"
    return message


def test_the_command_that_delivers_later_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the record would go to the tracker's default, which may be anywhere."""
    monkeypatch.syspath_prepend(str(install(tmp_path / "installed")))
    run, store = new_run(tmp_path), tmp_path / "store"
    message = spoken_of(run, JsonLines(store), monkeypatch)
    assert message.endswith(f"Deliver the record later with: statsbridge sync {run} --to lines:{store}")


def test_of_an_adapter_that_does_not_take_its_address_the_target_is_left_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unknown(JsonLines):
        backend = "not-installed"

    message = spoken_of(new_run(tmp_path), Unknown(tmp_path / "store"), monkeypatch)
    assert message.endswith("--to not-installed:TARGET, with the target that you gave in backend=")


@pytest.mark.parametrize("timeout", [10.0, 0.0])
def test_a_mirror_that_another_process_keeps(timeout: float, tmp_path: Path) -> None:
    """Resumed, and the process that served the mirror before is not known to be dead until the end."""
    run, adapter, said = new_run(tmp_path), JsonLines(tmp_path / "store"), Said()
    write_run(run, *({"scalars": scalar_rows(step, loss=1.0)} for step in range(5)))
    before = mirrors(run, adapter, said)
    before.start()
    before.finish(30, "finished")
    (state,) = load_states(run)
    file = state_file(run, state.name)
    owner = {"host": "elsewhere", "pid": 1, "token": "t", "heartbeat": datetime.now(UTC).isoformat()}
    file.write_text(json.dumps({**json.loads(file.read_text()), "owner": owner}))
    with next_attempt(run, 5, config=None, information={}) as attempt:
        writer = Writer(run, attempt=attempt.number)
    writer.submit(lambda: {"scalars": scalar_rows(5, loss=1.0)})
    assert writer.close()
    assert said == []
    after = mirrors(run, adapter, said)
    after.start()
    after.finish(timeout, "finished")
    assert "served by process 1 on elsewhere" in said[0][1] or timeout == 0
    told = " ".join(message for _, message in said)
    assert "(None)" not in told
    assert "6 rows" not in told, "five of them were delivered"
    assert f"statsbridge sync {run}" in told

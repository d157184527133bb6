"""`statsbridge sync`: what was not delivered is delivered later, by whoever asks, once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from log_rows import new_run, scalar_rows, start_program, stats_rows, write_run
from mirror_helpers import JsonLines, Planned, install, lines, logged, start_python, stored_scalars
from typer.testing import CliRunner, Result

from statsbridge import MirrorError, Retry, Selection
from statsbridge.cli import app
from statsbridge.log import create_run
from statsbridge.mirror.mirrors import new_plan
from statsbridge.mirror.policy import load_policy
from statsbridge.mirror.state import load_states, state_file


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def run(tmp_path: Path, installed: Path) -> Path:
    """A local run of twelve steps."""
    run = new_run(tmp_path / "statsbridge-runs", name="weeks ago")
    write_run(run, *(work(step) for step in range(12)))
    return run


def work(step: int) -> dict[str, Any]:
    return {"stats": stats_rows(step, 3), "scalars": scalar_rows(step, loss=1.0 / (step + 1))}


def sync(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["sync", *map(str, arguments)])


def add_mirror(run: Path, adapter: JsonLines, **changes: Any) -> Path:
    """A mirror of the run that has not delivered anything; `changes` to its file."""
    state = new_plan(run, adapter, adapter.destination(), Selection(), load_policy()).state
    (run / "mirrors").mkdir(exist_ok=True)
    state.save(run)
    file = state_file(run, state.name)
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return file


def test_a_local_run_to_a_new_tracker(run: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = sync("weeks ago", "--to", f"lines:{store}")
    assert done.exit_code == 0, done.output
    assert stored_scalars(store) == logged(run)
    (state,) = load_states(run)
    assert (state.status, state.counts.points) == ("finished", len(lines(store)))
    header, row = done.stdout.splitlines()
    assert header.split("  ")[0] == "tracker"
    assert row.split() == ["lines", str(store), str(len(lines(store))), "0", "0", "finished"]
    assert done.stderr == ""
    # Again: nothing is left, and nothing is touched.
    before = store.stat().st_mtime_ns
    assert sync("weeks ago").stdout.splitlines()[1].split() == ["lines", str(store), "0", "0", "0", "finished"]
    assert sync("weeks ago", "--to", f"lines:{store}").exit_code == 0
    assert store.stat().st_mtime_ns == before


def test_dir_says_where_the_runs_are(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path / "site")
    assert sync("weeks ago", "--to", f"lines:{tmp_path / 'store'}").exit_code == 2
    assert sync("weeks ago", "--to", f"lines:{tmp_path / 'store'}", "--dir", run.parent).exit_code == 0


def test_the_selection_that_was_given_to_init_is_used(tmp_path: Path, installed: Path) -> None:
    selection = Selection(sites="update", smoothing=None, aggregates=False).to_json()
    run = create_run(tmp_path / "runs", name=None, config=None, information={"mirror": selection})
    write_run(run, *(work(step) for step in range(3)))
    assert sync(run, "--to", f"lines:{tmp_path / 'store'}").exit_code == 0
    assert {name for name, *_ in lines(tmp_path / "store")} == {"loss"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "has no mirror yet: say where to deliver it, with --to"),
        (("--to", "local"), "the record is local already"),
        (("--to", "nonsense"), "backend 'nonsense' is not known here. Installed: local,"),
        (("--to", "lacking:x"), "needs the package a_tracker_that_is_not_there"),
        (("--to", "lines"), "backend 'lines' cannot be had"),
    ],
)
def test_wrong_input_is_one_line(arguments: tuple[str, ...], said: str, run: Path) -> None:
    done = sync(run, *arguments)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert said in line


def test_a_restricted_run_stays_restricted(tmp_path: Path, installed: Path) -> None:
    run = create_run(tmp_path / "runs", name=None, config=None, information={"restricted": True})
    write_run(run, work(0))
    done = sync(run, "--to", f"lines:{tmp_path / 'store'}")
    assert (done.exit_code, (tmp_path / "store").exists()) == (2, False)
    assert "no policy file lists any destination" in done.stderr
    assert not (run / "mirrors").exists()
    (tmp_path / "statsbridge-policy.toml").write_text(
        f'destinations = [{{backend = "lines", path = "{tmp_path / "store"}"}}]\n'
    )
    assert sync(run, "--to", f"lines:{tmp_path / 'store'}").exit_code == 0
    # Taken up again, the policy is asked again.
    (tmp_path / "statsbridge-policy.toml").unlink()
    assert sync(run).exit_code == 2


def test_one_that_a_live_process_serves_is_refused(run: Path, tmp_path: Path) -> None:
    now = datetime.now(UTC).isoformat()
    alive = {"host": socket.gethostname(), "pid": os.getppid(), "token": "t", "heartbeat": now}
    served = JsonLines(tmp_path / "store")
    add_mirror(run, served, owner=alive, status="running")
    done = sync(run)
    assert done.exit_code == 2
    assert f"served by process {os.getppid()} on {socket.gethostname()}" in done.stderr
    assert not served.path.exists()
    # Another mirror of the run is delivered all the same, and what was refused remains.
    add_mirror(run, Planned(tmp_path / "other"))
    done = sync(run)
    assert done.exit_code == 1
    assert f"served by process {os.getppid()}" in done.stdout
    assert stored_scalars(tmp_path / "other") == logged(run)


def test_one_whose_process_is_gone_is_taken_over(run: Path, tmp_path: Path) -> None:
    program = start_program("import os; print(os.getpid())")
    pid = int(program.communicate()[0])
    gone = {"host": socket.gethostname(), "pid": pid, "token": "t", "heartbeat": datetime.now(UTC).isoformat()}
    add_mirror(run, JsonLines(tmp_path / "store"), owner=gone, status="running")
    assert sync(run).exit_code == 0
    assert stored_scalars(tmp_path / "store") == logged(run)


def test_a_tracker_that_stays_away_remains_for_another_time(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from statsbridge.mirror import sync as module

    monkeypatch.setattr(module, "PATIENCE", 0.1)
    add_mirror(run, JsonLines(tmp_path / "store"))
    monkeypatch.setattr(JsonLines, "send", lambda self, batch: (_ for _ in ()).throw(Retry("connection refused")))
    done = sync(run)
    assert done.exit_code == 1
    assert "cannot deliver now" in done.stderr
    assert "lines: connection refused" in done.stdout
    assert load_states(run)[0].status == "remaining"
    monkeypatch.setattr(JsonLines, "send", lambda self, batch: (_ for _ in ()).throw(MirrorError("wrong password")))
    done = sync(run)
    assert done.exit_code == 1
    assert "wrong password" in done.stdout
    assert load_states(run)[0].status == "stopped"


def test_a_run_that_is_still_being_written(tmp_path: Path, installed: Path) -> None:
    """What is whole is delivered; the rest remains, and comes with the next sync. Nothing comes twice."""
    run = new_run(tmp_path / "runs")
    program = start_program(
        """
writer = Writer(Path(sys.argv[1]))
for step in range(6):
    writer.submit(lambda step=step: {"scalars": scalar_rows(step, loss=float(step)), "stats": stats_rows(step, 2)})
assert writer.flush()
print("here", flush=True)
sys.stdin.readline()
writer.close()
""",
        run,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "here\n"
    store = tmp_path / "store"
    done = sync(run, "--to", f"lines:{store}")
    assert done.exit_code == 1
    assert "the run was still being written" in done.stdout
    assert {step for _, step, _, _ in lines(store)} == {0, 1, 2, 3, 4}
    program.communicate("end\n")
    assert sync(run).exit_code == 0
    assert stored_scalars(store) == logged(run)
    assert max(Counter(lines(store)).values()) == 1


@pytest.mark.slow
def test_two_processes_sync_at_once(run: Path, installed: Path, tmp_path: Path) -> None:
    """One of them delivers, the other is told who does."""
    store = tmp_path / "store"
    source = """
        import sys, time
        import mirror_helpers
        send = mirror_helpers.JsonLines.send
        def slowly(self, batch):
            send(self, batch)
            print("sent", flush=True)
            sys.stdin.readline()
        mirror_helpers.JsonLines.send = slowly
        from statsbridge.cli import app
        app()
    """
    first = start_python(source, installed, "sync", run, "--to", f"lines:{store}", stdin=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdin is not None
    assert first.stdout.readline() == "sent\n"
    second = start_python("from statsbridge.cli import app; app()", installed, "sync", run, "--to", f"lines:{store}")
    _, error = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f"served by process {first.pid} on" in error
    first.stdin.write("\n" * 100)
    first.stdin.close()
    first.stdout.read()
    assert first.wait(60) == 0
    assert stored_scalars(store) == logged(run)
    assert max(Counter(lines(store)).values()) == 1


@pytest.mark.parametrize(
    ("lacks", "histograms", "figures", "artifact"),
    [((), True, True, True), (("histograms",), False, True, True), (("figures", "artifacts"), True, False, False)],
)
def test_nothing_is_prepared_for_what_a_tracker_has_no_place_for(
    run: Path, tmp_path: Path, lacks: tuple[str, ...], histograms: bool, figures: bool, artifact: bool
):
    adapter = JsonLines(tmp_path / "lines")
    adapter.lacks = frozenset(lacks)
    chosen = new_plan(run, adapter, adapter.destination(), Selection(artifact=True), load_policy()).state.selection
    assert (chosen.histograms, chosen.figures, chosen.artifact) == (histograms, figures, artifact)


# ---- one mirror that cannot be served bars no other --------------------------------------------------------------


DAMAGES = {
    "cut short": '{"backend": "lines", "opt',
    "zeroed": "\0" * 300,
    "another program's": '["notes"]',
    "no address": '{"destination": {"backend": "lines", "address": null, "explicit": true}}',
    "no memory": '{"memory": 3}',
    "nested without end": "[" * 100_000,
    "numbers that are none": '{"cursor": {"stats": "many"}}',
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_mirror_is_named_and_the_others_are_delivered(run: Path, tmp_path: Path, damage: str) -> None:
    add_mirror(run, JsonLines(tmp_path / "store"))
    broken = add_mirror(run, JsonLines(tmp_path / "other"))
    text = DAMAGES[damage]
    if text.startswith("{") and text.endswith("}"):  # these change a part of what was there
        text = json.dumps(json.loads(broken.read_text()) | json.loads(text))
    broken.write_text(text)
    done = sync(run)
    assert done.exit_code == 1, done.output
    assert stored_scalars(tmp_path / "store") == logged(run)
    assert not (tmp_path / "other").exists()
    assert f"{broken} cannot be read" in done.stdout
    assert "statsbridge sync RUN --to BACKEND[:TARGET]" in done.stdout
    (row,) = (line.split() for line in done.stdout.splitlines() if line.split()[-1] == "damaged")
    assert row == ["lines", "0", "0", "unknown", "damaged"]
    # Its own tracker is not served by a new mirror as if there had been none; another one is.
    assert (sync(run, "--to", f"lines:{tmp_path / 'other'}").exit_code, broken.read_text()) == (2, text)
    assert sync(run, "--to", f"lines:{tmp_path / 'third'}").exit_code == 0
    # What the message says helps.
    broken.rename(tmp_path / "moved away")
    assert sync(run, "--to", f"lines:{tmp_path / 'other'}").exit_code == 0
    assert stored_scalars(tmp_path / "other") == logged(run)
    assert sync(run).exit_code == 0


def test_a_copy_of_a_mirrors_file_is_no_mirror(run: Path, tmp_path: Path) -> None:
    file = add_mirror(run, JsonLines(tmp_path / "store"))
    copy = file.with_name(f"{file.stem} (copy).json")
    copy.write_bytes(file.read_bytes())
    done = sync(run)
    assert done.exit_code == 1
    assert f"{copy} is a copy of the mirror {file.stem}: move it away" in done.stdout
    assert stored_scalars(tmp_path / "store") == logged(run)
    assert max(Counter(lines(tmp_path / "store")).values()) == 1


def test_where_every_mirror_is_damaged_nothing_is_done(run: Path, tmp_path: Path) -> None:
    add_mirror(run, JsonLines(tmp_path / "store")).write_text("{")
    done = sync(run)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "cannot be read" in line


def test_a_mirror_whose_tracker_is_not_installed_bars_no_other(run: Path, tmp_path: Path) -> None:
    add_mirror(run, JsonLines(tmp_path / "store"))
    gone = add_mirror(run, Planned(tmp_path / "other"), backend="nonsense")
    done = sync(run)
    assert done.exit_code == 1, done.output
    assert "backend 'nonsense' is not known here" in done.stdout
    assert stored_scalars(tmp_path / "store") == logged(run)
    assert json.loads(gone.read_text())["backend"] == "nonsense"


def test_a_mirror_that_the_policy_forbids_now_bars_no_other(run: Path, tmp_path: Path) -> None:
    add_mirror(run, JsonLines(tmp_path / "store"))
    add_mirror(run, JsonLines(tmp_path / "other"))
    (tmp_path / "statsbridge-policy.toml").write_text(
        f'applies_to = "all"\ndestinations = [{{backend = "lines", path = "{tmp_path / "store"}"}}]\n'
    )
    done = sync(run)
    assert done.exit_code == 1, done.output
    assert "is not allowed by policy" in done.stdout
    assert stored_scalars(tmp_path / "store") == logged(run)
    assert not (tmp_path / "other").exists()

"""How processes end: killed, terminated, exiting without a word, out of disk. Real processes throughout."""

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from log_rows import new_run, start_program

from statsbridge import RunData
from statsbridge.log import list_runs, load


def finish(program: "subprocess.Popen[str]", timeout: float = 60) -> tuple[int, str, str]:
    out, errors = program.communicate(timeout=timeout)
    return program.returncode, out, errors


def check_whole(data: RunData) -> int:
    """No row twice, none missing, no step cut; the number of rows."""
    stats = data.stats
    rows = stats.num_rows
    assert data.damaged == ()
    assert stats["seq"].to_pylist() == list(range(rows))
    assert stats["step"].to_pylist() == np.repeat(np.arange(rows // 40), 40).tolist()
    return rows


WRITE_FOR_EVER = """
writer = Writer(Path(sys.argv[1]), flush_interval=float(sys.argv[2]))
step = 0
while True:
    writer.submit(lambda step=step: {"stats": stats_rows(step, 40)}, urgent=step % 2 == 0)
    step += 1
    if step % 3 == 0:
        assert writer.flush()
        print(step * 40, flush=True)
"""


@pytest.mark.parametrize("acknowledged", [1, 6, 15, 30])
def test_kill_9_loses_no_acknowledged_row_and_doubles_none(tmp_path: Path, acknowledged: int) -> None:
    run = new_run(tmp_path)
    program = start_program(WRITE_FOR_EVER, run, 0.01)
    assert program.stdout is not None
    lines = [program.stdout.readline() for _ in range(acknowledged)]
    time.sleep(np.random.default_rng(acknowledged).uniform(0, 0.02))
    program.kill()
    rest, errors = program.communicate(timeout=60)
    assert program.returncode == -signal.SIGKILL, errors
    rows = int([*lines, *rest.splitlines()][-1])
    assert check_whole(load(run)) >= rows
    assert list_runs(tmp_path)[0].state == "crashed"


WRITE_ONCE = """
writer = Writer(Path(sys.argv[1]))
before = set(sys.modules)
event = {"step": 0, "time": 1.7e9, "kind": "note", "severity": "info", "message": "x"}
writer.submit(lambda: {"stats": stats_rows(0, 40), "scalars": scalar_rows(0, loss=1.0), "events": event})
assert writer.flush() and writer.close()
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def test_the_thread_imports_no_package_under_the_hands_of_the_training(tmp_path: Path) -> None:
    """Arrow imports pandas at its first array; Plotly, in the training's thread, then met half of pandas."""
    assert finish(start_program(WRITE_ONCE, new_run(tmp_path))) == (0, "[]\n", "")


SIGTERM = """
import signal, threading
run = Path(sys.argv[1])
{before}
writer = Writer(run, flush_interval=3600)
writer.submit(lambda: {{"stats": stats_rows(0, 40)}})
writer.flush()
writer.submit(lambda: {{"stats": stats_rows(1, 40)}})
{after}
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


def terminate(run: Path, before: str = "", after: str = "") -> tuple[int, str, str]:
    program = start_program("import time\n" + SIGTERM.format(before=before, after=after), run)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    program.terminate()
    return finish(program)


def test_sigterm_writes_what_waits_and_dies_of_the_signal(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert terminate(run)[0] == -signal.SIGTERM
    assert check_whole(load(run)) == 80
    assert list_runs(tmp_path)[0].state == "stopped"


def test_sigterm_waits_two_seconds_at_most(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    stuck = "writer.submit(lambda: time.sleep(3600), urgent=True)"
    assert terminate(run, after=stuck)[0] == -signal.SIGTERM


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_users_sigterm_handler_alone_decides(tmp_path: Path, when: str) -> None:
    run = new_run(tmp_path)
    mine = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(41))"
    assert terminate(run, **{when: mine})[0] == 41
    assert check_whole(load(run)) == 80  # by atexit


def test_a_users_handler_that_calls_the_earlier_one_dies_of_the_signal(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    mine = "earlier = signal.signal(signal.SIGTERM, lambda *about: (print('mine', flush=True), earlier(*about)))"
    code, out, _ = terminate(run, after=mine)
    assert (code, out) == (-signal.SIGTERM, "mine\n")
    assert check_whole(load(run)) == 80


def test_a_writer_of_another_thread_leaves_sigterm_alone(tmp_path: Path) -> None:
    program = start_program(
        """
import signal, threading
writers = []
thread = threading.Thread(target=lambda: writers.append(Writer(Path(sys.argv[1]))))
thread.start(); thread.join()
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert writers[0].close()
""",
        new_run(tmp_path),
    )
    assert finish(program)[0] == 0


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("raise ValueError('the user')", 1),
        ("import atexit; atexit.register(lambda: writer.submit(lambda: {'stats': stats_rows(2, 40)}))", 0),
        ("import threading, time; threading.Thread(target=time.sleep, args=(0.3,)).start()", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
    ids=["end", "exit", "exception", "late", "thread", "interrupt"],
)
def test_a_process_that_ends_without_finish_has_written_all(tmp_path: Path, end: str, code: int) -> None:
    run = new_run(tmp_path)
    program = start_program(
        f"""
writer = Writer(Path(sys.argv[1]), flush_interval=3600)
writer.submit(lambda: {{"stats": stats_rows(0, 40)}})
writer.flush()
writer.submit(lambda: {{"stats": stats_rows(1, 40)}})
{end}
""",
        run,
    )
    returned, _, errors = finish(program)
    assert returned == code, errors
    assert check_whole(load(run)) == (120 if "atexit" in end else 80)
    assert list_runs(tmp_path)[0].state == "stopped"


def test_a_full_disk_never_reaches_training_and_is_on_record_afterwards(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    program = start_program(
        """
import resource
from statsbridge.log import backlog
from statsbridge.log.schema import to_table
said = []
writer = Writer(Path(sys.argv[1]), flush_interval=0.01, on_warning=said.append)
backlog.BACKLOG_BYTES = 30 * to_table("stats", stats_rows(0, 40)).nbytes
def write(steps):
    for step in steps:
        assert writer.submit(lambda step=step: {"stats": stats_rows(step, 40)}, rows=40)
        yield writer.flush()
assert all(write(range(5)))
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
assert not any(write(range(5, 55)))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert all(write(range(55, 60)))
assert writer.close()
assert sum(writer.dropped.values()) == 800, writer.dropped
assert len(said) == 2 and "File too large" in said[0] and "800 rows" in said[1], said
""",
        run,
    )
    code, _, errors = finish(program)
    assert code == 0, errors
    assert "Traceback" not in errors
    data = load(run)
    assert data.stats["seq"].to_pylist() == list(range(40 * 40))
    assert data.stats["step"].to_pylist() == np.repeat([*range(35), *range(55, 60)], 40).tolist()
    assert [(event["kind"], event["value"]) for event in data.events.to_pylist()] == [("rows_dropped", 800.0)]
    assert data.damaged == ()
    assert not list(run.glob("**/*.tmp")), "what could not be written leaves no rubbish"


def test_loading_needs_no_torch_and_importing_no_pyarrow(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    program = start_program(
        "write_run(Path(sys.argv[1]), {'stats': stats_rows(0), 'scalars': scalar_rows(0, a=1)})", run
    )
    assert finish(program)[0] == 0
    source = f"""
import sys, statsbridge
assert not {{"torch", "pyarrow", "duckdb"}} & set(sys.modules)
data = statsbridge.load({str(run)!r})
data.stats, data.scalars, data.series("m0", "activation", "std"), data.merged(), repr(data)
assert data.query("select count(*) as n from stats")["n"].to_pylist() == [5]
assert "torch" not in sys.modules
"""
    done = subprocess.run([os.sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

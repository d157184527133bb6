import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from log_rows import new_run, scalar_rows, start_program, stats_rows, write_run
from typer.testing import CliRunner

from statsbridge.analyze.diagnosis import diagnose
from statsbridge.analyze.run_data import load
from statsbridge.cli import app
from statsbridge.cli.following import KEPT_VALUES, Follower, Situation
from statsbridge.cli.watch import screen
from statsbridge.log import Writer
from statsbridge.log.parts import list_parts, part_name
from statsbridge.log.resume import next_attempt
from statsbridge.log.schema import VERSION_KEY
from statsbridge.mirror import Destination, Selection
from statsbridge.mirror.state import MirrorState

from .test_output import in_terminal

BROKEN = "<img src=x>[red]\x1b[31m"


def step_rows(step: int, *, broken: bool = False, **values: float) -> dict[str, Any]:
    nans = [0, 5 if broken else 0, 0]
    stats = stats_rows(step, 3, module=["stem", BROKEN, "head"], nan_count=nans)
    return {"stats": stats, "scalars": scalar_rows(step, loss=1.0 / (step + 1), **values)}


def written(folder: Path, *works: dict[str, Any], name: str | None = None) -> Path:
    run = new_run(folder, name)
    write_run(run, *works)
    return run


def alert(step: int, message: str, kind: str = "rows_dropped") -> dict[str, Any]:
    return {"events": {"step": step, "time": 1.7e9, "kind": kind, "severity": "warning", "message": message}}


@contextmanager
def watching(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """The command in a process of its own; ended with the context."""
    with subprocess.Popen(
        [sys.executable, "-c", "from statsbridge.cli import app; app()", "watch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_each_look_takes_what_is_new_and_the_end_is_what_the_record_says(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    follower = Follower(run)
    assert follower.look().state == "created"
    writer = Writer(run)
    seen: list[Situation] = []
    for step in range(8):
        assert writer.submit(lambda step=step: step_rows(step, broken=step >= 4, grad_norm=2.0 * step))  # type: ignore[misc]
        assert writer.flush()
        seen.append(follower.look())
    assert writer.close()
    last = follower.look()
    # The last step is whole once the next one has begun, or the run has ended.
    assert [one.step for one in seen] == [None, 0, 1, 2, 3, 4, 5, 6]
    assert [len(one.findings) > 0 for one in seen] == [step > 4 for step in range(8)]
    assert not any(one.ended for one in seen)
    data = load(run)
    assert (last.state, last.ended, last.step, last.sampled) == ("finished", True, 7, 8)
    for name in ("loss", "grad_norm"):
        rows = data.scalars.filter(pc.equal(data.scalars["name"].cast("string"), name))
        assert last.curves[name] == rows["value"].to_pylist()
    assert last.rate == pytest.approx(1.0)  # the rows' own times are a second apart
    assert [finding.to_json() for finding in last.findings] == [finding.to_json() for finding in diagnose(data)]
    assert last.findings[0].module == BROKEN
    assert last.bytes == sum(file.stat().st_size for file in run.rglob("*.parquet"))


def test_what_is_remembered_does_not_grow_with_the_training(tmp_path: Path) -> None:
    steps = KEPT_VALUES + 100
    columns = {"step": range(steps), "iteration": range(steps), "time": [1.7e9 + step for step in range(steps)]}
    many = [{"scalars": {**columns, "name": f"own/{number}", "value": range(steps)}} for number in range(20)]
    run = written(tmp_path, *many, {"scalars": {**columns, "name": "loss", "value": range(steps)}})
    last = Follower(run).look()
    assert len(last.curves) == 13
    assert next(iter(last.curves)) == "loss"
    assert last.curves["loss"] == list(map(float, range(100, steps)))


def test_what_cannot_be_read_is_said_and_ends_the_watching_of_a_run_that_has_ended(tmp_path: Path) -> None:
    """In a pipe as in a terminal; without end it would be read anew in silence."""
    run = written(tmp_path, *(step_rows(step) for step in range(3)))
    folder = run / "events" / "rank=0"
    folder.parent.mkdir(exist_ok=True)
    folder.symlink_to(folder)  # a name that leads nowhere, as on a disk that is away
    result = CliRunner().invoke(app, ["watch", str(run), "--interval", "0.1"])
    assert "Too many levels of symbolic links" in result.stdout
    assert result.stdout.splitlines()[-1] == "the run has ended: finished"
    assert result.exit_code == 0


def test_a_damaged_mirror_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    run = written(tmp_path, *(step_rows(step) for step in range(3)))
    destination = Destination("mlflow", "http://localhost:5000", explicit=True)
    (run / "mirrors").mkdir()
    MirrorState(backend="mlflow", options={}, destination=destination, selection=Selection()).save(run)
    (run / "mirrors" / "wandb-1.json").write_text("{")
    seen = Follower(run).look()
    assert [one.backend for one in seen.mirrors] == ["mlflow"]
    assert f"{run / 'mirrors' / 'wandb-1.json'} cannot be read" in seen.trouble


def test_a_part_of_the_future_is_one_line(tmp_path: Path) -> None:
    run = written(tmp_path, *(step_rows(step) for step in range(3)))
    old = list_parts(run, "stats")[0]
    table = pq.read_table(old.path)
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({VERSION_KEY: b"99"}), sink)
    data = sink.getvalue().to_pybytes()
    old.path.unlink()
    (old.path.parent / part_name(old.first, old.last, zlib.crc32(data))).write_bytes(data)
    result = CliRunner().invoke(app, ["watch", str(run), "--interval", "0.1"])
    assert result.exit_code == 2
    assert "schema version 99" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def resumed(run: Path, step: int) -> Writer:
    """A writer of the next attempt, which counts from `step` on."""
    with next_attempt(run, step, config=None, information={}) as attempt:
        return Writer(run, attempt=attempt.number)


def test_what_is_logged_about_an_earlier_step_takes_nothing_back(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, *(step_rows(step) for step in range(6)))
    follower = Follower(run)
    follower.look()
    writer = resumed(run, 3)
    about_before = {"step": 0, "time": 1.7e9, "name": "val/loss", "value": 2.0}
    assert writer.submit(lambda: {"scalars": scalar_rows(3, loss=13.0)})
    assert writer.submit(lambda: {"scalars": about_before})
    assert writer.close()
    assert follower.look().curves["loss"] == [1.0, 1 / 2, 1 / 3, 13.0]


def test_an_attempt_that_has_taken_no_step_yet_takes_back_only_what_it_supersedes(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, *(step_rows(step) for step in range(6)))
    follower = Follower(run)
    follower.look()
    writer = resumed(run, 3)
    assert writer.submit(lambda: {"scalars": {"step": 5, "time": 1.7e9, "name": "val/loss", "value": 2.0}})
    assert writer.close()
    curves = follower.look().curves
    assert (curves["loss"], curves["val/loss"]) == ([1.0, 1 / 2, 1 / 3], [2.0])


def test_of_an_attempt_that_nothing_is_known_of_nothing_is_taken_back(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, *(step_rows(step) for step in range(3)))
    follower = Follower(run)
    follower.look()
    writer = resumed(run, 3)
    (run / "attempts" / "1.json").write_text("{")
    assert writer.submit(lambda: {"scalars": scalar_rows(3, loss=13.0)})
    assert writer.close()
    situation = follower.look()
    assert situation.curves["loss"] == [1.0, 1 / 2, 1 / 3, 13.0]
    assert "1.json cannot be read" in situation.trouble


def test_a_resumed_run_goes_back(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, *(step_rows(step) for step in range(6)))
    follower = Follower(run)
    assert follower.look().sampled == 6
    writer = resumed(run, 3)
    for step in (3, 4):
        assert writer.submit(lambda step=step: {"scalars": scalar_rows(step, loss=10.0 + step)})  # type: ignore[misc]
    assert writer.close()
    last = follower.look()
    assert last.curves["loss"] == [1.0, 1 / 2, 1 / 3, 13.0, 14.0]
    assert (last.step, last.sampled) == (4, 3)


def test_alerts_of_other_ranks_are_heard(tmp_path: Path) -> None:
    run = written(tmp_path, step_rows(0))
    write_run(run, alert(3, "the disk is full"), alert(4, "loss is nan", kind="nonfinite_loss"), rank=2)
    shown = screen(Follower(run).look()).plain
    assert "! rows_dropped at step 3 (rank 2): the disk is full" in shown
    assert "! nonfinite_loss at step 4 (rank 2): loss is nan" in shown


def test_an_alert_that_is_a_finding_is_not_told_twice(tmp_path: Path) -> None:
    run = written(tmp_path, step_rows(0), alert(0, "told live", kind="nonfinite_loss"), alert(0, "of our own"))
    assert [one["message"] for one in Follower(run).look().alerts] == ["of our own"]


def test_a_finished_run_is_told_in_lines_where_nobody_looks(tmp_path: Path) -> None:
    run = written(tmp_path, *(step_rows(step, broken=step > 2) for step in range(5)), name="mine")
    result = CliRunner().invoke(app, ["watch", str(run)])
    assert result.exit_code == 0, result.output
    first, *findings, numbers, last = result.stdout.splitlines()
    assert first == f"run {run.name}  name mine  finished"
    assert findings[0].startswith(r"!! nonfinite activation at step 3 in <img src=x>[red]\x1b[31m: ")
    assert numbers == "step 4  loss 0.2  5 sampled  1 steps/s"
    assert last == "the run has ended: finished"


def test_a_terminal_shows_findings_first_and_curves(tmp_path: Path) -> None:
    run = written(tmp_path, *(step_rows(step, broken=step > 2) for step in range(5)))
    shown = in_terminal(100, "watch", str(run))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert r"[red]\x1b[31m" in plain.replace("\r\n", "")
    lines = [line.strip() for line in plain.splitlines()]
    finding = next(number for number, line in enumerate(lines) if line.startswith("!! nonfinite activation at step 3"))
    curve = next(number for number, line in enumerate(lines) if line.startswith("loss"))
    assert finding < curve
    assert lines[curve].split() == ["loss", "0.2", "█▃▂▁▁"]


def test_a_writer_that_was_killed_is_said_to_be_gone(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    source = (
        "writer = Writer(Path(sys.argv[1]))\n"
        "writer.submit(lambda: {'scalars': scalar_rows(0, loss=1.0)})\n"
        "writer.flush(); print('written', flush=True); sys.stdin.read()"
    )
    with start_program(source, run) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "written\n"
        assert Follower(run).look().state == "running"
        program.kill()
    result = CliRunner().invoke(app, ["watch", str(run)])
    assert result.exit_code == 1
    assert f"the writer is gone: process {program.pid} on " in result.stdout
    assert "step 0  loss 1" in result.stdout


def test_the_latest_run_is_waited_for_where_there_is_none_yet(tmp_path: Path) -> None:
    with watching("--dir", str(tmp_path), "--interval", "0.1") as process:
        assert process.stderr is not None
        assert "waiting for one" in process.stderr.readline()
        run = written(tmp_path, step_rows(0))
        assert process.wait(timeout=60) == 0
        assert process.stdout is not None
        assert run.name in process.stdout.read()


@pytest.mark.skipif(os.name == "nt", reason="needs SIGINT of another process")
def test_an_interrupt_ends_the_watching_quietly(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    writer = Writer(run)
    assert writer.submit(lambda: step_rows(0))
    assert writer.flush()
    with watching(str(run), "--interval", "0.1") as process:
        assert process.stdout is not None
        assert run.name in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert writer.close()


def test_a_slip_is_one_line_and_waits_for_nothing(tmp_path: Path) -> None:
    written(tmp_path, step_rows(0))
    result = CliRunner().invoke(app, ["watch", "nothing", "--dir", str(tmp_path)])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "no run 'nothing' in" in result.stderr

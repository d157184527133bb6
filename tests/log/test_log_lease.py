"""Who may change a run besides its writer: one process, whoever else comes at the same moment."""

import os
import threading
import time
from pathlib import Path

import pytest
from log_rows import new_run, write_run

from statsbridge.errors import LogError
from statsbridge.log.check import check_run, repair_run
from statsbridge.log.lease import maintenance, refuse_maintenance
from statsbridge.log.parts import list_parts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = new_run(tmp_path)
    write_run(run, {"scalars": {"step": 0, "name": ["loss"], "value": [1.0]}})
    return run


def test_a_hold_that_is_being_written_is_a_hold(run: Path):
    file = run / "writers" / "maintenance.json"
    file.touch()  # between its making and its first byte
    with pytest.raises(LogError, match="another process"):
        refuse_maintenance(run)
    with pytest.raises(LogError, match="another process"), maintenance(run):
        pass
    assert file.exists()
    hour_ago = time.time() - 3600
    os.utime(file, (hour_ago, hour_ago))  # whoever made it has died of it
    with maintenance(run) as holds:
        assert holds()


def test_a_hold_that_was_taken_over_is_not_deleted_at_the_end(run: Path):
    file = run / "writers" / "maintenance.json"
    with maintenance(run) as holds:
        file.write_text('{"token": "theirs"}')
        assert not holds()
    assert file.read_text() == '{"token": "theirs"}'


def test_of_many_that_come_at_once_one_holds(run: Path):
    file = run / "writers" / "maintenance.json"
    barrier, holding, problems = threading.Barrier(6), list[int](), list[int]()

    def come() -> None:
        barrier.wait()
        try:
            with maintenance(run) as holds:
                if holds():
                    holding.append(1)
                    if sum(holding) > 1:
                        problems.append(sum(holding))
                    time.sleep(0.02)
                    holding.pop()
        except LogError:
            pass

    for _ in range(20):
        file.write_text(f'{{"host": "elsewhere", "pid": 1, "heartbeat": "2020-01-01T00:00:00+00:00", "token": "{_}"}}')
        threads = [threading.Thread(target=come) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not problems
    assert not list((run / "writers").glob(".*.tmp"))


def test_a_part_that_the_system_refuses_to_read_is_left_where_it_is(run: Path):
    [part] = list_parts(run, "scalars")
    whole = part.path.read_bytes()
    part.path.unlink()
    part.path.mkdir()  # reading it is an error of the system, also for root
    findings = check_run(run)
    assert [(finding.kind, finding.serious) for finding in findings] == [("unreadable", True), ("missing", True)]
    repair_run(run, findings)
    assert part.path.is_dir()
    part.path.rmdir()
    part.path.write_bytes(whole)
    assert check_run(run) == []

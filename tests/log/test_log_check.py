"""Is a run whole? Every kind of damage is named with its rows, set aside when asked, and nothing is ever lost by it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import zlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from log_rows import new_run, scalar_rows, stats_rows, write_run

from statsbridge.errors import LogError, StatsBridgeWarning
from statsbridge.log import load
from statsbridge.log.check import check_run, repair_run
from statsbridge.log.compaction import compact_table
from statsbridge.log.lease import maintenance, refuse_maintenance
from statsbridge.log.parts import list_parts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = new_run(tmp_path)
    write_run(run, *({"scalars": scalar_rows(step, loss=step), "stats": stats_rows(step)} for step in range(4)))
    return run


def kinds(run: Path) -> list[tuple[str, int | None, int | None]]:
    return [(finding.kind, finding.first, finding.last) for finding in check_run(run)]


def test_a_whole_run_has_no_findings(run: Path):
    assert check_run(run) == []
    compact_table(run, "stats", 0, fan_in=2)
    assert check_run(run) == []


def test_a_part_cut_short_at_any_byte_or_zeroed_or_flipped_is_damaged(run: Path):
    part = list_parts(run, "scalars")[1]
    whole = part.path.read_bytes()
    cases = [whole[:length] for length in range(0, len(whole), 97)]
    cases += [whole[:length] + bytes(len(whole) - length) for length in range(0, len(whole) - 8, 397)]
    cases += [whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :] for place in range(0, len(whole), 311)]
    for case in cases:
        part.path.write_bytes(case)
        found = check_run(run)
        assert [(f.kind, f.file, f.first, f.last) for f in found if f.kind == "damaged"] == [
            ("damaged", part.name, part.first, part.last)
        ]
        assert [f.kind for f in found] == ["damaged", "missing"]


def test_a_missing_part_is_named_by_its_rows(run: Path):
    list_parts(run, "stats")[2].path.unlink()
    assert kinds(run) == [("missing", 10, 14)]


def test_a_part_that_holds_other_rows_than_its_name_says(run: Path):
    first, second, *_ = list_parts(run, "stats")
    second.path.write_bytes(first.path.read_bytes())
    second.path.rename(
        second.path.with_name(f"000000000005-000000000009.{zlib.crc32(second.path.read_bytes()):08x}.parquet")
    )
    assert kinds(run) == [("damaged", 5, 9), ("missing", 5, 9)]


def test_foreign_and_unfinished_files_and_parts_of_the_future(run: Path):
    folder = run / "stats" / "rank=0"
    (folder / "export.parquet").write_bytes(b"PAR1")
    (folder / ".abc.tmp").write_bytes(b"PAR1")
    part = list_parts(run, "scalars")[3]
    table = pq.ParquetFile(part.path).read()
    pq.write_table(table.replace_schema_metadata({"statsbridge.schema_version": "99"}), part.path)
    part.path.rename(part.path.with_name(f"000000000003-000000000003.{zlib.crc32(part.path.read_bytes()):08x}.parquet"))
    assert sorted(kind for kind, *_ in kinds(run)) == ["foreign", "missing", "newer", "unfinished"]


def test_run_json_that_cannot_be_read(run: Path):
    (run / "run.json").write_text("{")
    [finding] = check_run(run)
    assert (finding.kind, finding.file) == ("unreadable", "run.json")


def test_repair_sets_aside_and_deletes_no_row(run: Path):
    part = list_parts(run, "stats")[1]
    damaged = part.path.read_bytes()[:-3]
    part.path.write_bytes(damaged)
    saved = run.parent / "saved"
    shutil.copytree(run / "scalars", saved)
    compact_table(run, "scalars", 0, fan_in=2)
    shutil.copytree(saved, run / "scalars", dirs_exist_ok=True)
    (run / "stats" / "rank=0" / ".abc.tmp").write_bytes(b"")

    repair_run(run, check_run(run))

    assert (run / "damaged" / part.name).read_bytes() == damaged
    assert not part.path.exists()
    assert len(list_parts(run, "scalars")) == 1
    assert kinds(run) == [("set_aside", 5, 9)]
    with pytest.warns(StatsBridgeWarning, match="rows 5 to 9"):
        assert load(run).stats["seq"].to_pylist() == [*range(5), *range(10, 20)]


def hold(run: Path, **changes: object) -> Path:
    file = run / "writers" / "maintenance.json"
    now = datetime.now(UTC).isoformat()
    host, pid = socket.gethostname(), os.getpid()
    file.write_text(json.dumps({"host": host, "pid": pid, "heartbeat": now, "token": "other", **changes}))
    return file


def test_one_process_at_a_time(run: Path):
    with maintenance(run) as holds:
        assert holds()
        with pytest.raises(LogError, match=f"process {os.getpid()}"), maintenance(run):
            pass
    refuse_maintenance(run)
    assert not (run / "writers" / "maintenance.json").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 2**22 + 12345},
        {"host": "elsewhere", "heartbeat": (datetime.now(UTC) - timedelta(hours=1)).isoformat()},
        {"pid": "x"},
    ],
)
def test_a_stale_hold_is_taken_over(run: Path, changes: dict[str, object]):
    file = hold(run, **changes)
    with maintenance(run):
        assert json.loads(file.read_text())["pid"] == os.getpid()


def test_a_hold_that_was_lost_is_noticed(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("statsbridge.log.lease.HEARTBEAT", 0.0)
    with maintenance(run) as holds:
        assert holds()
        hold(run)
        assert not holds()


def test_a_run_that_is_being_written_is_refused(tmp_path: Path):
    program = (
        "import sys, time; from pathlib import Path; from statsbridge.log import Writer, create_run\n"
        "run = create_run(Path(sys.argv[1]), name=None, config=None, information={})\n"
        "writer = Writer(run); print(run, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        run = Path(process.stdout.readline().strip())
        with pytest.raises(LogError, match=f"process {process.pid} on "), maintenance(run):
            pass
    finally:
        process.kill()
        process.wait()
    with maintenance(run):
        pass

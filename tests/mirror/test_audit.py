"""What left is written down before it leaves: each record once, through crashes and two writers at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from statsbridge.errors import LogError, Retry, StatsBridgeWarning
from statsbridge.mirror.audit import SCHEMA, Audit, read_audit
from statsbridge.mirror.contract import Destination

LAB = Destination("mlflow", "https://mlflow.lab.example", explicit=True)
PROGRAM = """
import sys
from pathlib import Path
from statsbridge.mirror.audit import Audit
from statsbridge.mirror.contract import Destination
audit = Audit(Path(sys.argv[1]), "mlflow-1", Destination("mlflow", "https://mlflow.lab.example", explicit=True))
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    audit.record("metrics", rows=number, fields=["loss"], first_step=number, last_step=number)
    print(number, flush=True)
"""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten files become one instead of a hundred: each costs a real sync of the disk."""
    monkeypatch.setattr("statsbridge.mirror.audit._MERGED", 10)
    monkeypatch.setattr("statsbridge.mirror.audit._SIZES", (10, 100, 1000))


def record(audit: Audit, *numbers: int) -> None:
    for number in numbers:
        audit.record("metrics", rows=number, fields=["loss", "lr/0"], first_step=number, last_step=number + 1)


def rows(run: Path) -> list[int]:
    """The `rows` of each record; each test gives every record its own."""
    return read_audit(run)["rows"].to_pylist()


def files(run: Path) -> list[str]:
    return sorted(file.name for file in (run / "mirrors" / "audit").iterdir())


def start(run: Path, first: int, end: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(run), str(first), str(end)], stdout=subprocess.PIPE, text=True
    )


def test_a_record(tmp_path: Path) -> None:
    assert read_audit(tmp_path).schema.equals(SCHEMA)
    assert read_audit(tmp_path).num_rows == 0
    assert list(tmp_path.iterdir()) == []  # reading writes nothing
    before = datetime.now(UTC)
    audit = Audit(tmp_path, "mlflow-1", LAB, policy="abc")
    audit.record("alerts", rows=3, fields=["vanishing"], first_step=None, last_step=7)
    (row,) = read_audit(tmp_path).to_pylist()
    assert timedelta() <= row.pop("time") - before + timedelta(microseconds=1) < timedelta(minutes=5)
    assert row == {
        "backend": "mlflow",
        "destination": "https://mlflow.lab.example",
        "channel": "alerts",
        "rows": 3,
        "fields": ["vanishing"],
        "first_step": None,
        "last_step": 7,
        "policy": "abc",
    }
    assert files(tmp_path) == ["mlflow-1-000000000000-000000000000.parquet"]


def test_other_tools_read_it(tmp_path: Path) -> None:
    record(Audit(tmp_path, "mlflow-1", LAB), *range(3))
    found = duckdb.sql(f"select sum(rows), max(last_step) from '{tmp_path}/mirrors/audit/*.parquet'").fetchall()
    assert found == [(3, 3)]


def test_files_that_go_elsewhere_and_no_secrets(tmp_path: Path) -> None:
    destination = Destination("mlflow", "https://me:pass@host/x?token=y", True, artifacts="s3://key:pass@bucket")
    audit = Audit(tmp_path, "mlflow-1", destination)
    for channel in ("metrics", "figures", "artifacts"):
        audit.record(channel, rows=1, fields=[], first_step=0, last_step=0)
    assert read_audit(tmp_path)["destination"].to_pylist() == [
        "https://***@host/x?***",
        "s3://***@bucket",
        "s3://***@bucket",
    ]


def test_an_unknown_channel_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'metric' is no channel"):
        Audit(tmp_path, "mlflow-1", LAB).record("metric", rows=1, fields=[], first_step=0, last_step=0)


def test_a_hundred_records_become_one_file(tmp_path: Path) -> None:
    record(Audit(tmp_path, "mlflow-1", LAB), *range(101))
    assert files(tmp_path) == [
        "mlflow-1-000000000000-000000000099.parquet",
        "mlflow-1-000000000100-000000000100.parquet",
    ]
    assert rows(tmp_path) == list(range(101))


@pytest.mark.usefixtures("small_blocks")
def test_mirrors_do_not_mix(tmp_path: Path) -> None:
    one, other = Audit(tmp_path, "mlflow-1", LAB), Audit(tmp_path, "mlflow-1-2", LAB)
    record(one, *range(35))
    record(other, *range(100, 111))
    assert rows(tmp_path) == [*range(35), *range(100, 111)]
    assert len(files(tmp_path)) == (3 + 5) + (1 + 1)
    record(Audit(tmp_path, "mlflow-1", LAB), *range(35, 40))
    assert len(files(tmp_path)) == 4 + 2
    assert sorted(rows(tmp_path)) == [*range(40), *range(100, 111)]


@pytest.mark.usefixtures("small_blocks")
def test_blocks_of_blocks(tmp_path: Path) -> None:
    record(Audit(tmp_path, "mlflow-1", LAB), *range(123))
    assert rows(tmp_path) == list(range(123))
    assert [name.removeprefix("mlflow-1-") for name in files(tmp_path)] == [
        "000000000000-000000000099.parquet",
        "000000000100-000000000109.parquet",
        "000000000110-000000000119.parquet",
        *(f"{number:012d}-{number:012d}.parquet" for number in (120, 121, 122)),
    ]


@pytest.mark.usefixtures("small_blocks")
def test_a_crash_between_merging_and_deleting_doubles_nothing(tmp_path: Path) -> None:
    audit = Audit(tmp_path, "mlflow-1", LAB)
    record(audit, *range(9))
    folder = tmp_path / "mirrors" / "audit"
    shutil.copytree(folder, tmp_path / "before")
    record(audit, 9)
    assert len(files(tmp_path)) == 1
    for number, file in enumerate(sorted((tmp_path / "before").iterdir())):
        if number % 3:
            shutil.copy(file, folder)
    assert rows(tmp_path) == list(range(10))
    record(Audit(tmp_path, "mlflow-1", LAB), *range(10, 20))
    assert len(files(tmp_path)) == 2
    assert rows(tmp_path) == list(range(20))


@pytest.mark.usefixtures("small_blocks")
def test_a_crash_before_merging_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Audit, "_tidy", lambda self, end: None)
        record(Audit(tmp_path, "mlflow-1", LAB), *range(10))
    record(Audit(tmp_path, "mlflow-1", LAB), *range(10, 20))
    assert rows(tmp_path) == list(range(20))
    assert len(files(tmp_path)) == 2


@pytest.mark.usefixtures("small_blocks")
def test_a_damaged_file_is_named_and_the_rest_read(tmp_path: Path) -> None:
    record(Audit(tmp_path, "mlflow-1", LAB), *range(9))
    damaged = tmp_path / "mirrors" / "audit" / "mlflow-1-000000000005-000000000005.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-7])
    record(Audit(tmp_path, "mlflow-1", LAB), *range(9, 20))
    with pytest.warns(StatsBridgeWarning, match=damaged.name):
        assert rows(tmp_path) == [number for number in range(20) if number != 5]
    # Its block waits for it, the next one does not.
    assert len(files(tmp_path)) == 10 + 1


def test_where_it_cannot_be_written_nothing_may_be_sent(tmp_path: Path) -> None:
    (tmp_path / "mirrors").mkdir()
    (tmp_path / "mirrors" / "audit").write_text("in the way")
    audit = Audit(tmp_path, "mlflow-1", LAB)
    with pytest.raises(Retry, match="cannot be written"):
        record(audit, 1)
    (tmp_path / "mirrors" / "audit").unlink()
    record(audit, 1)
    assert rows(tmp_path) == [1]


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
def test_a_full_disk_is_told_and_leaves_no_half_file(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + PROGRAM, str(tmp_path), "0", "1"], capture_output=True, text=True, check=False
    )
    assert "statsbridge.errors.Retry: the audit in" in done.stderr
    assert done.stdout == ""
    assert files(tmp_path) == []


def test_no_such_run(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no run folder"):
        read_audit(tmp_path / "nowhere")


def test_killed_in_the_middle_nothing_that_was_told_is_missing(tmp_path: Path) -> None:
    process = start(tmp_path, 0, 100_000)
    assert process.stdout is not None
    told = [int(process.stdout.readline()) for _ in range(30)]
    process.kill()
    told += [int(line) for line in process.stdout.read().split()]
    process.wait()
    found = rows(tmp_path)
    # The last record may have been written before it could be told.
    assert found[: len(told)] == told
    assert len(found) <= len(told) + 1
    record(Audit(tmp_path, "mlflow-1", LAB), *range(len(found), 130))
    assert rows(tmp_path) == list(range(max(len(found), 130)))


def test_two_writers_at_a_time_lose_and_double_nothing(tmp_path: Path) -> None:
    processes = [start(tmp_path, first, first + 60) for first in (0, 1000)]
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert sorted(rows(tmp_path)) == [*range(60), *range(1000, 1060)]
    assert len(files(tmp_path)) == 1 + 20


@pytest.mark.usefixtures("small_blocks")
def test_a_number_merged_away_meanwhile_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer took its number, then slept through another's hundred records and their merging."""
    slow, fast = Audit(tmp_path, "mlflow-1", LAB), Audit(tmp_path, "mlflow-1", LAB)
    record(slow, *range(5))
    following = Audit._next

    def overtaken(audit: Audit) -> int:
        number = following(audit)
        monkeypatch.setattr(Audit, "_next", following)
        record(fast, *range(5, 15))
        return number

    monkeypatch.setattr(Audit, "_next", overtaken)
    record(slow, 1000)
    assert sorted(rows(tmp_path)) == [*range(15), 1000]


def test_it_says_when(tmp_path: Path) -> None:
    record(Audit(tmp_path, "mlflow-1", LAB), 1)
    time.sleep(0.002)
    record(Audit(tmp_path, "aim-1", LAB), 2)
    table = read_audit(tmp_path)
    assert table.schema.field("time").type == pa.timestamp("us", "UTC")
    assert table["rows"].to_pylist() == [1, 2]


def test_a_folder_and_an_address_that_are_no_utf8(tmp_path: Path, small_blocks: None) -> None:
    """The system takes any bytes for a name; Arrow takes paths, and texts, for UTF-8."""
    run = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        run.mkdir()
    except OSError:
        pytest.skip("this file system wants UTF-8")
    audit = Audit(run, "tensorboard-1", Destination("tensorboard", str(run), explicit=True))
    record(audit, *range(21))
    audit.record("config", rows=1, fields=["name", "caf\udce9"], first_step=None, last_step=None)
    assert rows(run) == [*range(21), 1]
    assert len(files(run)) == 4  # two blocks of ten, and two
    last = read_audit(run).to_pylist()[-1]
    assert last["destination"].endswith("caf\\udce9")
    assert last["fields"] == ["name", "caf\\udce9"]

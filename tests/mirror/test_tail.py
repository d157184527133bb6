"""Following a record: every committed row once, in order, in whole steps, whatever parts it lies in."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_rows import new_run, scalar_rows, start_program, stats_rows, write_run

from statsbridge.errors import LogError
from statsbridge.log import SCHEMAS, load
from statsbridge.log.parts import list_parts, part_folder, read_part
from statsbridge.mirror import tail as tail_module
from statsbridge.mirror.tail import Chunk, Cursor, Tail

TABLES = ("modules", "stats", "scalars", "events")


def step_work(step: int, rows: int = 3) -> dict[str, Any]:
    work: dict[str, Any] = {
        "stats": stats_rows(step, rows),
        "scalars": scalar_rows(step, loss=float(step), lr=0.1),
    }
    if step % 4 == 0:
        work["modules"] = {"step": step, "module": ["", "a"], "type": "Linear", "call": 0}
        work["events"] = {
            "step": step,
            "time": 1.7e9 + step,
            "kind": "note",
            "severity": "info",
            "message": f"at {step}",
        }
    return work


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return new_run(tmp_path)


def read_all(tail: Tail, final: bool = True) -> list[Chunk]:
    chunks = []
    while (chunk := tail.read(final)) is not None:
        chunks.append(chunk)
    return chunks


def joined(chunks: list[Chunk], table: str) -> pa.Table:
    return pa.concat_tables([SCHEMAS[table].empty_table(), *(getattr(chunk, table) for chunk in chunks)])


def seqs(chunks: list[Chunk], table: str) -> list[int]:
    return joined(chunks, table)["seq"].to_pylist()


def assert_everything(run: Path, chunks: list[Chunk]) -> None:
    data = load(run)
    for table in TABLES:
        assert joined(chunks, table).to_pylist() == getattr(data, table).drop_columns("rank").to_pylist()


def merge(run: Path, table: str, first: int, last: int, *, shuffled: bool = False) -> None:
    """What a later version does in the background: the parts of a range become one; its rows sorted otherwise."""
    parts = [part for part in list_parts(run, table) if part.rank == 0 and first <= part.first and part.last <= last]
    rows = pa.concat_tables([read_part(part) for part in parts]).unify_dictionaries()
    order = np.random.default_rng(0).permutation(rows.num_rows) if shuffled else np.arange(rows.num_rows)
    name, data = _encoded(table, rows.take(pa.array(order)), parts[0].first)
    (part_folder(run, table, 0) / name).write_bytes(data)
    for part in parts:
        part.path.unlink()


def _encoded(table: str, rows: pa.Table, first: int) -> tuple[str, bytes]:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink)
    data = sink.getvalue().to_pybytes()
    return f"{first:012d}-{first + rows.num_rows - 1:012d}.{zlib.crc32(data):08x}.parquet", data


def test_all_rows_once_and_in_order(run: Path) -> None:
    write_run(run, *(step_work(step) for step in range(9)))
    tail = Tail(run)
    chunks = read_all(tail)
    assert_everything(run, chunks)
    assert chunks[-1].cursor == tail.cursor == Cursor(modules=6, stats=27, scalars=18, events=3)
    assert tail.remaining() == 0
    assert tail.read(final=True) is None


def test_a_step_is_whole_once_a_later_one_is_there(run: Path) -> None:
    write_run(run, step_work(0), step_work(1))
    tail = Tail(run)
    (chunk,) = read_all(tail, final=False)
    assert chunk.scalars["step"].to_pylist() == [0, 0]
    assert chunk.stats["step"].unique().to_pylist() == [0]
    assert chunk.events.num_rows == 1
    assert tail.remaining() == 2 + 3
    assert Tail(run, cursor=chunk.cursor).read() is None
    (rest,) = read_all(Tail(run, cursor=chunk.cursor))
    assert rest.scalars["step"].to_pylist() == [1, 1]


def test_what_the_user_logs_belongs_to_the_step_in_whose_course_it_was_written(run: Path) -> None:
    """`run.log` rows have no iteration: neither do they make a step whole, nor do they wait for one."""
    validation = {"scalars": {**scalar_rows(0, val=0.5), "iteration": None}}
    late = {"scalars": {**scalar_rows(0, late=0.25), "iteration": None}}
    write_run(run, step_work(0), validation, step_work(1), late, step_work(2))
    tail = Tail(run)
    (chunk,) = read_all(tail, final=False)
    assert chunk.scalars["name"].to_pylist() == ["loss", "lr", "val", "loss", "lr", "late"]
    assert chunk.stats["step"].unique().to_pylist() == [0, 1]


def test_events_do_not_wait(run: Path) -> None:
    write_run(run, step_work(0))
    chunk = Tail(run).read()
    assert chunk is not None
    assert (chunk.events.num_rows, chunk.scalars.num_rows, chunk.stats.num_rows, chunk.modules.num_rows) == (1, 0, 0, 0)


def test_other_ranks_stay(run: Path) -> None:
    write_run(run, step_work(0))
    write_run(run, step_work(0, rows=7), rank=1)
    assert len(seqs(read_all(Tail(run)), "stats")) == 3
    assert len(seqs(read_all(Tail(run, rank=1)), "stats")) == 7


@pytest.mark.parametrize("limit", [1, 4, 7, 1000])
def test_chunks_are_bounded_and_never_cut_a_step(limit: int, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(run, *(step_work(step, rows=1 + step % 5) for step in range(12)))
    monkeypatch.setattr(tail_module, "CHUNK_ROWS", limit)
    chunks = read_all(Tail(run))
    assert_everything(run, chunks)
    steps = [set(chunk.scalars["step"].to_pylist()) | set(chunk.stats["step"].to_pylist()) for chunk in chunks]
    assert sum(map(len, steps)) == 12, "no step in two chunks"
    if limit == 1:
        assert len(chunks) >= 11
    # Whoever takes up at any chunk's cursor reads the rest.
    for number, chunk in enumerate(chunks):
        assert_everything(run, chunks[: number + 1] + read_all(Tail(run, cursor=chunk.cursor)))


def test_a_part_that_holds_many_steps_is_given_in_several_chunks(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(run, *(step_work(step, rows=1 + step % 5) for step in range(12)))
    merge(run, "stats", 0, 10**6)
    merge(run, "scalars", 0, 10**6)
    for limit in (5, 9):
        monkeypatch.setattr(tail_module, "CHUNK_ROWS", limit)
        chunks = read_all(Tail(run))
        assert_everything(run, chunks)
        assert max(chunk.stats.num_rows for chunk in chunks) <= limit + 4
        assert max(chunk.scalars.num_rows for chunk in chunks) <= limit + 1
    (run / "stats" / "rank=0").rename(run / "stats-before")
    chunks = read_all(Tail(run))
    assert seqs(chunks, "scalars") == list(range(24))
    assert max(chunk.scalars.num_rows for chunk in chunks) <= limit + 1


def test_until_reads_up_to_a_cursor(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(run, *(step_work(step) for step in range(8)))
    monkeypatch.setattr(tail_module, "CHUNK_ROWS", 4)
    chunks = read_all(Tail(run))
    merge(run, "stats", 0, 23, shuffled=True)
    for number in (0, 2, len(chunks) - 1):
        until = chunks[number].cursor
        again = read_all(Tail(run, until=until))
        assert again[-1].cursor == until
        for table in TABLES:
            assert joined(again, table).to_pylist() == joined(chunks[: number + 1], table).to_pylist()


@pytest.fixture(scope="module")
def eleven_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = new_run(tmp_path_factory.mktemp("eleven"))
    write_run(run, *(step_work(step) for step in range(11)))
    return run


@settings(max_examples=30)
@given(
    begin=st.integers(0, 10),
    merged=st.tuples(st.integers(0, 9), st.integers(1, 10)),
    shuffled=st.booleans(),
    copies=st.booleans(),
)
def test_parts_may_be_merged_at_any_time(
    begin: int,
    merged: tuple[int, int],
    shuffled: bool,
    copies: bool,
    eleven_steps: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Merged between two reads, or merged with the narrow parts still there, or sorted differently inside."""
    run = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(eleven_steps, run)
    tail = Tail(run)
    chunks = []
    first, last = min(merged), max(merged)
    kept = {part.path: part.path.read_bytes() for part in list_parts(run, "stats")}
    chunk = tail.read()
    assert chunk is not None
    chunks.append(chunk)
    if last > first:
        merge(run, "stats", 3 * first, 3 * last + 2, shuffled=shuffled)
    if copies:
        for path, data in kept.items():
            path.write_bytes(data)
    chunks += read_all(tail)
    assert seqs(chunks, "stats") == list(range(33))
    assert seqs(read_all(Tail(run, cursor=Cursor(stats=3 * begin))), "stats") == list(range(3 * begin, 33))


def test_a_part_that_vanishes_after_the_listing_is_looked_for_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(run, *(step_work(step) for step in range(6)))
    read, done = read_part, []

    def merging(part: Any) -> pa.Table:
        if part.table == "stats" and part.first == 6 and not done:
            done.append(part)
            merge(run, "stats", 3, 17)
        return read(part)

    monkeypatch.setattr("statsbridge.mirror.table_tail.read_part", merging)
    tail = Tail(run)
    chunks = read_all(tail)
    assert done
    assert seqs(chunks, "stats") == list(range(18))
    assert tail.lost() == []


def damage(run: Path, table: str, first: int) -> str:
    (part,) = [part for part in list_parts(run, table) if part.first == first]
    data = bytearray(part.path.read_bytes())
    data[len(data) // 2] ^= 1
    part.path.write_bytes(data)
    return part.name


@pytest.mark.parametrize("first", [0, 6, 15])
def test_a_damaged_part_is_passed_over_and_told_once(first: int, run: Path) -> None:
    write_run(run, *(step_work(step) for step in range(6)))
    name = damage(run, "stats", first)
    tail = Tail(run)
    chunks = read_all(tail)
    assert seqs(chunks, "stats") == [seq for seq in range(18) if not first <= seq < first + 3]
    assert seqs(chunks, "scalars") == list(range(12))
    ((text, rows),) = tail.lost()
    assert rows == 3
    assert name in text
    assert "checksum" in text
    assert tail.lost() == []
    assert tail.cursor.stats == 18
    assert tail.remaining() == 0


def test_a_damaged_wide_part_costs_nothing_while_the_narrow_ones_are_there(run: Path) -> None:
    write_run(run, *(step_work(step) for step in range(6)))
    kept = {part.path: part.path.read_bytes() for part in list_parts(run, "stats")}
    merge(run, "stats", 0, 17)
    for path, data in kept.items():
        path.write_bytes(data)
    (wide,) = [part for part in list_parts(run, "stats") if part.rows == 18]
    wide.path.write_bytes(wide.path.read_bytes()[:-9])
    tail = Tail(run)
    assert seqs(read_all(tail), "stats") == list(range(18))
    assert tail.lost() == []


def test_a_part_that_is_missing(run: Path) -> None:
    write_run(run, *(step_work(step) for step in range(4)))
    (part,) = [part for part in list_parts(run, "scalars") if part.first == 2]
    part.path.unlink()
    tail = Tail(run)
    assert seqs(read_all(tail), "scalars") == [0, 1, 4, 5, 6, 7]
    assert tail.lost() == [("no part holds rows 2 to 3 of scalars", 2)]


def test_a_disk_that_fails_for_a_while_loses_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(run, *(step_work(step) for step in range(4)))
    read, failures = Path.read_bytes, []

    def failing(path: Path) -> bytes:
        if "stats" in path.parts and len(failures) < 3:
            failures.append(path)
            raise OSError(5, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    tail = Tail(run)
    for _ in range(3):
        with pytest.raises(LogError, match="Input/output error"):
            tail.read(final=True)
    assert_everything_is_read(tail, run)


def assert_everything_is_read(tail: Tail, run: Path) -> None:
    chunks = read_all(tail)
    assert seqs(chunks, "stats") == list(range(12))
    assert seqs(chunks, "scalars") == list(range(8))
    assert tail.lost() == []


def test_a_record_that_is_being_written(run: Path) -> None:
    """Against a real writer in another process: whole steps, each once, the stats of a step never missing."""
    program = start_program(
        """
import time
writer = Writer(Path(sys.argv[1]), flush_interval=0.01)
for step in range(400):
    work = {"scalars": scalar_rows(step, loss=float(step))}
    if step % 3 == 0:
        work["stats"] = stats_rows(step, 4)
        work["modules"] = {"step": step, "module": "a", "type": "Linear", "call": 0}
    writer.submit(lambda work=work: work)
    time.sleep(0.001)
writer.close()
print("done", flush=True)
""",
        run,
    )
    tail, chunks = Tail(run), []
    final = False
    while True:
        ended = program.poll() is not None
        chunk = tail.read(final)
        if chunk is not None:
            chunks.append(chunk)
            whole = {step for step in chunk.scalars["step"].to_pylist() if step % 3 == 0}
            assert set(chunk.stats["step"].to_pylist()) == whole == set(chunk.modules["step"].to_pylist())
        elif final:
            break
        final = ended
    assert program.wait() == 0
    assert len(chunks) > 1, "it followed"
    assert_everything(run, chunks)


def test_a_long_run_is_listed_once_for_many_chunks(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(run, *(step_work(step) for step in range(30)))
    listed = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))
    monkeypatch.setattr(tail_module, "CHUNK_ROWS", 5)
    chunks = read_all(Tail(run))
    assert len(chunks) > 10
    assert len(listed) <= 3 * len(TABLES)


def test_an_empty_run(run: Path) -> None:
    tail = Tail(run)
    assert tail.read() is None
    assert tail.read(final=True) is None
    assert tail.remaining() == 0


def test_the_merging_of_these_tests_makes_parts_as_the_log_reads_them(run: Path) -> None:
    write_run(run, *(step_work(step) for step in range(3)))
    before = load(run).stats.to_pylist()
    merge(run, "stats", 0, 8)
    assert load(run).stats.to_pylist() == before

"""Merging parts: the same rows for every reader, before, during and after, whatever happens in between."""

import itertools
import random
import shutil
import threading
import time
import zlib
from pathlib import Path

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_rows import new_run, scalar_rows, stats_rows

from statsbridge.errors import DamagedPart, StatsBridgeWarning
from statsbridge.log import RunData, Writer, load
from statsbridge.log import compaction as compaction_module
from statsbridge.log.background import Compactor
from statsbridge.log.compaction import FAN_IN, LARGEST, choose, compact_table, covered, remove_covered
from statsbridge.log.files import make_folder, write_durably
from statsbridge.log.parts import Part, encode, list_parts, live_parts, part_folder
from statsbridge.log.schema import to_table


def write_parts(run: Path, parts: int, rows: int = 5, table: str = "stats", rank: int = 0, first: int = 0) -> None:
    """`parts` parts of one step each, without the syncs of a writer."""
    folder = part_folder(run, table, rank)
    make_folder(folder)
    for number in range(parts):
        step = first + number
        columns = stats_rows(step, rows) if table == "stats" else scalar_rows(step, loss=step / 7, accuracy=-step)
        made = to_table(table, columns)
        name, data = encode(table, made, first=step * made.num_rows, attempt=0)
        (folder / name).write_bytes(data)


def rows_of(run: Path, table: str = "stats") -> pa.Table:
    return getattr(load(run), table)


def same(left: pa.Table, right: pa.Table) -> bool:
    return bool(left.to_pylist() == right.to_pylist())


@pytest.mark.parametrize("table", ["stats", "scalars"])
def test_every_reader_sees_the_same_rows_after_a_merge(tmp_path: Path, table: str):
    run = new_run(tmp_path)
    write_parts(run, 130, table=table)
    before = rows_of(run, table)

    done = compact_table(run, table, 0)

    assert (done.parts_before, done.parts_after, done.rows) == (130, 1, before.num_rows)
    [part] = list_parts(run, table)
    assert part.path.read_bytes()[:4] == b"PAR1"
    assert zlib.crc32(part.path.read_bytes()) == part.checksum
    assert same(before, rows_of(run, table))
    glob = f"{run}/{table}/**/*.parquet"
    expected = sorted(before["seq"].to_pylist())
    with duckdb.connect() as connection:
        assert connection.sql(f"SELECT seq FROM '{glob}' ORDER BY seq").fetchnumpy()["seq"].tolist() == expected
    assert polars.scan_parquet(glob).collect()["seq"].sort().to_list() == expected


def test_a_merged_part_is_sorted_in_several_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compaction_module, "GROUP_ROWS", 100)
    monkeypatch.setattr(compaction_module, "SLICE_ROWS", 250)
    run = new_run(tmp_path)
    write_parts(run, 100, rows=7)
    before = rows_of(run)
    compact_table(run, "stats", 0)
    [part] = list_parts(run, "stats")
    file = pq.ParquetFile(part.path)
    assert file.num_row_groups >= 7
    rows = file.read()
    keys = list(zip(rows["module"].to_pylist(), rows["seq"].to_pylist(), strict=True))
    assert keys == sorted(keys)
    assert same(before, rows_of(run))


def test_one_site_of_all_modules_lies_together_in_row_groups_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compaction_module, "GROUP_ROWS", 100)
    monkeypatch.setattr(compaction_module, "LEAST_GROUP_ROWS", 25)
    monkeypatch.setattr(compaction_module, "SLICE_ROWS", 170)
    run = new_run(tmp_path)
    folder = part_folder(run, "stats", 0)
    make_folder(folder)
    # Some sites have more rows than a row group, some fewer than are worth one, and some rows have none.
    sites = ["update", "activation", "activation", "activation", "parameter", "update", "tensor", None]
    for step in range(40):
        columns = stats_rows(
            step, 8, module=[f"m{row % 3}" for row in range(8)], site=sites if step < 10 else sites[:4] * 2
        )
        name, data = encode("stats", to_table("stats", columns), first=8 * step, attempt=0)
        (folder / name).write_bytes(data)
    before = rows_of(run)
    compact_table(run, "stats", 0, fan_in=2)
    assert same(before, rows_of(run))
    [part] = list_parts(run, "stats")
    file = pq.ParquetFile(part.path)
    groups = [file.read_row_group(number).to_pydict() for number in range(file.num_row_groups)]
    names = ("site", "module", "tensor", "call", "seq")
    keys = [
        tuple(value or "" for value in key[:3]) + key[3:]
        for group in groups
        for key in zip(*(group[name] for name in names), strict=True)
    ]
    assert keys == sorted(keys)
    sizes = [len(group["seq"]) for group in groups]
    assert max(sizes) <= 100
    assert min(sizes) >= 25
    mixed = [group for group in groups if len(set(group["site"])) > 1]
    assert mixed
    for group in mixed:
        first = group["site"][0]
        assert group["site"].count(first) < 25, "a site that has enough rows shares them with no other"


def test_nulls_histograms_and_older_columns_survive(tmp_path: Path):
    run = new_run(tmp_path)
    folder = part_folder(run, "stats", 0)
    make_folder(folder)
    for step in range(3):
        columns = stats_rows(step, 4, module=[None, "b", "a", ""], histogram=np.arange(4 * 9).reshape(4, 9) + step)
        columns["mean"] = [None, 1.5, -0.0, np.inf]
        name, data = encode("stats", to_table("stats", columns), first=4 * step, attempt=0)
        (folder / name).write_bytes(data)
    before = rows_of(run)
    assert compact_table(run, "stats", 0, fan_in=2).parts_after == 1
    after = rows_of(run)
    assert same(before, after)
    assert str(after["mean"].to_pylist()[2]) == "-0.0"


def test_compacting_again_changes_nothing(tmp_path: Path):
    run = new_run(tmp_path)
    write_parts(run, 10)
    compact_table(run, "stats", 0, fan_in=2)
    [part] = list_parts(run, "stats")
    stamp = part.path.stat().st_mtime_ns
    assert compact_table(run, "stats", 0, fan_in=2).rows == 0
    assert list_parts(run, "stats") == (part,)
    assert part.path.stat().st_mtime_ns == stamp


def test_fewer_than_a_hundred_parts_are_left_alone(tmp_path: Path):
    run = new_run(tmp_path)
    write_parts(run, FAN_IN - 1, rows=1)
    assert compact_table(run, "stats", 0).rows == 0
    assert len(list_parts(run, "stats")) == FAN_IN - 1


def part_of(first: int, last: int) -> Part:
    return Part(Path(f"stats/rank=0/{first}-{last}"), "stats", 0, first, last, 0)


@given(st.lists(st.integers(1, 5000) | st.integers(1, 50), max_size=700), st.integers(0, 2**32))
def test_the_number_of_parts_stays_bounded_whatever_is_written(sizes: list[int], seed: int):
    """A model of a run: parts of any size arrive, and whatever `choose` names is merged."""
    generator = random.Random(seed)
    live: list[Part] = []
    for size in sizes * generator.randint(1, 12):
        first = live[-1].last + 1 if live else 0
        live.append(part_of(first, first + size - 1))
        while (chosen := choose(live)) is not None:
            assert FAN_IN <= len(chosen) <= 2 * FAN_IN
            assert all(a.last + 1 == b.first for a, b in itertools.pairwise(chosen))
            merged = part_of(chosen[0].first, chosen[-1].last)
            live = sorted({*live, merged} - set(chosen), key=lambda part: part.first)
    assert len(live) < FAN_IN
    assert [part.first for part in live[1:]] == [part.last + 1 for part in live[:-1]]


def test_a_run_of_300_million_rows_has_few_parts_and_writes_each_row_three_times():
    live: list[Part] = []
    merged_rows = most = 0
    for step in range(200_000):
        live.append(part_of(step * 1500, step * 1500 + 1499))
        while step % FAN_IN == 0 and (chosen := choose(live)) is not None:
            assert len(chosen) <= 2 * FAN_IN
            merged_rows += sum(part.rows for part in chosen)
            taken = set(chosen)
            live = [part for part in live if part not in taken] + [part_of(chosen[0].first, chosen[-1].last)]
            live.sort(key=lambda part: part.first)
        most = max(most, len(live))
    assert most < 250 + 3e8 / (LARGEST / 2)
    assert merged_rows < 2.1 * 3e8


def test_merges_that_fall_behind_catch_up():
    live = [part_of(step * 1500, step * 1500 + 1499) for step in range(5000)]
    sizes = []
    while (chosen := choose(live)) is not None:
        sizes.append(len(chosen))
        live = sorted({*live, part_of(chosen[0].first, chosen[-1].last)} - set(chosen), key=lambda part: part.first)
    assert max(sizes) == 2 * FAN_IN
    assert len(live) < FAN_IN


def test_parts_of_full_size_are_never_merged_again():
    full = [part_of(number * LARGEST, (number + 1) * LARGEST - 1) for number in range(150)]
    assert choose(full) is None


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12))
def test_covered_leaves_every_row_in_some_part(spans: list[tuple[int, int]]):
    parts = list({part_of(first, first + length) for first, length in spans})
    kept = set(parts) - covered(parts)
    assert {seq for part in kept for seq in range(part.first, part.last + 1)} == {
        seq for part in parts for seq in range(part.first, part.last + 1)
    }
    for part in covered(parts):
        assert any(wide.first <= part.first and part.last <= wide.last for wide in kept)


def test_a_reader_opened_before_the_merge_sees_what_was_there_then(tmp_path: Path):
    run = new_run(tmp_path)
    write_parts(run, 5)
    early, expected = load(run), rows_of(run)
    write_parts(run, 5, first=5)
    compact_table(run, "stats", 0, fan_in=2)
    assert len(list_parts(run, "stats")) == 1
    assert same(early.stats, expected)
    assert early.damaged == ()


def test_a_crash_between_the_new_part_and_the_old_ones_end(tmp_path: Path):
    run = new_run(tmp_path)
    write_parts(run, 6)
    before = rows_of(run)
    saved = tmp_path / "saved"
    shutil.copytree(run / "stats", saved)
    compact_table(run, "stats", 0, fan_in=2)
    [wide] = list_parts(run, "stats")
    for file in list((saved / "rank=0").iterdir())[2:]:
        shutil.copy(file, run / "stats" / "rank=0")
    assert len(list_parts(run, "stats")) == 5
    assert live_parts(run, "stats") == (wide,)
    assert same(before, rows_of(run))
    with duckdb.connect() as connection:
        seen = connection.sql(f"SELECT DISTINCT ON (seq) seq FROM '{run}/stats/**/*.parquet'").fetchall()
    assert len(seen) == before.num_rows
    remove_covered(run, "stats", 0)
    assert list_parts(run, "stats") == (wide,)


def test_a_damaged_wide_part_does_not_cost_the_parts_it_covers(tmp_path: Path):
    run = new_run(tmp_path)
    write_parts(run, 6)
    before = rows_of(run)
    saved = tmp_path / "saved"
    shutil.copytree(run / "stats", saved)
    compact_table(run, "stats", 0, fan_in=2)
    [wide] = list_parts(run, "stats")
    shutil.copytree(saved, run / "stats", dirs_exist_ok=True)
    wide.path.write_bytes(wide.path.read_bytes()[:-1])
    remove_covered(run, "stats", 0)
    assert len(list_parts(run, "stats")) == 7
    data = load(run)
    with pytest.warns(StatsBridgeWarning, match=wide.path.name):
        assert same(before, data.stats)
    compact_table(run, "stats", 0, fan_in=2)
    data = load(run)
    with pytest.warns(StatsBridgeWarning, match=wide.path.name):
        assert same(before, data.stats)


def test_damaged_parts_stay_and_the_others_are_merged(tmp_path: Path):
    run = new_run(tmp_path)
    write_parts(run, 9)
    parts = list_parts(run, "stats")
    damaged = bytearray(parts[4].path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    parts[4].path.write_bytes(damaged)
    compact_table(run, "stats", 0, fan_in=2)
    now = list_parts(run, "stats")
    assert [(part.first, part.last) for part in now] == [(0, 19), (20, 24), (25, 44)]
    assert now[1] == parts[4]
    with pytest.warns(StatsBridgeWarning, match=parts[4].path.name):
        assert rows_of(run)["seq"].to_pylist() == [*range(20), *range(25, 45)]


def test_told_to_stop_it_leaves_everything_as_it_was(tmp_path: Path):
    run = new_run(tmp_path)
    write_parts(run, 120)
    before = list_parts(run, "stats")
    asked = iter([True, False])
    compact_table(run, "stats", 0, goes_on=lambda: next(asked, False))
    assert list_parts(run, "stats") == before
    assert not list((run / "stats" / "rank=0").glob(".*"))


def test_a_full_disk_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = new_run(tmp_path)
    write_parts(run, 120)
    before = list_parts(run, "stats")

    def full(descriptor: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("statsbridge.log.files.os.write", full)
    with pytest.raises(OSError, match="No space"):
        compact_table(run, "stats", 0)
    monkeypatch.undo()
    assert list_parts(run, "stats") == before
    assert not list((run / "stats" / "rank=0").glob(".*"))


def test_a_series_is_the_same_small_read_after_a_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = new_run(tmp_path)
    write_parts(run, 40, rows=6)
    before = load(run).series("m3", "activation", "mean")
    monkeypatch.setattr(compaction_module, "GROUP_ROWS", 40)
    compact_table(run, "stats", 0, fan_in=2)
    monkeypatch.setattr("statsbridge.log.pruning._PRUNED", 1)
    monkeypatch.setattr("statsbridge.log.reader._SMALL", 1)
    data = load(run)
    read: list[int] = []
    original = pq.ParquetFile.read_row_groups
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_groups",
        lambda self, groups, *more: (read.extend(groups), original(self, groups, *more))[1],
    )
    assert same(before, data.series("m3", "activation", "mean"))
    assert before.num_rows == 40
    assert set(read) == {3}, "of six row groups only the one that holds the module"
    assert "stats" not in data.__dict__


def test_the_writer_merges_beside_a_training(tmp_path: Path):
    run = new_run(tmp_path)
    writer = Writer(run, flush_interval=0.0)
    for step in range(FAN_IN + 30):
        writer.submit(lambda step=step: {"scalars": scalar_rows(step, loss=step)})
        writer.flush()
    deadline = time.monotonic() + 60
    while len(list_parts(run, "scalars")) >= FAN_IN and time.monotonic() < deadline:
        time.sleep(0.05)
    writer.close()
    live = live_parts(run, "scalars")
    assert len(live) < FAN_IN
    assert list_parts(run, "scalars") == live, "finish() deletes what is covered: a plain glob is exact"
    assert rows_of(run, "scalars")["value"].to_pylist() == [float(step) for step in range(FAN_IN + 30)]


def test_readers_beside_a_merging_writer_see_a_growing_record(tmp_path: Path):
    run = new_run(tmp_path)
    writer = Writer(run, flush_interval=0.0)
    ended = threading.Event()
    problems: list[str] = []

    def read() -> None:
        seen = 0
        while not ended.is_set():
            data: RunData = load(run)
            values = data.scalars["value"].to_pylist()
            if values != [float(step) for step in range(len(values))] or len(values) < seen or data.damaged:
                problems.append(f"{len(values)} after {seen}: {data.damaged}")
            seen = len(values)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(400):
        writer.submit(lambda step=step: {"scalars": scalar_rows(step, loss=step)})
        if step % 2:
            writer.flush()
    writer.close()
    ended.set()
    reader.join()
    assert problems == []


def test_a_compactor_that_is_stopped_starts_nothing_more(tmp_path: Path):
    run = new_run(tmp_path)
    write_parts(run, FAN_IN)
    compactor = Compactor(run, 0)
    compactor.stop(1)
    for _ in range(FAN_IN):
        compactor.wrote("stats")
    compactor.start_if_due()
    compactor.stop(5)
    assert len(list_parts(run, "stats")) == FAN_IN


def test_rows_that_are_not_what_the_name_says_are_never_merged(tmp_path: Path):
    run = new_run(tmp_path)
    write_parts(run, 3)
    part = list_parts(run, "stats")[1]
    # Another part's content under this one's name, with the right checksum.
    data = list_parts(run, "stats")[0].path.read_bytes()
    name = f"{part.first:012d}-{part.last + 2:012d}.{zlib.crc32(data):08x}.parquet"
    part.path.unlink()
    list_parts(run, "stats")[1].path.unlink()
    write_durably(part.path.parent / name, data)
    before = list_parts(run, "stats")
    compact_table(run, "stats", 0, fan_in=2)
    assert list_parts(run, "stats") == before
    with pytest.raises(DamagedPart):
        compaction_module.merge_parts(run, "stats", before, lambda: True)


def test_a_query_over_many_rows_reads_the_parts_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = new_run(tmp_path)
    write_parts(run, 20, rows=6)
    write_parts(run, 3, rows=6, rank=1)
    compact_table(run, "stats", 0, fan_in=2)
    sql = "SELECT module, rank, sum(mean) AS total, max(time) AS last FROM stats GROUP BY ALL ORDER BY ALL"
    expected = load(run).query(sql)
    monkeypatch.setattr("statsbridge.log.reader._IN_MEMORY", 1)
    data = load(run)
    found = data.query(sql)
    assert "stats" not in data.__dict__
    assert found["module"].to_pylist() == expected["module"].to_pylist()
    assert found["rank"].to_pylist() == expected["rank"].to_pylist()
    assert found["last"].to_pylist() == expected["last"].to_pylist()
    np.testing.assert_allclose(found["total"].to_numpy(), expected["total"].to_numpy(), rtol=1e-12)
    part = list_parts(run, "stats")[0]
    part.path.write_bytes(part.path.read_bytes()[:-1])
    with pytest.warns(StatsBridgeWarning, match=part.path.name):
        assert load(run).query("SELECT count(*) AS n FROM stats")["n"].to_pylist() == [18]


def test_a_query_whose_files_are_merged_meanwhile_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = new_run(tmp_path)
    write_parts(run, 6, rows=4)
    monkeypatch.setattr("statsbridge.log.reader._IN_MEMORY", 1)
    data = load(run)
    write_parts(run, 2, rows=4, first=6)  # written since: not a part of what was loaded
    asked = []
    source = RunData._source

    def then_merge(self: RunData, table: str, used: list[Path]) -> object:
        found = source(self, table, used)
        asked.append(len(used))
        compact_table(run, "stats", 0, fan_in=2)
        return found

    monkeypatch.setattr(RunData, "_source", then_merge)
    found = data.query("SELECT count(*) AS n, max(seq) AS last, max(step) AS step FROM stats")
    assert found.to_pylist() == [{"n": 24, "last": 23, "step": 5}]
    assert asked == [6, 1]
    assert "stats" not in data.__dict__


def test_a_query_over_a_record_with_a_gap_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = new_run(tmp_path)
    write_parts(run, 6, rows=4)
    monkeypatch.setattr("statsbridge.log.reader._IN_MEMORY", 1)
    list_parts(run, "stats")[2].path.unlink()
    with pytest.warns(StatsBridgeWarning, match="rows 8 to 11"):
        assert load(run).query("SELECT count(*) AS n FROM stats")["n"].to_pylist() == [20]

"""Long runs: few files, bounded memory, small reads, whatever their length. Times are in benchmarks/log.py."""

import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from log_rows import new_run, stats_rows

from statsbridge.log import Writer, load
from statsbridge.log import compaction as compaction_module
from statsbridge.log.compaction import FAN_IN, compact_table
from statsbridge.log.parts import list_parts


def write_steps(run: Path, steps: int, rows: int) -> int:
    """A run of many parts, merged beside the writing; the most files that there ever were."""
    writer = Writer(run, flush_interval=3600)
    most = 0
    for step in range(steps):
        writer.submit(lambda step=step: {"stats": stats_rows(step, rows)}, rows=rows)
        assert writer.flush(60)
        most = max(most, len(list_parts(run, "stats")))
        # Under a load that holds the merging thread back its parts would only pile up for the sake of the test.
        until = time.monotonic() + 60
        while len(list_parts(run, "stats")) > 2 * FAN_IN and time.monotonic() < until:
            time.sleep(0.01)
    assert writer.close()
    return most


@pytest.mark.parametrize("steps", [330, pytest.param(3000, marks=pytest.mark.slow)])
def test_files_stay_few_and_a_series_is_a_small_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    rows = 40
    run = new_run(tmp_path)
    assert write_steps(run, steps, rows) < 3 * FAN_IN
    expected = [float(stats_rows(step, rows)["mean"][17]) for step in range(steps)]
    assert load(run).series("m17", "activation", "mean")["value"].to_pylist() == expected

    monkeypatch.setattr(compaction_module, "GROUP_ROWS", 1000)
    monkeypatch.setattr("statsbridge.log.pruning._PRUNED", 1)
    monkeypatch.setattr("statsbridge.log.reader._SMALL", 1)
    compact_table(run, "stats", 0, fan_in=2)
    [part] = list_parts(run, "stats")
    read: dict[int, int] = {}  # which groups, of how many rows
    original = pq.ParquetFile.read_row_groups

    def spy(self: pq.ParquetFile, groups: list[int], *more: object, **options: object) -> pa.Table:
        read.update({group: self.metadata.row_group(group).num_rows for group in groups})
        return original(self, groups, *more, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", spy)
    assert load(run).series("m17", "activation", "mean")["value"].to_pylist() == expected
    assert 0 < sum(read.values()) <= steps + 2 * 1000, "the groups that hold the series, not the run"
    assert part.rows == steps * rows


def test_a_merge_holds_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path)
    writer = Writer(run, flush_interval=3600)
    for step in range(60):
        writer.submit(lambda step=step: {"stats": stats_rows(step, 100)})
        assert writer.flush()
    writer.close()
    pieces: list[int] = []
    sort = compaction_module._sorted
    monkeypatch.setattr(
        compaction_module, "_sorted", lambda rows, keys: (pieces.append(rows.num_rows), sort(rows, keys))[1]
    )
    monkeypatch.setattr(compaction_module, "SLICE_ROWS", 500)
    before = load(run).stats
    compact_table(run, "stats", 0, fan_in=2)
    assert sum(pieces) == 6000
    assert max(pieces) <= 500
    assert load(run).stats.equals(before)


def test_a_merge_keeps_every_digit_in_half_the_bytes(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    writer = Writer(run, flush_interval=3600)
    for step in range(100):
        # As collected: extremes are float32 numbers, the rest has all its digits.
        columns = stats_rows(step, 50)
        columns["min"] = columns["min"].astype("float32").astype("float64")
        columns["max"] = columns["max"].astype("float32").astype("float64")
        writer.submit(lambda columns=columns: {"stats": columns})
        assert writer.flush()
    writer.close()
    before, apart = load(run).stats, sum(part.size for part in list_parts(run, "stats"))
    compact_table(run, "stats", 0, fan_in=2)
    [part] = list_parts(run, "stats")
    assert load(run).stats.equals(before)
    assert part.size < 0.6 * apart
    assert part.size / part.rows < 9 * 8 + 2 * 4, "nine numbers of 8 bytes and two of 4: more is waste"

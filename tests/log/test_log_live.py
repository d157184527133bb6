"""Other tools read a run while another process writes it, by globbing alone; and so does `load`."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pytest
from log_rows import new_run, start_program

from statsbridge.log import load

duckdb = pytest.importorskip("duckdb")

STEPS = 60
WRITE = """
writers = [Writer(Path(sys.argv[1]), rank=rank, flush_interval=0) for rank in (0, 1)]
for step in range(int(sys.argv[2])):
    for writer in writers:
        writer.submit(lambda step=step: {
            "stats": stats_rows(step, 30, histogram=np.ones((30, 9), int) if step % 2 else None),
            "scalars": scalar_rows(step, loss=1.0),
        })
    assert all(writer.flush() for writer in writers)
    print(step, flush=True)
"""


def by_duckdb(run: Path) -> pa.Table:
    sql = f"select * from read_parquet('{run}/stats/**/*.parquet', hive_partitioning=true)"
    return duckdb.sql(sql).to_arrow_table()


def by_polars(run: Path) -> pa.Table:
    return polars.scan_parquet(f"{run}/stats/**/*.parquet", hive_partitioning=True).collect().to_arrow()


def by_dataset(run: Path) -> pa.Table:
    return pyarrow.dataset.dataset(run / "stats", partitioning="hive").to_table()


def by_load(run: Path) -> pa.Table:
    data = load(run)
    assert data.damaged == ()
    return data.stats


@pytest.mark.parametrize("read", [by_duckdb, by_polars, by_dataset, by_load])
def test_a_run_that_is_being_written_is_readable_and_whole(tmp_path: Path, read: Callable[[Path], pa.Table]) -> None:
    run = new_run(tmp_path)
    program = start_program(WRITE, run, STEPS)
    assert program.stdout is not None
    program.stdout.readline()  # something is there
    before = {0: 0, 1: 0}
    reads = 0
    while program.poll() is None or reads == 0:
        table = read(run)
        for rank in (0, 1):
            rows = table.filter(pc.equal(table["rank"], rank))
            steps = np.sort(rows["step"].to_numpy())
            assert np.array_equal(np.sort(rows["seq"].to_numpy()), np.arange(rows.num_rows))
            assert np.array_equal(steps, np.repeat(np.arange(rows.num_rows // 30), 30))
            assert rows.num_rows >= max(before[rank], 30)
            before[rank] = rows.num_rows
        reads += 1
    assert program.returncode == 0, program.communicate()[1]
    table = read(run)
    assert table.num_rows == 2 * STEPS * 30
    row = table.filter(pc.equal(table["seq"], 31)).to_pylist()[0]
    assert (row["module"], row["site"], row["status"]) == ("m1", "activation", None)
    assert row["histogram"] == [1] * 9
    assert row["time"] == datetime.fromtimestamp(1.7e9 + 1, UTC)


def test_all_readers_give_the_same_values(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    program = start_program(WRITE, run, 3)
    program.communicate(timeout=60)
    tables = [
        polars.from_arrow(read(run)).cast({polars.Categorical: polars.String}).sort("rank", "seq")
        for read in (by_load, by_duckdb, by_polars, by_dataset)
    ]
    for table in tables[1:]:
        assert set(table.columns) == set(tables[0].columns)
        for name in tables[0].columns:
            assert table[name].to_list() == tables[0][name].to_list(), name

"""Training processes to be killed at any moment, and what must be true of the record afterwards."""

import json
from pathlib import Path

import duckdb
import numpy as np
import polars
import pyarrow as pa
from log_rows import FLOATS, start_program, stats_rows

from statsbridge.log import SCHEMAS, RunData, list_runs, load
from statsbridge.log.compaction import compact_table, remove_unfinished
from statsbridge.log.lease import maintenance
from statsbridge.log.parts import list_parts

ROWS = 12
FAN_IN = 4

# Imports are done once: each line on standard input is a run, and a child that writes it until it is killed.
_NURSERY = f"""
import json, os
from statsbridge.log import background, compaction

def often(run, table, rank, goes_on):
    try:
        compaction.compact_table(run, table, rank, fan_in={FAN_IN}, goes_on=goes_on)
    except OSError:
        pass

background.FAN_IN = compaction.FAN_IN = {FAN_IN}
compaction.MOST = {2 * FAN_IN}
background.compact_quietly = often

def say(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def by_writer(run):
    writer = Writer(Path(run), flush_interval=0.005)
    step = 0
    while True:
        writer.submit(lambda step=step: {{"stats": stats_rows(step, {ROWS}), "scalars": scalar_rows(step, loss=step)}})
        step += 1
        if step % 7 == 0:
            assert writer.flush()
            say(acknowledged=step)

def by_training(run):
    import torch, statsbridge
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = statsbridge.init(model, dir=run, every=1, flush_interval=0.005)
    step = 0
    while True:
        loss = model(torch.randn(16, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watched.step(loss=loss)
        step += 1
        if step % 7 == 0:
            assert watched._writer.flush()
            say(acknowledged=step)

for line in sys.stdin:
    kind, run = json.loads(line)
    child = os.fork()
    if child == 0:
        globals()[kind](run)
    say(started=child)
    os.waitpid(child, 0)
    say(dead=child)
"""


class Nursery:
    """A process that has imported everything, and whose children train until they are killed."""

    def __init__(self) -> None:
        self._program = start_program(_NURSERY)

    def start(self, kind: str, run: Path) -> int:
        """Start a child that trains into `run`; its process id."""
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps([kind, str(run)]) + "\n")
        self._program.stdin.flush()
        return int(self._said("started"))

    def acknowledged(self) -> int:
        """Wait for a child to say how many steps it has seen flushed."""
        return int(self._said("acknowledged"))

    def steps_acknowledged_before_death(self) -> int:
        """What the child said until it was killed; 0 where it said nothing."""
        steps = 0
        while True:
            line = self._line()
            if "dead" in line:
                return steps
            steps = line.get("acknowledged", steps)

    def close(self) -> None:
        self._program.communicate(timeout=60)

    def _said(self, what: str) -> int:
        while True:
            line = self._line()
            if what in line:
                return line[what]

    def _line(self) -> dict[str, int]:
        assert self._program.stdout is not None
        line = self._program.stdout.readline()
        if not line:
            raise AssertionError(f"the child failed: {self._program.communicate(timeout=60)[1]}")
        said: dict[str, int] = json.loads(line)
        return said


def check_by_load(run: Path, acknowledged: dict[str, int]) -> RunData:
    """Each row once, none missing, and at least as many as were acknowledged."""
    data = load(run)
    for table, rows in acknowledged.items():
        found = getattr(data, table)
        assert found["seq"].to_pylist() == list(range(found.num_rows))
        assert found.num_rows >= rows, f"{table}: {rows} rows were acknowledged"
    assert data.damaged == ()
    return data


def check_numbers(data: RunData) -> None:
    """What `by_writer` has written, to the last digit; a step is there as a whole or not at all."""
    steps = data.stats.num_rows // ROWS
    assert data.stats["step"].to_pylist() == np.repeat(np.arange(steps), ROWS).tolist()
    for name in FLOATS:
        expected = np.concatenate([stats_rows(step, ROWS)[name] for step in range(steps)] or [np.empty(0)])
        assert np.array_equal(data.stats[name].to_numpy(), expected)
    assert data.scalars["value"].to_pylist() == list(range(data.scalars.num_rows))


def check_by_others(data: RunData, *, distinct: bool) -> None:
    """DuckDB and Polars, globbing: the rows that `load` gives. `distinct`: each row's copies taken as one."""
    for table in ("stats", "scalars"):
        rows: pa.Table = getattr(data, table)
        if not rows.num_rows:
            continue
        glob = f"{data.path}/{table}/**/*.parquet"
        column = "mean" if table == "stats" else "value"
        pick = "DISTINCT ON (rank, seq) seq" if distinct else "seq"
        with duckdb.connect() as connection:
            source = f"(SELECT * FROM read_parquet('{glob}', hive_partitioning=true) ORDER BY rank, seq)"
            by_duckdb = connection.sql(f"SELECT {pick}, {column} FROM {source} ORDER BY rank, seq").fetchnumpy()
        scanned = polars.scan_parquet(glob, hive_partitioning=True)
        if distinct:
            scanned = scanned.unique(["rank", "seq"])
        by_polars = scanned.select("seq", column).sort("seq").collect()
        for name in ("seq", column):
            expected = rows[name].to_numpy()
            assert np.array_equal(np.asarray(by_duckdb[name]), expected)
            assert np.array_equal(by_polars[name].to_numpy(), expected)


def compact(run: Path) -> None:
    """What `statsbridge compact` does."""
    with maintenance(run) as holds:
        for table in SCHEMAS:
            remove_unfinished(run, table, 0)
            compact_table(run, table, 0, fan_in=2, goes_on=holds)


def check_crashed_run(run: Path, acknowledged: dict[str, int]) -> RunData:
    """All that is promised of a run whose process was killed."""
    assert list_runs(run.parent)[0].state in ("crashed", "created")
    data = check_by_load(run, acknowledged)
    check_by_others(data, distinct=True)
    compact(run)
    again = check_by_load(run, acknowledged)
    for table in SCHEMAS:
        assert getattr(again, table).equals(getattr(data, table))
        assert len(list_parts(run, table)) <= 1
    check_by_others(again, distinct=False)
    assert not list(run.rglob("*.tmp"))
    return again

"""Flush, merge, fail, die, lose power, in any order: what was acknowledged is there, once, with its value."""

import random
import shutil
import tempfile
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from log_disk_helpers import ModelDisk, PowerCut

from statsbridge.log.backlog import Backlog
from statsbridge.log.compaction import compact_table, remove_unfinished
from statsbridge.log.parts import covered, list_parts
from statsbridge.log.reader import RunData
from statsbridge.log.schema import to_table

TABLES = {"stats": "mean", "scalars": "value"}
OPERATIONS = st.none() | st.integers(0, 45)


class Log(RuleBasedStateMachine):
    """One run on a disk that forgets; each life of the writing process has a rank of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.folder = Path(tempfile.mkdtemp(prefix="statsbridge-model-"))
        self.disks = 0
        self.disk = ModelDisk(self.new_folder(), self.patch)
        # (table, rank) → the value of each row in the order of `seq`, and how many were acknowledged
        self.values: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.acknowledged: dict[tuple[str, int], int] = {}
        self.rank = -1
        self.number = 0.0

    def teardown(self) -> None:
        self.patch.undo()
        shutil.rmtree(self.folder)

    def new_folder(self) -> Path:
        self.disks += 1
        folder = self.folder / f"disk{self.disks}"
        folder.mkdir()
        return folder

    @initialize()
    def start(self) -> None:
        self.rank += 1
        self.backlog = Backlog(self.disk.top, self.rank, 0)

    @rule(table=st.sampled_from(sorted(TABLES)), rows=st.integers(1, 4))
    def add(self, table: str, rows: int) -> None:
        values = [self.number + row for row in range(rows)]
        self.number += rows
        self.values[table, self.rank] += values
        key = {"module": "m"} if table == "stats" else {"name": [f"n{int(value) % 3}" for value in values]}
        self.backlog.add(table, to_table(table, {"step": int(self.number), TABLES[table]: values, **key}))

    @rule(fail=OPERATIONS, cut=OPERATIONS, volatile_survives=st.booleans(), seed=st.integers(0, 2**32))
    def flush(self, fail: int | None, cut: int | None, volatile_survives: bool, seed: int) -> None:
        self.disk.fail_at, self.disk.cut_at = fail, cut
        try:
            failure = self.backlog.write()
        except PowerCut:
            self.die(volatile_survives, seed)
            return
        self.disk.fail_at = self.disk.cut_at = None
        assert failure is None or fail is not None
        if failure is None:
            for table in TABLES:
                self.acknowledged[table, self.rank] = len(self.values[table, self.rank])

    @rule(fail=OPERATIONS, cut=OPERATIONS, volatile_survives=st.booleans(), seed=st.integers(0, 2**32))
    def merge(self, fail: int | None, cut: int | None, volatile_survives: bool, seed: int) -> None:
        self.disk.fail_at, self.disk.cut_at = fail, cut
        failed = True
        try:
            for table in TABLES:
                for rank in range(self.rank + 1):
                    with suppress(OSError):
                        compact_table(self.disk.top, table, rank, fan_in=2)
            failed = fail is not None
        except PowerCut:
            self.die(volatile_survives, seed)
        self.disk.fail_at = self.disk.cut_at = None
        if not failed:
            for table in TABLES:
                parts = list_parts(self.disk.top, table)
                assert not covered(parts), "a plain glob is exact"
                assert len({part.rank for part in parts}) == len(parts)

    @rule(volatile_survives=st.booleans(), seed=st.integers(0, 2**32))
    def die(self, volatile_survives: bool, seed: int) -> None:
        """The process is killed, or the power fails."""
        self.disk.fail_at = self.disk.cut_at = None
        if not volatile_survives:
            self.disk.after_power_cut(self.new_folder(), random.Random(seed))
        self.start()
        self.read()

    @rule()
    def clear(self) -> None:
        """What `statsbridge compact` does to half-written files."""
        for table in TABLES:
            for rank in range(self.rank + 1):
                remove_unfinished(self.disk.top, table, rank)
        assert not list(self.disk.top.rglob("*.tmp"))

    @rule()
    def read(self) -> None:
        top = self.disk.top
        data = RunData(
            top, {"id": "model"}, {table: list_parts(top, table) for table in ("events", *TABLES, "modules")}
        )
        assert data.damaged == ()
        for table, column in TABLES.items():
            rows = getattr(data, table)
            found: dict[tuple[str, int], list[float]] = defaultdict(list)
            for rank, seq, value in zip(*(rows[name].to_pylist() for name in ("rank", "seq", column)), strict=True):
                assert seq == len(found[table, rank]), "no row twice, none missing in between"
                found[table, rank].append(value)
            for key, values in self.values.items():
                if key[0] == table:
                    assert found[key] == values[: len(found[key])], "no row invented"
                    assert len(found[key]) >= self.acknowledged.get(key, 0), "nothing acknowledged is lost"
            # Plain globs: every row at least once, and nothing else.
            seen = {
                (int(path.parent.name[5:]), seq)
                for path in top.glob(f"{table}/**/*.parquet")
                for seq in pq.read_table(path, columns=["seq"], partitioning=None)["seq"].to_pylist()
            }
            assert seen == {(rank, seq) for (_, rank), values in found.items() for seq in range(len(values))}


TestLog = Log.TestCase
# HYPOTHESIS_PROFILE=explore tries a thousand histories.
TestLog.settings = settings(
    max_examples=max(40, settings.default.max_examples // 5) if settings.default else 40, stateful_step_count=20
)

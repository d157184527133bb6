"""Mirrors of a run that was resumed: every attempt arrives, in order, and what repeats a step is told from the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_rows import new_run, scalar_rows, stats_rows, write_run
from mirror_helpers import install, lines
from verify_helpers import deliver

from statsbridge.log import SCHEMAS, Writer, load
from statsbridge.log.resume import next_attempt
from statsbridge.mirror import Selection
from statsbridge.mirror.selector import Selector
from statsbridge.mirror.tail import Chunk, Cursor, Tail
from statsbridge.mirror.verify import verify


def step_work(step: int, attempt: int = 0) -> dict[str, Any]:
    """Every attempt has numbers and times of its own."""
    when = {"step": step, "iteration": step, "time": 1.7e9 + 1000 * attempt + step}
    modules = {"step": step, "module": ["", "m0"], "type": "Linear", "call": 0}
    stats = {**stats_rows(step + 1000 * attempt, 3), **when}
    return {"modules": modules, "stats": stats, "scalars": {**scalar_rows(step, loss=step / 7 + attempt), **when}}


def begin(run: Path, first: int) -> Writer:
    with next_attempt(run, first, config=None, information={}) as attempt:
        return Writer(run, attempt=attempt.number)


def write(writer: Writer, *works: dict[str, Any]) -> None:
    for work in works:
        assert writer.submit(lambda work=work: work)
        assert writer.flush()


def attempts_in(chunk: Chunk) -> set[int]:
    tables = (chunk.modules, chunk.stats, chunk.scalars)
    return {number for table in tables for number in table["attempt"].to_pylist()}


def assert_everything(run: Path, chunks: list[Chunk]) -> None:
    data = load(run, attempts="all")
    for table in ("modules", "stats", "scalars"):
        rows = pa.concat_tables([SCHEMAS[table].empty_table(), *(getattr(chunk, table) for chunk in chunks)])
        assert rows.to_pylist() == getattr(data, table).drop_columns("rank").to_pylist()
    assert all(len(attempts_in(chunk)) <= 1 for chunk in chunks)


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """Killed after the statistics of step 10 and before its scalars; gone on with from 6 to 12."""
    run = new_run(tmp_path)
    write_run(run, *(step_work(step) for step in range(10)), {"stats": stats_rows(10, 3)})
    writer = begin(run, 6)
    write(writer, *(step_work(step, 1) for step in range(6, 13)))
    assert writer.close()
    return run


def test_steps_arrive_as_they_come_though_they_go_back(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, *(step_work(step) for step in range(10)), {"stats": stats_rows(10, 3)})
    tail = Tail(run)
    chunks = [chunk for chunk in [tail.read()] if chunk is not None]
    assert chunks[-1].scalars["step"].to_pylist() == list(range(9))
    writer = begin(run, 6)
    write(writer, step_work(6))
    (last,) = list(iter(tail.read, None))
    assert last.scalars["step"].to_pylist() == [9], "nothing more can come of it, so it is whole"
    assert set(last.stats["step"].to_pylist()) == {9, 10}
    write(writer, step_work(7))
    (next_one,) = list(iter(tail.read, None))
    assert next_one.scalars["step"].to_pylist() == [6], "not only once step 11 is there"
    assert writer.close()
    rest = list(iter(lambda: tail.read(final=True), None))
    assert_everything(run, [*chunks, last, next_one, *rest])


@settings(max_examples=10)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), st.booleans()), min_size=1, max_size=4),
    chunk_rows=st.sampled_from([1, 7, 20_000]),
)
def test_any_attempts(tmp_path_factory: pytest.TempPathFactory, lengths: Any, chunk_rows: int) -> None:
    from statsbridge.mirror import tail as tail_module

    run = new_run(tmp_path_factory.mktemp("runs"))
    tail, chunks, first = Tail(run), [], 0
    for number, (steps, back, torn) in enumerate(lengths):
        writer = begin(run, first) if number else Writer(run)
        write(writer, *(step_work(step) for step in range(first, first + steps)))
        if torn:
            write(writer, {"stats": stats_rows(first + steps, 2)})
        chunks += list(iter(tail.read, None))
        assert writer.close(state="stopped")
        first = max(0, first + steps - back)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_module, "CHUNK_ROWS", chunk_rows)
        chunks += list(iter(lambda: tail.read(final=True), None))
    assert_everything(run, chunks)


def test_a_batch_says_of_which_attempt_it_is(resumed: Path) -> None:
    tail, selector = Tail(resumed), Selector(Selection())
    batches = [batch for chunk in iter(lambda: tail.read(final=True), None) for batch in selector.add(chunk)]
    losses = [(batch.attempt, point.step) for batch in batches for point in batch.points if point.series.name == "loss"]
    assert losses == [*[(0, step) for step in range(10)], *[(1, step) for step in range(6, 13)]]


def test_tensorboard_takes_it_for_a_restart(resumed: Path, tmp_path: Path) -> None:
    """Its page drops what the later attempt has superseded; the files have everything."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    deliver(resumed, f"tensorboard:{tmp_path / 'logs'}")
    (result,) = verify(resumed, "tensorboard")
    assert (result.proved, result.counts) == (True, {})
    assert result.same == result.compared
    assert result.superseded > 0
    (folder,) = (tmp_path / "logs" / "statsbridge").iterdir()
    assert not (folder / "late").exists()
    page = EventAccumulator(str(folder), tensor_size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in page.Tensors("loss")] == list(range(13))
    assert result.superseded == _superseded_points(resumed)


def _superseded_points(run: Path) -> int:
    tail, selector = Tail(run), Selector(Selection())
    batches = [batch for chunk in iter(lambda: tail.read(final=True), None) for batch in selector.add(chunk)]
    return sum(point.step >= 6 for batch in batches if batch.attempt == 0 for point in batch.points)


@pytest.mark.slow
def test_wandb_gets_a_run_for_each_attempt(resumed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's step cannot go back: in one run the repeated steps would all be refused."""
    monkeypatch.chdir(tmp_path)
    deliver(resumed, "wandb:offline")
    (result,) = verify(resumed, "wandb")
    assert (result.proved, result.counts) == (True, {})
    assert result.same == result.compared
    names = sorted(file.stem.removeprefix("run-") for file in tmp_path.rglob("*.wandb"))
    assert len(names) == 2
    assert names[1] == f"{names[0]}-attempt-1"


@pytest.mark.slow
def test_mlflow_keeps_both(resumed: Path, tmp_path: Path) -> None:
    deliver(resumed, f"mlflow:sqlite:///{tmp_path / 'mlflow.db'}")
    (result,) = verify(resumed, "mlflow")
    assert (result.proved, result.counts) == (True, {})
    assert result.same == result.compared
    assert result.superseded == _superseded_points(resumed)


@pytest.mark.slow
def test_aim_keeps_the_last(resumed: Path, tmp_path: Path) -> None:
    deliver(resumed, f"aim:{tmp_path / 'aim'}")
    (result,) = verify(resumed, "aim")
    assert result.proved
    assert result.counts == {"superseded": result.superseded}


def test_no_batch_is_of_two_attempts_though_steps_go_on(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, *(step_work(step) for step in range(3)))
    writer = begin(run, 3)
    write(writer, *(step_work(step, 1) for step in range(3, 6)))
    assert writer.close()
    data = load(run, attempts="all")
    tables = {table: getattr(data, table).drop_columns("rank") for table in SCHEMAS}
    batches = Selector(Selection()).add(Chunk(**tables, cursor=Cursor()))
    assert [(batch.attempt, batch.points[0].step, batch.points[-1].step) for batch in batches] == [(0, 0, 2), (1, 3, 5)]


def test_a_lost_part_that_was_delivered_costs_no_later_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is used again would be one that the mirror has behind it."""
    monkeypatch.syspath_prepend(str(install(tmp_path / "installed")))
    store = tmp_path / "store"
    run = new_run(tmp_path)
    write_run(run, *(step_work(step) for step in range(10)))
    deliver(run, f"lines:{store}")
    for table in ("modules", "stats", "scalars"):
        for part in sorted((run / table / "rank=0").iterdir())[5:]:
            part.unlink()
    writer = begin(run, 5)
    write(writer, *(step_work(step, 1) for step in range(5, 15)))
    assert writer.close()
    deliver(run, f"lines:{store}")
    values = {(step, value) for name, step, _, value in lines(store) if name == "loss"}
    assert {(step, repr(step / 7 + 1)) for step in range(5, 15)} <= values

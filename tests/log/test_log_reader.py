"""`load`: what it gives, what it says when something is not there, and that it only reads."""

import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from log_rows import FLOATS, new_run, scalar_rows, stats_rows, write_run, written
from scipy import stats as reference

from statsbridge import ConfigError, LogError, RunData, SchemaTooNew, StatsBridgeWarning
from statsbridge.log import SCHEMAS, Writer, load
from statsbridge.log.parts import list_parts


@pytest.fixture
def data(tmp_path: Path) -> RunData:
    works = [{"stats": stats_rows(step, rows=3), "scalars": scalar_rows(step, loss=step / 2)} for step in range(4)]
    two = stats_rows(9, 2, module="m0", site="parameter", tensor=["weight", "bias"])
    late = {"stats": stats_rows(9, 2, module="m1", call=[0, 1])}
    return written(tmp_path, *reversed(works), {"stats": two}, late)


def test_tables_have_the_columns_of_the_design_and_the_rank(data: RunData) -> None:
    for name, schema in SCHEMAS.items():
        table: pa.Table = getattr(data, name)
        assert table.column_names == [*schema.names, "rank"]
        for field in schema:
            assert table.schema.field(field.name).type == field.type
        assert table.schema.field("rank").type == pa.int64()
    assert data.events.num_rows == data.modules.num_rows == 0
    assert data.id == data.path.name == data.info["id"]


def test_rows_are_sorted_by_rank_and_seq(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for rank in (10, 2):
        write_run(run, *({"scalars": scalar_rows(step, loss=rank)} for step in range(12)), rank=rank)
    scalars = load(run).scalars
    assert scalars["rank"].to_pylist() == [2] * 12 + [10] * 12
    assert scalars["value"].to_pylist() == [2] * 12 + [10] * 12
    assert scalars["seq"].to_pylist() == [*range(12), *range(12)]


def test_a_loaded_run_does_not_change(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    writer = Writer(run)
    writer.submit(lambda: {"scalars": scalar_rows(0, loss=1)})
    writer.flush()
    data = load(run)
    writer.submit(lambda: {"scalars": scalar_rows(1, loss=1)})
    writer.close()
    assert data.scalars.num_rows == 1
    assert load(run).scalars.num_rows == 2


def test_reading_writes_nothing(data: RunData) -> None:
    def listing() -> list[tuple[str, int, int, int]]:
        found = sorted([data.path, *data.path.rglob("*")])
        return [
            (str(path), *(getattr(path.stat(), f"st_{what}") for what in ("mtime_ns", "size", "ino"))) for path in found
        ]

    before = listing()
    again = load(data.path)
    again.series("m0", "activation", "std")
    again.query("select * from stats, scalars")
    assert again.damaged == ()
    repr(again), again._repr_html_()
    assert listing() == before


def test_series_is_one_number_over_time(data: RunData) -> None:
    series = data.series("m1", "activation", "std")
    assert series.column_names == ["step", "value", "iteration", "time"]
    assert series["step"].to_pylist() == series["iteration"].to_pylist() == [0, 1, 2, 3, 9]
    assert series["value"].to_pylist()[:4] == [stats_rows(step, 3)["std"][1] for step in range(4)]
    assert series["time"].to_pylist()[1] == datetime.fromtimestamp(1.7e9 + 1, UTC)
    assert data.series("m1", "activation", "count")["value"].to_pylist() == [1000] * 5
    assert data.series("m0", "parameter", "l2", tensor="bias")["value"].to_pylist() == [stats_rows(9, 2)["l2"][1]]
    assert data.series("m1", "activation", "l2", call=1)["step"].to_pylist() == [9]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("m0", "activation", "sdt"), "no statistic 'sdt'; there are: 'std', "),
        (("m0", "activation", "module"), "no statistic 'module'"),
        (("M2", "activation", "std"), "no module 'M2'; there are: 'm"),
        (("m2", "parameter", "std"), "no site 'parameter' in module 'm2'; there are: 'activation'"),
        (("m0", "parameter", "std"), "give tensor=…: 'weight', 'bias'"),
    ],
)
def test_series_names_the_choices(data: RunData, arguments: tuple[str, str, str], words: str) -> None:
    with pytest.raises(LogError) as caught:
        data.series(*arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_series_of_a_tensor_or_call_that_is_not_there(data: RunData) -> None:
    with pytest.raises(LogError, match=r"no tensor 'Weight' in .*; there are: 'weight', 'bias'"):
        data.series("m0", "parameter", "std", tensor="Weight")
    with pytest.raises(LogError, match=r"no call 5 in .*; there are: '0', '1'"):
        data.series("m1", "activation", "std", call=5)


def test_query_is_sql_over_all_four_tables(data: RunData) -> None:
    result = data.query("""
        select s.step, s.value as loss, max(x.std) as widest, min(s.time) as at
        from scalars s join stats x using (step) group by all order by step
    """)
    assert result["step"].to_pylist() == [0, 1, 2, 3]
    assert result["loss"].to_pylist() == [0, 0.5, 1, 1.5]
    assert result["widest"].to_pylist() == [stats_rows(step, 3)["std"].max() for step in range(4)]
    assert result["at"].to_pylist()[0] == datetime.fromtimestamp(1.7e9, UTC)
    counts = data.query("select (select count(*) from MODULES) + (select count(*) from events) as n")
    assert counts["n"].to_pylist() == [0]
    names = data.query("select distinct module from stats where module > 'm0' order by module")
    assert names["module"].to_pylist() == ["m1", "m2"]


def test_a_query_that_is_wrong_says_how(data: RunData) -> None:
    with pytest.raises(ConfigError, match="stdd"):
        data.query("select stdd from stats")
    with pytest.raises(ConfigError, match="nothing_like_this"):
        data.query("select * from nothing_like_this")
    with pytest.raises(ConfigError, match="one SELECT"):
        data.query("-- nothing")


def test_query_without_duckdb_names_the_extra(data: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    with pytest.raises(ConfigError, match=r"statsbridge\[sql\]"):
        data.query("select 1")


def test_one_rank_is_merged_as_it_is(data: RunData) -> None:
    assert data.merged().equals(data.stats)
    assert data.merged()["kl_unit_gaussian"].null_count == 0


def statistics_of(values: np.ndarray) -> dict[str, float]:
    return {
        "count": len(values),
        "mean": values.mean(),
        "std": values.std(),
        "skewness": float(reference.skew(values)),
        "kurtosis": float(reference.kurtosis(values)),
        "min": values.min(),
        "max": values.max(),
        "abs_mean": np.abs(values).mean(),
        "l2": float(np.linalg.norm(values)),
        "zero_fraction": float((values == 0).mean()),
    }


def test_ranks_merge_as_if_measured_together(tmp_path: Path) -> None:
    """Three ranks of different sizes and means; parameters are equal; a module is on rank 2 only."""
    numbers = np.random.default_rng(0)
    samples = [numbers.gamma(2, 1 + rank, 500 * (rank + 1)) - rank for rank in range(3)]
    run = new_run(tmp_path)
    for rank, values in enumerate(samples):
        rows = {name: [number] * 2 for name, number in statistics_of(values).items()}
        both = stats_rows(
            5,
            2,
            **{**rows, "kl_unit_gaussian": 0.25, "update_ratio": 0.5},
            module="m",
            site=["activation", "parameter"],
            status=[None if rank == 0 else f"rank {rank}", None],
            histogram=np.array([[rank, 1], [7, 7]]),
        )
        alone = {"stats": stats_rows(5, 1, module="alone", histogram=np.array([[3, 4]]))} if rank == 2 else {}
        write_run(run, alone, {"stats": both}, rank=rank)

    data = load(run)
    assert data.stats.num_rows == 7
    merged = data.merged()
    assert merged.schema == data.stats.schema
    rows = {(row["module"], row["site"]): row for row in merged.to_pylist()}
    assert merged.num_rows == len(rows) == 3

    activation = rows["m", "activation"]
    for name, expected in statistics_of(np.concatenate(samples)).items():
        assert activation[name] == pytest.approx(expected, rel=1e-9), name
    assert activation["kl_unit_gaussian"] is None
    assert activation["histogram"] == [0 + 1 + 2, 3]
    assert (activation["status"], activation["rank"], activation["update_ratio"]) == ("rank 1", 0, 0.5)

    parameter = rows["m", "parameter"]
    for name, expected in statistics_of(samples[0]).items():
        assert parameter[name] == expected, name
    assert (parameter["kl_unit_gaussian"], parameter["histogram"], parameter["status"]) == (
        0.25,
        [7, 7],
        None,
    )

    alone = rows["alone", "activation"]
    assert (alone["rank"], alone["histogram"]) == (2, [3, 4])
    assert alone["kl_unit_gaussian"] == stats_rows(5, 1)["kl_unit_gaussian"][0]
    assert data.series("m", "activation", "count")["value"].to_pylist() == [sum(map(len, samples))]


def test_ranks_with_nothing_to_merge_and_without_histograms(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for rank in range(2):
        write_run(run, {"stats": stats_rows(rank, 2)}, {"stats": stats_rows(9, 2, site="update")}, rank=rank)
    data = load(run)
    assert data.merged()["step"].to_pylist() == [0, 0, 9, 9, 1, 1]
    run = new_run(tmp_path)
    for rank in range(2):
        write_run(run, {"stats": stats_rows(9, 2, std=1.0, **{"min": -9.0, "max": 9.0})}, rank=rank)
    merged = load(run).merged()
    assert merged["count"].to_pylist() == [2000, 2000]
    assert merged["histogram"].to_pylist() == [None, None]
    assert merged["std"].to_pylist() == pytest.approx([1.0, 1.0])


def test_the_summary_says_what_is_there(data: RunData) -> None:
    for text in (repr(data), data._repr_html_()):
        for words in (data.id, "activation, parameter", "stats 16, scalars 4", "sampled steps", "5"):
            assert words in text
    assert "<script>" not in data._repr_html_()


def test_the_summary_escapes_names_and_counts_severities(tmp_path: Path) -> None:
    run = new_run(tmp_path, name="<script>")
    write_run(run, {"events": {"kind": ["a", "b", "c"], "severity": ["info", "warning", "info"]}})
    data = load(run)
    assert "2 info, 1 warning" in repr(data)
    assert "&lt;script&gt;" in data._repr_html_()
    assert "<script>" not in data._repr_html_()


def test_load_of_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LogError, match="no run 'nothing'"):
        load("nothing")
    run = new_run(tmp_path / "statsbridge-runs", name="mine")
    assert load("latest").path == load("mine").path == load(Path("statsbridge-runs") / run.name).path == run
    with pytest.raises(LogError, match=run.name):
        load(tmp_path / "statsbridge-runs")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"schema_version": 3}, SchemaTooNew, "upgrade"),
        ({"schema_version": None}, LogError, "cannot be read"),
        ({"id": None}, LogError, "lacks id"),
    ],
)
def test_run_json_of_the_future_or_damaged(
    tmp_path: Path, change: dict[str, object], error: type[LogError], words: str
) -> None:
    run = new_run(tmp_path)
    file = run / "run.json"
    info = {**json.loads(file.read_text()), **change}
    file.write_text(json.dumps({name: value for name, value in info.items() if value is not None}))
    with pytest.raises(error, match=words):
        load(run)
    file.write_text("{")
    with pytest.raises(LogError, match=r"run\.json cannot be read"):
        load(run)


def test_damaged_names_every_table_without_reading_first(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, {"scalars": scalar_rows(0, a=math.inf), "stats": stats_rows(0)})
    for table in ("scalars", "stats"):
        [part] = list_parts(run, table)
        os.truncate(part.path, 100)
    data = load(run)
    with pytest.warns(StatsBridgeWarning):
        damaged = data.damaged
    assert [str(error).split("/")[0] for error in damaged] == ["stats", "scalars"]
    assert set(FLOATS) < set(data.stats.column_names)

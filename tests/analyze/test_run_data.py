"""`RunData.select` and what is built on it: the same rows as all of the table filtered, however the parts lie."""

from __future__ import annotations

import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from log_rows import new_run, scalar_rows, stats_rows, write_run

import statsbridge
from statsbridge.errors import ConfigError, StatsBridgeWarning
from statsbridge.log import reader
from statsbridge.log.compaction import compact_table
from statsbridge.log.parts import encode, list_parts, part_folder
from statsbridge.log.resume import next_attempt
from statsbridge.log.schema import to_table

GOLDEN = Path(__file__).parents[1] / "log" / "golden"

MODULES = ["", "blocks.0", "blocks.1", "blocks.10", "head[0]", "größe"]
SITES = ["activation", "parameter", "update"]
STEPS = range(0, 60, 2)


def work(step: int, modules: list[str] = MODULES) -> dict[str, dict[str, object]]:
    """Each module in each site; the last module is not there at every step."""
    names = [name for name in modules if name != "größe" or step % 4 == 0]
    rows = [(name, site) for name in names for site in SITES]
    count = len(rows)
    own = {
        "module": [name for name, _ in rows],
        "site": [site for _, site in rows],
        "tensor": ["weight" if site != "activation" else "" for _, site in rows],
        "order": np.array([modules.index(name) for name, _ in rows]),
        "depth": np.array([modules.index(name) for name, _ in rows]),
        "type": ["Linear" if name.startswith("blocks") else "Other" for name, _ in rows],
        "update_ratio": [0.001 * (step + 1) if site == "update" else None for _, site in rows],
    }
    return {"stats": stats_rows(step, count, **own), "scalars": scalar_rows(step, loss=1.0)}


def add_steps(run: Path, steps: range, *, rank: int = 0, attempt: int = 0) -> None:
    for step in steps:
        for table, columns in work(step).items():
            add_rows(run, table, columns, rank=rank, attempt=attempt)


def add_rows(run: Path, table: str, columns: dict[str, object], *, rank: int = 0, attempt: int = 0) -> None:
    """One more part, without the syncs of a writer."""
    first = max([part.last + 1 for part in list_parts(run, table) if part.rank == rank], default=0)
    name, data = encode(table, to_table(table, columns), first=first, attempt=attempt)
    folder = part_folder(run, table, rank)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same kind of rows as small parts, merged in part, of two ranks, and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    found = {name: new_run(folder) for name in ("small", "merged", "ranks", "resumed")}
    add_steps(found["small"], STEPS)
    for name in ("merged", "resumed"):
        add_steps(found[name], STEPS[:20])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("statsbridge.log.compaction.GROUP_ROWS", 16)
            patch.setattr("statsbridge.log.compaction.LEAST_GROUP_ROWS", 4)
            compact_table(found[name], "stats", 0, fan_in=2)
    add_steps(found["merged"], STEPS[20:])
    traced = work(0)["stats"]
    names = ("step", "module", "type", "call", "order", "depth")
    add_rows(found["merged"], "modules", {name: traced[name] for name in names})
    for rank in range(2):
        add_steps(found["ranks"], STEPS[:6], rank=rank)
    with next_attempt(found["resumed"], 12, config={}, information={}):
        add_steps(found["resumed"], range(12, 20), attempt=1)
    return found


@pytest.fixture(params=["small", "merged", "ranks", "resumed"])
def run(request: pytest.FixtureRequest, runs: dict[str, Path]) -> Path:
    return runs[request.param]


def as_if_large(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reader, "_SMALL", 0)
    patch.setattr("statsbridge.log.pruning._PRUNED", 32)
    patch.setattr("statsbridge.log.pruning._AT_ONCE", 3)


def filtered(rows: pa.Table, modules: str, sites: str, steps: tuple[int | None, int | None]) -> pa.Table:
    """The same by a filter over all rows, one by one."""
    first, last = steps
    keep = [
        (fnmatchcase(row["module"], modules) or row["module"] == modules)
        and fnmatchcase(row["site"], sites)
        and (first is None or row["step"] >= first)
        and (last is None or row["step"] <= last)
        for row in rows.select(["module", "site", "step"]).to_pylist()
    ]
    return rows.filter(pa.array(keep, pa.bool_()))


CHOICES: list[tuple[str, str, tuple[int | None, int | None]]] = [
    ("*", "*", (None, None)),
    ("*", "activation", (None, None)),
    ("", "*", (2, 2)),
    ("blocks.*", "[pu]*", (5, 11)),
    ("blocks.1", "*", (None, None)),
    ("*.1*", "update", (12, None)),
    ("head[0]", "*ate", (None, 18)),
    ("größe", "*", (None, None)),
    ("b*0", "parameter", (-3, 70)),
]


@pytest.mark.parametrize("name", ["small", "merged", "ranks", "resumed"])
def test_select_is_a_filter_over_all_rows(runs: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = statsbridge.load(runs[name])
    everything = whole.merged()
    assert everything.num_rows > 90
    as_if_large(monkeypatch)
    pruned = statsbridge.load(runs[name])
    for modules, sites, steps in CHOICES:
        expected = filtered(everything, modules, sites, steps)
        for data in (whole, pruned):
            found = data.select(modules=modules, sites=sites, steps=steps)
            assert found.to_pylist() == expected.to_pylist(), (modules, sites, steps)
    assert "stats" not in pruned.__dict__, "it was read whole"


def test_select_gives_the_columns_asked_for_in_their_order(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = statsbridge.load(run).merged().select(["std", "rank", "step", "status"])
    assert statsbridge.load(run).select(columns=["std", "rank", "step", "status"]).equals(expected)
    as_if_large(monkeypatch)
    found = statsbridge.load(run).select(columns=["std", "rank", "step", "status"])
    assert found.to_pylist() == expected.to_pylist()


def test_select_reads_no_more_than_asked_for(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_large(monkeypatch)
    read: list[tuple[int, list[str]]] = []
    real = statsbridge.log.pruning.pq.ParquetFile.read_row_groups

    def counting(self: object, groups: list[int], columns: list[str]) -> pa.Table:
        read.append((len(groups), columns))
        return real(self, groups, columns)

    monkeypatch.setattr("statsbridge.log.pruning.pq.ParquetFile.read_row_groups", counting)
    (wide, *_) = sorted(list_parts(runs["merged"], "stats"), key=lambda part: -part.rows)
    groups = pa.parquet.ParquetFile(wide.path).num_row_groups
    assert groups > 15
    found = statsbridge.load(runs["merged"]).select(modules="blocks.10", columns=["step", "l2"])
    assert found.num_rows == len(STEPS) * len(SITES)
    assert sum(count for count, columns in read if "module" in columns) < groups / 2
    assert {name for _, columns in read for name in columns} <= {"module", "seq", "attempt", "step", "shards", "l2"}
    read.clear()
    found = statsbridge.load(runs["merged"]).select(sites="activation", columns=["step", "l2"])
    assert len(found) > 0
    assert sum(count for count, columns in read if "site" in columns) == groups / len(SITES)


def test_what_a_large_file_says_of_itself_is_read_once(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_large(monkeypatch)
    pruning = statsbridge.log.pruning
    pruning._footer_of.cache_clear()
    read: list[Path] = []
    real = pruning.open_parquet

    def noting(path: Path, **options: object) -> pa.parquet.ParquetFile:
        if "metadata" not in options:
            read.append(path)
        return real(path, **options)

    monkeypatch.setattr(pruning, "open_parquet", noting)
    large = [part.path for part in list_parts(runs["merged"], "stats") if not pruning.is_small(part)]
    assert large
    data = statsbridge.load(runs["merged"])
    for module in ("blocks.10", "blocks.1"):
        assert data.select(modules=module, columns=["step", "l2"]).num_rows == len(STEPS) * len(SITES)
    statsbridge.load(runs["merged"]).select(modules="blocks.10", columns=["step", "l2"])
    assert sorted(read) == sorted(large)


@pytest.mark.parametrize("large", [False, True])
def test_what_is_not_there_is_named(run: Path, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        as_if_large(monkeypatch)
    data = statsbridge.load(run)
    with pytest.raises(ConfigError, match=r"unknown module blocks\.2: did you mean blocks"):
        data.select(modules="blocks.2")
    with pytest.raises(ConfigError, match="unknown site activations: did you mean activation"):
        data.matrix("activations", "std")
    with pytest.raises(ConfigError, match="unknown statistic stdev: did you mean std"):
        data.depth_profile("activation", "stdev")
    with pytest.raises(ConfigError, match="update_ratio belongs to site update"):
        data.by_type("activation", "update_ratio")
    with pytest.raises(ConfigError, match=r"unknown step 3 \(not sampled\): Choices: 2, 4, 0"):
        data.depth_profile("activation", "std", step=3)
    with pytest.raises(ConfigError, match=r"unknown step 3 \(not sampled\): Choices: 2, 4, 0"):
        data.by_type("activation", "std", step=3)
    with pytest.raises(ConfigError, match="unknown column loss"):
        data.select(columns=["loss"])
    with pytest.raises(ConfigError, match="modules="):
        data.select(modules=[])
    assert data.select(steps=(1000, None)).num_rows == 0, "nothing was recorded there, and nothing is wrong with it"


def test_a_run_without_statistics_says_so(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, {"scalars": scalar_rows(0, loss=1.0)})
    data = statsbridge.load(run)
    assert data.sites == ()
    assert data.select(modules="conv").num_rows == 0
    with pytest.raises(ConfigError, match="no statistics of site activation"):
        data.depth_profile("activation", "std")
    with pytest.raises(ConfigError, match="no statistics of site parameter_grad"):
        data.gradient_flow()


def test_the_last_step_and_the_sites(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = statsbridge.load(run).stats
    for large in (False, True):
        if large:
            as_if_large(monkeypatch)
        data = statsbridge.load(run)
        assert data._last_step(["update"]) == pc.max(rows["step"]).as_py()
        assert data._last_step(["parameter_grad"]) is None
        assert data.sites == tuple(SITES)


@pytest.mark.parametrize("site", SITES)
def test_profiles_are_the_same_however_they_are_read(run: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = statsbridge.load(run)
    expected = [whole.depth_profile(site, "std", modules="b*"), whole.by_type(site, "abs_max", step=4)]
    as_if_large(monkeypatch)
    pruned = statsbridge.load(run)
    found = [pruned.depth_profile(site, "std", modules="b*"), pruned.by_type(site, "abs_max", step=4)]
    assert [table.to_pylist() for table in found] == [table.to_pylist() for table in expected]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("at_once", [1, 40])
def test_a_matrix_is_the_same_in_pieces(run: Path, site: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one module, or of a few, at a time: in the order of the data flow, with every value and gap."""
    whole = statsbridge.load(run).matrices(site, ["std", "abs_max"])
    as_if_large(monkeypatch)
    monkeypatch.setattr("statsbridge.analyze.run_data._ROWS_AT_ONCE", at_once)
    data = statsbridge.load(run)
    pieces = list(data._in_groups(site))
    assert len(set(data.stats["rank"].to_pylist())) > 1 or len(pieces) > 1
    for one, other in zip(statsbridge.load(run).matrices(site, ["std", "abs_max"]), whole, strict=True):
        assert one.rows.to_pylist() == other.rows.to_pylist()
        np.testing.assert_array_equal(one.steps, other.steps)
        np.testing.assert_array_equal(one.values, other.values)
        np.testing.assert_array_equal(one.nonfinite, other.nonfinite)


def test_all_attempts_on_demand_the_last_one_counts(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = statsbridge.load(runs["resumed"], attempts="all").stats
    for large in (False, True):
        if large:
            as_if_large(monkeypatch)
        data = statsbridge.load(runs["resumed"], attempts="all")
        assert (
            data.select(modules="blocks.0").num_rows
            == pc.sum(pc.equal(rows["module"].cast("string"), "blocks.0")).as_py()
        )
        found = data.matrix("update", "update_ratio", modules="blocks.0")
        # Steps 12 to 18 are there twice, and beyond them those of the first attempt go on.
        assert found.steps.tolist() == sorted(set(rows["step"].to_pylist()))
        np.testing.assert_array_equal(found.values[0], 0.001 * (found.steps + 1))


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.glob("v*") if path.is_dir()))
def test_runs_of_earlier_versions_have_profiles_too(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = statsbridge.load(GOLDEN / version)
    expected = whole.depth_profile("parameter", "l2").to_pylist()
    assert [row["module"] for row in expected] == ["", "blocks.0", "größe"], "the last one has no depth"
    rows = whole.select(modules="blocks.*", columns=["step", "l2", "histogram", "shards"]).to_pylist()
    as_if_large(monkeypatch)
    pruned = statsbridge.load(GOLDEN / version)
    # Made by hand, this run says of a module that was not called in which order it was.
    without = [{name: value for name, value in row.items() if name != "order"} for row in expected]
    assert pruned.depth_profile("parameter", "l2").drop_columns("order").to_pylist() == without
    assert pruned.select(modules="blocks.*", columns=["step", "l2", "histogram", "shards"]).to_pylist() == rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    # Two shards of each: the norm of the whole is that of both together.
    shards = [row for row in whole.stats.to_pylist() if row["module"] == "blocks.0" and row["step"] == 3]
    assert rows[-1]["l2"] == pytest.approx(np.hypot(*(row["l2"] for row in shards)))


def test_tables_go_to_pandas_and_polars(run: Path) -> None:
    profile = statsbridge.load(run).depth_profile("activation", "std")
    polars = pytest.importorskip("polars")
    assert polars.from_arrow(profile)["value"].to_list() == profile["value"].to_pylist()
    rows = statsbridge.load(run).select(modules="blocks.0")
    assert polars.from_arrow(rows)["module"].unique().to_list() == ["blocks.0"]
    pytest.importorskip("pandas")
    assert profile.to_pandas()["module"].tolist() == profile["module"].to_pylist()


def test_a_glance_at_a_large_run_reads_little(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = repr(statsbridge.load(run))
    as_if_large(monkeypatch)
    data = statsbridge.load(run)
    assert repr(data) == expected
    assert "stats" not in data.__dict__


def test_a_damaged_part_is_named_once_and_left_out(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(runs["merged"], tmp_path / "copy"))
    part = list_parts(copy, "stats")[-1]
    part.path.write_bytes(part.path.read_bytes()[:-9])
    as_if_large(monkeypatch)
    data = statsbridge.load(copy)
    with pytest.warns(StatsBridgeWarning, match=part.path.name) as said:
        rows = data.select(columns=["step"])
        assert data.depth_profile("activation", "std").num_rows == len(MODULES)
        data.by_type("activation", "std")
    assert len(said) == 1
    assert pc.max(rows["step"]).as_py() == STEPS[-2]


def test_parts_that_are_merged_after_loading_are_read_where_they_are(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(runs["small"], tmp_path / "copy"))
    as_if_large(monkeypatch)
    expected = statsbridge.load(copy).select(modules="blocks.1").to_pylist()
    data = statsbridge.load(copy)
    compact_table(copy, "stats", 0, fan_in=2)
    assert data.select(modules="blocks.1").to_pylist() == expected
    assert data._last_step() == STEPS[-1]


def test_several_runs_are_one_table_each_with_the_run(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [statsbridge.load(runs[name]) for name in ("small", "resumed")]
    sql = "SELECT run, max(step) AS last, count(*) AS rows FROM stats GROUP BY run ORDER BY rows DESC"
    answer = reader.query(found, sql).to_pylist()
    assert answer == [
        {"run": data.id, "last": pc.max(data.stats["step"]).as_py(), "rows": data.stats.num_rows} for data in found
    ]
    monkeypatch.setattr(reader, "_IN_MEMORY", 0)
    files = [statsbridge.load(runs[name]) for name in ("small", "resumed")]
    assert reader.query(files, sql).to_pylist() == answer
    assert all("stats" not in data.__dict__ for data in files)


@pytest.mark.parametrize(
    "sql",
    [
        "COPY (SELECT 1) TO '{file}'",
        "SELECT * FROM read_csv('{secret}')",
        "SELECT * FROM read_text('{secret}')",
        "SELECT count(*) FROM stats; SELECT 1",
        "ATTACH '{file}'",
        "SET threads = 1",
        "INSTALL httpfs",
        "DROP VIEW stats",
    ],
)
def test_a_query_reaches_nothing_but_the_run(
    runs: dict[str, Path], tmp_path: Path, sql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    monkeypatch.setattr(reader, "_IN_MEMORY", 0)
    with pytest.raises(ConfigError):
        statsbridge.load(runs["small"]).query(sql.format(file=tmp_path / "written", secret=secret))
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]


def test_a_pivot_and_an_explanation_are_selects_too(runs: dict[str, Path]) -> None:
    data = statsbridge.load(runs["small"])
    assert data.query("PIVOT stats ON site USING count(*) GROUP BY module").num_rows == len(MODULES)
    assert data.query("EXPLAIN SELECT * FROM stats").num_rows > 0


def test_the_ratio_of_an_update_that_is_cut_is_of_the_whole_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path)
    for rank in range(2):
        norms = {"l2": [3.0 + rank, 0.3 + rank], "update_ratio": [None, 9.0]}
        share = {"shard": rank, "shards": 2, "site": ["parameter", "update"], "module": "m", "tensor": "weight"}
        add_rows(run, "stats", stats_rows(0, 2, **norms, **share), rank=rank)
    as_if_large(monkeypatch)
    (row,) = statsbridge.load(run).select(sites="update", columns=["l2", "update_ratio"]).to_pylist()
    assert row["l2"] == pytest.approx(np.hypot(0.3, 1.3))
    assert row["update_ratio"] == pytest.approx(np.hypot(0.3, 1.3) / np.hypot(3, 4))
    assert statsbridge.load(run).sites == ("parameter", "update")

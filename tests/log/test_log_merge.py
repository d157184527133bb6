"""Rows of several ranks: shards make a whole, copies count once, and a part of a thing is no number of it."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.stats as reference
from log_rows import new_run, scalar_rows, stats_rows, write_run

from statsbridge.errors import LogError
from statsbridge.log import RunData, load
from statsbridge.log.parts import part_name

NAN = math.nan


def statistics_of(values: np.ndarray) -> dict[str, Any]:
    known = len(values) > 0
    return {
        "count": len(values),
        "mean": values.mean() if known else NAN,
        "std": values.std() if known else NAN,
        "skewness": float(reference.skew(values)) if known else NAN,
        "kurtosis": float(reference.kurtosis(values)) if known else NAN,
        "min": values.min() if known else NAN,
        "max": values.max() if known else NAN,
        "abs_mean": np.abs(values).mean() if known else NAN,
        "l2": float(np.linalg.norm(values)) if known else NAN,
        "zero_fraction": float((values == 0).mean()) if known else NAN,
    }


def tensor_row(values: np.ndarray, site: str = "parameter", **columns: Any) -> dict[str, Any]:
    """One row of one tensor's statistics."""
    numbers = {name: [number] for name, number in statistics_of(values).items()}
    status = [None if len(values) else "empty"]
    histogram = [[len(values), 7] if len(values) else None]
    told = {"kl_unit_gaussian": 0.25 if len(values) else NAN, "update_ratio": NAN, "status": status}
    return {"stats": stats_rows(0, 1, **{**numbers, **told, "histogram": histogram, "site": site, **columns})}


def recorded(folder: Path, *ranks: list[dict[str, Any]]) -> RunData:
    run = new_run(folder)
    for rank, works in enumerate(ranks):
        write_run(run, *works, rank=rank)
    return load(run)


def the_row(data: RunData, **wanted: Any) -> dict[str, Any]:
    (found,) = [r for r in data.merged().to_pylist() if all(r[name] == value for name, value in wanted.items())]
    return found


PIECES = [np.random.default_rng(n).gamma(2, 1 + n, 40 * (3 - n)) - 1 for n in range(3)] + [np.zeros(0)]
WHOLE = np.concatenate(PIECES)


def test_shards_make_the_whole_tensor(tmp_path: Path) -> None:
    """Four shards, one empty; ranks 4 to 7 hold the same ones again."""
    ranks = []
    for rank in range(8):
        values, share = PIECES[rank % 4], {"shard": rank % 4, "shards": 4}
        ranks.append([tensor_row(values, **share), tensor_row(values / 8 + 0.25, "update", update_ratio=9.0, **share)])
    data = recorded(tmp_path, *ranks)
    merged = data.merged()
    assert merged.schema == data.stats.schema
    assert merged.num_rows == 2
    for site, values in (("parameter", WHOLE), ("update", WHOLE / 8 + 0.25)):
        row = the_row(data, site=site)
        for name, expected in statistics_of(values).items():
            assert row[name] == pytest.approx(expected, rel=1e-9), name
        assert (row["status"], row["kl_unit_gaussian"], row["shard"], row["shards"]) == (None, None, 0, 1)
        assert row["histogram"] == [len(WHOLE), 7 * 3]
    assert the_row(data, site="parameter")["update_ratio"] is None
    ratio = np.linalg.norm(WHOLE / 8 + 0.25) / np.linalg.norm(WHOLE)
    assert the_row(data, site="update")["update_ratio"] == pytest.approx(ratio)
    series = data.series("m0", "update", "update_ratio")
    assert series["value"].to_pylist() == [pytest.approx(ratio)]


def test_the_copies_of_a_dead_rank_are_elsewhere(tmp_path: Path) -> None:
    """Of shards 0 and 1 each held by two ranks, the ranks 0 and 3 have recorded nothing."""
    shards = [1, 0]
    run = new_run(tmp_path)
    for rank, shard in zip((1, 2), shards, strict=True):
        write_run(run, tensor_row(PIECES[shard], shard=shard, shards=2), rank=rank)
    row = the_row(load(run))
    assert row["l2"] == pytest.approx(np.linalg.norm(np.concatenate(PIECES[:2])))
    assert row["status"] is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_of_a_tensor_is_no_number_of_it(ranks: int, tmp_path: Path) -> None:
    works = [[tensor_row(PIECES[n], shard=n, shards=3), tensor_row(PIECES[n], "activation")] for n in range(ranks)]
    data = recorded(tmp_path, *works)
    row = the_row(data, site="parameter")
    assert (row["status"], row["count"]) == ("shards_missing", 0)
    assert {row[name] for name in ("mean", "std", "l2", "min", "kl_unit_gaussian")} == {None}
    assert row["histogram"] is None
    row = the_row(data, site="activation")
    assert row["mean"] == pytest.approx(np.concatenate(PIECES[:ranks]).mean())


def test_a_shard_that_could_not_be_measured_spoils_the_whole(tmp_path: Path) -> None:
    failed = tensor_row(PIECES[3], status="internal_error", shard=1, shards=2)
    row = the_row(recorded(tmp_path, [tensor_row(PIECES[0], shard=0, shards=2)], [failed]))
    assert (row["status"], row["count"], row["mean"], row["histogram"]) == ("internal_error", 0, None, None)


def test_a_process_outside_of_the_mesh_has_no_shard(tmp_path: Path) -> None:
    works = [[tensor_row(PIECES[3], shard=-1, shards=1)], *([tensor_row(PIECES[n], shard=n, shards=2)] for n in (0, 1))]
    row = the_row(recorded(tmp_path, *works))
    assert (row["status"], row["count"], row["rank"]) == (None, len(PIECES[0]) + len(PIECES[1]), 1)


@pytest.mark.parametrize("site", ["parameter", "parameter_grad", "update", "optimizer_state"])
def test_copies_count_once_and_must_be_copies(site: str, tmp_path: Path) -> None:
    share = {"shard": 0, "shards": 1}
    rounding = tensor_row(PIECES[0], site, module="rounded", mean=0.5, **share)
    data = recorded(
        tmp_path,
        [tensor_row(PIECES[0], site, module=name, **share) for name in ("same", "rounded", "drifted", "counted")],
        [
            tensor_row(PIECES[0], site, module="same", **share),
            rounding,
            tensor_row(PIECES[0] * 1.001, site, module="drifted", **share),
            tensor_row(PIECES[0], site, module="counted", nan_count=1, **share),
        ],
    )
    for name in ("same", "rounded"):
        row = the_row(data, module=name)
        assert (row["status"], row["mean"], row["kl_unit_gaussian"]) == (None, PIECES[0].mean(), 0.25)
    for name in ("drifted", "counted"):
        row = the_row(data, module=name)
        assert (row["status"], row["count"], row["mean"], row["l2"]) == ("copies_differ", 0, None, None)


def test_what_was_empty_on_some_ranks_only_has_no_status(tmp_path: Path) -> None:
    """An empty batch, and elements that another rank counts."""
    for number, (status, expected) in enumerate([("empty", None), ("replicated", None), ("no_grad", "no_grad")]):
        silent = tensor_row(PIECES[3], "activation", status=status)
        data = recorded(tmp_path / str(number), [silent], [tensor_row(PIECES[0], "activation")])
        row = the_row(data)
        assert (row["status"], row["count"], row["rank"]) == (expected, 120, 0)
        assert row["mean"] == pytest.approx(PIECES[0].mean())
    data = recorded(tmp_path / "all", [tensor_row(PIECES[3])], [tensor_row(PIECES[3])])
    assert (the_row(data)["status"], the_row(data)["histogram"]) == ("empty", None)


def test_a_run_from_before_shares_were_recorded(tmp_path: Path) -> None:
    """Schema version 1 knew no shares: every rank held whole parameters."""
    run = new_run(tmp_path)
    for rank in range(2):
        write_run(run, tensor_row(PIECES[rank]), tensor_row(PIECES[rank], "activation"), rank=rank)
    for file in list(run.glob("stats/rank=*/*.parquet")):
        table = pq.read_table(file).drop_columns(["shard", "shards"])
        file.unlink()
        pq.write_table(table.replace_schema_metadata({"statsbridge.schema_version": "1"}), file)
        first, last = (int(text) for text in file.name.split(".")[0].split("-"))
        file.rename(file.with_name(part_name(first, last, _checksum(file))))
    data = load(run)
    assert data.stats["shards"].null_count == 4
    assert the_row(data, site="parameter")["mean"] == PIECES[0].mean()
    assert the_row(data, site="activation")["count"] == len(PIECES[0]) + len(PIECES[1])


def _checksum(file: Path) -> int:
    return zlib.crc32(file.read_bytes())


# ---------------------------------------------------------------------- scalars


def norms(shard: int, shards: int, **values: float) -> dict[str, Any]:
    return {"scalars": {**scalar_rows(0, **values), "shard": shard, "shards": shards}}


def merged_scalars(data: RunData) -> list[tuple[str, int, float]]:
    return [(r["name"], r["rank"], r["value"]) for r in data.merged("scalars").to_pylist()]


def test_shares_of_norms_make_the_norms_of_the_whole(tmp_path: Path) -> None:
    shares = [{"shard/grad_norm_applied": 3e200, "shard/update_norm": 0.3, "shard/param_norm_before": 3.0},
              {"shard/grad_norm_applied": 4e200, "shard/update_norm": 0.4, "shard/param_norm_before": 4.0}]  # fmt: skip
    own = [{"scalars": scalar_rows(0, loss=1.0 + rank)} for rank in range(2)]
    data = recorded(tmp_path, *([own[n], norms(n, 2, **shares[n])] for n in range(2)))
    assert merged_scalars(data) == [
        ("loss", 0, 1.0),
        ("grad_norm_applied", 0, pytest.approx(5e200)),
        ("update_ratio", 0, pytest.approx(0.1)),
        ("loss", 1, 2.0),
    ]
    table = data.merged("scalars")
    assert table.schema == data.scalars.schema
    assert table["shards"].to_pylist() == [None, 1, 1, None]


def test_values_that_are_no_numbers_stay_so(tmp_path: Path) -> None:
    names = ("shard/grad_norm_applied", "shard/param_norm")
    data = recorded(
        tmp_path,
        [norms(0, 2, **dict(zip(names, (NAN, math.inf), strict=True)))],
        [norms(1, 2, **dict(zip(names, (math.inf, 1.0), strict=True)))],
    )
    (applied, _, nothing), (norm, _, infinite) = merged_scalars(data)
    assert (applied, norm) == ("grad_norm_applied", "param_norm")
    assert math.isnan(nothing)
    assert infinite == math.inf


def test_an_update_of_parameters_that_are_all_zero_has_no_ratio(tmp_path: Path) -> None:
    values = {"shard/update_norm": 1.0, "shard/param_norm_before": 0.0, "shard/param_norm": 1.0}
    data = recorded(tmp_path, *([norms(n, 2, **values)] for n in range(2)))
    assert [name for name, _, _ in merged_scalars(data)] == ["param_norm"]


def test_shares_of_which_some_are_missing_keep_their_names(tmp_path: Path) -> None:
    values = {"shard/param_norm": 1.0, "shard/update_norm": 1.0, "shard/param_norm_before": 2.0}
    data = recorded(tmp_path, [norms(0, 3, **values)], [norms(1, 3, **values)])
    assert merged_scalars(data) == [(name, rank, value) for rank in range(2) for name, value in values.items()]


def test_what_all_ranks_know_is_there_once_where_they_agree(tmp_path: Path) -> None:
    first = {"grad_norm": 2.0, "param_norm": NAN, "update_ratio": 0.5}
    second = {"grad_norm": 2.0 + 1e-9, "param_norm": NAN, "update_ratio": 0.6}
    data = recorded(tmp_path, [norms(0, 1, **first)], [norms(0, 1, **second)])
    assert [row[:2] for row in merged_scalars(data)] == [
        ("grad_norm", 0), ("param_norm", 0), ("update_ratio", 0), ("update_ratio", 1)]  # fmt: skip


def test_only_these_two_tables_have_ranks_to_merge(tmp_path: Path) -> None:
    data = recorded(tmp_path, [{"scalars": scalar_rows(0, loss=1.0)}])
    assert data.merged("scalars") is data.scalars
    with pytest.raises(LogError, match=r"'events'.*'stats' or 'scalars'"):
        data.merged("events")

"""Profiles of a real training against the same numbers taken from the table row by row, and by torch."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from log_rows import new_run, stats_rows, write_run
from recording import Small
from torch import nn

import statsbridge
from statsbridge.analyze.merging import merge_over
from statsbridge.analyze.profiles import STATISTICS
from statsbridge.errors import ConfigError

STEPS = (0, 2, 4, 6)


class Reused(nn.Module):
    """A layer that is called twice, in a model whose order is not that of its definition."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 3)
        self.shared = nn.Linear(16, 16)
        self.small = Small()
        self.widen = nn.Linear(3, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.widen(self.small(x)).relu()
        result: torch.Tensor = self.head(self.shared(self.shared(hidden).relu()).relu())
        return result


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[statsbridge.RunData, dict[str, list[torch.Tensor]]]:
    """The record, and the gradients and parameters at each sampled step as torch had them."""
    torch.manual_seed(0)
    model = Reused()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, list[torch.Tensor]] = {}
    with statsbridge.init(model, dir=tmp_path_factory.mktemp("run"), every=2) as run:
        for step in range(8):
            loss = model(torch.randn(32, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.step()
            if step in STEPS:
                for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
                    assert parameter.grad is not None
                    values = (parameter.grad.clone(), old, parameter.detach() - old)
                    seen.setdefault(name, []).append(torch.tensor([value.double().norm() for value in values]))
            run.step(loss=loss)
    return statsbridge.load(run.path), seen


def rows(data: statsbridge.RunData, **wanted: object) -> list[dict[str, Any]]:
    return [row for row in data.stats.to_pylist() if all(row[name] == value for name, value in wanted.items())]


def test_a_depth_profile_is_the_rows_of_a_step_in_data_flow_order(recorded: Any) -> None:
    data, _ = recorded
    profile = data.depth_profile("activation", "std", step=4)
    assert profile.column_names == [
        "position", "module", "call", "tensor", "type", "depth", "order", "step", "value", "low", "high",
    ]  # fmt: skip
    listed = profile.to_pylist()
    expected = sorted(rows(data, site="activation", step=4), key=lambda row: (row["depth"], row["order"], row["call"]))
    for name in ("module", "call", "tensor", "type", "depth", "order"):
        assert [row[name] for row in listed] == [row[name] for row in expected]
    assert [row["position"] for row in listed] == list(range(len(expected)))
    assert [row["value"] for row in listed] == [row["std"] for row in expected]
    assert [row["step"] for row in listed] == [4] * len(expected)
    for row in listed:
        over = [one["std"] for one in rows(data, site="activation", module=row["module"], call=row["call"])]
        assert (row["low"], row["high"]) == (min(over), max(over))
    names = [(row["module"], row["call"]) for row in listed if row["module"]]
    assert names.index(("small.first", 0)) < names.index(("widen", 0)) < names.index(("shared", 0))
    assert names.index(("shared", 0)) < names.index(("shared", 1)) < names.index(("head", 0))


def test_no_step_is_the_last_one_and_a_glob_chooses_modules(recorded: Any) -> None:
    data, _ = recorded
    profile = data.depth_profile("parameter", "l2", modules="small.*")
    assert set(profile["module"].to_pylist()) == {"small.first", "small.second"}
    assert set(profile["step"].to_pylist()) == {STEPS[-1]}
    assert profile["position"].to_pylist() == [0, 1, 2, 3]
    assert data.depth_profile("parameter", "l2", modules=["head", "widen"]).num_rows == 4


def test_a_type_is_the_median_of_its_members(recorded: Any) -> None:
    data, _ = recorded
    found = {row["type"]: row for row in data.by_type("activation", "abs_max", step=2).to_pylist()}
    assert next(iter(found)) == "Linear"
    for name, row in found.items():
        values = [max(abs(one["min"]), abs(one["max"])) for one in rows(data, site="activation", step=2, type=name)]
        assert row["members"] == len(values)
        assert row["value"] == pytest.approx(statistics.median(values), rel=1e-15)
        assert (row["low"], row["high"]) == (min(values), max(values))


def test_gradient_flow_is_what_torch_computed(recorded: Any) -> None:
    data, seen = recorded
    flow = data.gradient_flow(step=4)
    assert flow.column_names == [
        "position", "module", "call", "type", "tensor", "depth", "gradient_norm", "parameter_norm", "update_norm",
        "gradient_to_parameter", "update_to_parameter",
    ]  # fmt: skip
    listed = flow.to_pylist()
    assert {f"{row['module']}.{row['tensor']}" for row in listed} == set(seen)
    for row in listed:
        gradient, parameter, update = seen[f"{row['module']}.{row['tensor']}"][STEPS.index(4)].tolist()
        assert row["gradient_norm"] == pytest.approx(gradient, rel=1e-5)
        assert row["parameter_norm"] == pytest.approx(parameter, rel=1e-5)
        assert row["update_norm"] == pytest.approx(update, rel=1e-4)
        assert row["gradient_to_parameter"] == pytest.approx(gradient / parameter, rel=1e-5)
        assert row["update_to_parameter"] == pytest.approx(update / parameter, rel=1e-4)
    assert [row["depth"] for row in listed] == sorted(row["depth"] for row in listed)
    assert data.gradient_flow().equals(data.gradient_flow(step=STEPS[-1]))


def test_a_matrix_has_every_value_in_its_place(recorded: Any) -> None:
    data, _ = recorded
    found = data.matrix("update", "update_ratio")
    assert found.steps.tolist() == list(STEPS)
    assert found.values.shape == (found.rows.num_rows, len(STEPS))
    assert not found.nonfinite.any()
    for place, row in enumerate(found.rows.to_pylist()):
        for column, step in enumerate(STEPS):
            (one,) = rows(data, site="update", step=step, module=row["module"], tensor=row["tensor"])
            assert found.values[place, column] == one["update_ratio"]
    assert data.matrix("update", "update_ratio") is found, "asked for again it is not computed again"


def gaps(folder: Path) -> statsbridge.RunData:
    """m1 is not there at step 1, m2 has a NaN at step 1 and nothing at 2, m3 was never traced, m4 has no number."""
    works = []
    for step in range(3):
        keep = [0, 2, 3, 4] if step == 1 else [0, 1, 2, 3, 4]
        depths = [2, 1, 1, None, 3]
        orders = [1, 2, 0, None, 3]
        values = [1.0 + step, 2.0 + step, None if step == 2 else 3.0 + step, 4.0 + step, None]
        chosen = {
            "module": [f"m{place}" for place in keep],
            "depth": [depths[place] for place in keep],
            "order": [orders[place] for place in keep],
            "std": [values[place] for place in keep],
            "type": [["A", "B", "B", "C", "D"][place] for place in keep],
            "nan_count": [int(step == 1 and place == 2) for place in keep],
        }
        base = {name: value[: len(keep)] if hasattr(value, "__len__") and not isinstance(value, str) else value
                for name, value in stats_rows(step, 5).items()}  # fmt: skip
        works.append({"stats": {**base, **chosen}})
    run = new_run(folder)
    write_run(run, *works)
    return statsbridge.load(run)


def test_what_is_missing_is_null_and_what_was_never_traced_comes_last(tmp_path: Path) -> None:
    data = gaps(tmp_path)
    profile = data.depth_profile("activation", "std", step=1)
    assert profile["module"].to_pylist() == ["m2", "m1", "m0", "m4", "m3"]
    assert profile["value"].to_pylist() == [4.0, None, 2.0, None, 5.0]
    assert profile["low"].to_pylist() == [3.0, 2.0, 1.0, None, 4.0]
    assert profile["high"].to_pylist() == [4.0, 4.0, 3.0, None, 6.0]
    found = data.matrix("activation", "std")
    assert np.isnan(found.values).tolist() == [
        [False, False, True],
        [False, True, False],
        [False, False, False],
        [True, True, True],
        [False, False, False],
    ]
    assert np.argwhere(found.nonfinite).tolist() == [[0, 1]]
    types = data.by_type("activation", "std", step=2).to_pylist()
    assert [(row["type"], row["members"], row["value"]) for row in types] == [
        ("B", 1, 4.0),
        ("A", 1, 3.0),
        ("D", 0, None),
        ("C", 1, 6.0),
    ]


def test_gradient_flow_of_what_was_not_measured_is_null(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    sites = ["parameter_grad", "parameter_grad", "parameter", "parameter", "update"]
    names = ["a", "b", "a", "b", "b"]
    sizes = [3.0, 4.0, 0.0, 2.0, 1.0]
    ratios = [None, None, None, None, 0.5]
    numbers = {"tensor": "weight", "l2": sizes, "update_ratio": ratios}
    write_run(run, {"stats": stats_rows(0, 5, site=sites, module=names, **numbers)})
    listed = statsbridge.load(run).gradient_flow().to_pylist()
    columns = (
        "module",
        "gradient_norm",
        "parameter_norm",
        "update_norm",
        "gradient_to_parameter",
        "update_to_parameter",
    )
    assert [tuple(row[name] for name in columns) for row in listed] == [
        ("a", 3.0, 0.0, None, None, None),
        ("b", 4.0, 2.0, 1.0, 2.0, 0.5),
    ]


@pytest.mark.parametrize("statistic", STATISTICS)
def test_every_statistic_has_a_profile(recorded: Any, statistic: str) -> None:
    data, _ = recorded
    assert data.depth_profile("update", statistic).num_rows == 10


@pytest.mark.parametrize(
    ("dimensions", "kept"),
    [
        (("step",), ["module", "type", "call", "site", "tensor"]),
        (("module",), ["step", "type", "site", "tensor"]),
        (("module", "type", "step", "tensor"), ["site"]),
        (("call",), ["step", "module", "type", "site", "tensor"]),
    ],
)
def test_merged_over_is_what_the_elements_together_have(
    dimensions: tuple[str, ...], kept: list[str], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    elements: dict[tuple[Any, ...], list[np.ndarray]] = {}
    works = []
    for step in range(3):
        tensors = [rng.normal(loc=place, scale=1 + step, size=50 + 7 * place) for place in range(5)]
        tensors[2][:10] = 0.0
        keys = [("m0", "A", 0, ""), ("m0", "A", 1, ""), ("m1", "A", 0, ""), ("m2", "B", 0, ""), ("m2", "B", 0, "x")]
        for key, values in zip(keys, tensors, strict=True):
            whole = dict(
                zip(
                    ("step", "module", "type", "call", "site", "tensor"),
                    (step, *key[:3], "activation", key[3]),
                    strict=True,
                )
            )
            elements.setdefault(tuple(whole[name] for name in kept), []).append(values)
        deviations = [values - values.mean() for values in tensors]
        works.append(
            {
                "stats": stats_rows(
                    step,
                    5,
                    module=[key[0] for key in keys],
                    type=[key[1] for key in keys],
                    call=[key[2] for key in keys],
                    tensor=[key[3] for key in keys],
                    count=[len(values) for values in tensors],
                    mean=[values.mean() for values in tensors],
                    std=[values.std() for values in tensors],
                    skewness=[(d**3).mean() / (d**2).mean() ** 1.5 for d in deviations],
                    kurtosis=[(d**4).mean() / (d**2).mean() ** 2 - 3 for d in deviations],
                    min=[values.min() for values in tensors],
                    max=[values.max() for values in tensors],
                    abs_mean=[np.abs(values).mean() for values in tensors],
                    l2=[np.linalg.norm(values) for values in tensors],
                    zero_fraction=[(values == 0).mean() for values in tensors],
                )
            }
        )
    run = new_run(tmp_path)
    write_run(run, *works)
    merged = statsbridge.load(run).merged_over(*dimensions)
    assert merged.column_names[: len(kept) + 1] == [*kept, "rows"]
    listed = merged.to_pylist()
    assert [tuple(row[name] for name in kept) for row in listed] == sorted(elements)
    for row in listed:
        pieces = elements[tuple(row[name] for name in kept)]
        together = np.concatenate(pieces)
        deviation = together - together.mean()
        variance = (deviation**2).mean()
        assert (row["rows"], row["count"]) == (len(pieces), len(together))
        expected = {
            "mean": together.mean(),
            "std": together.std(),
            "skewness": (deviation**3).mean() / variance**1.5,
            "kurtosis": (deviation**4).mean() / variance**2 - 3,
            "min": together.min(),
            "max": together.max(),
            "abs_mean": np.abs(together).mean(),
            "l2": np.linalg.norm(together),
            "zero_fraction": (together == 0).mean(),
        }
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name
        assert (row["kl_unit_gaussian"] is None) == (len(pieces) > 1)


def test_histograms_add_up_and_a_wrong_dimension_is_named(recorded: Any, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    bins = np.array([[1, 2, 0], [0, 1, 5], [3, 0, 0]])
    write_run(run, {"stats": stats_rows(0, 3, histogram=bins)})
    data = statsbridge.load(run)
    assert data.merged_over("module", "step")["histogram"].to_pylist() == [[4, 3, 5]]
    assert recorded[0].merged_over("step")["histogram"].null_count > 0
    with pytest.raises(ConfigError, match="unknown dimension modules: did you mean module"):
        data.merged_over("modules")
    assert merge_over(data.stats.slice(0, 0), ["step"]).num_rows == 0

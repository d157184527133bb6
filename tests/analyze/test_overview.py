import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statsbridge import ConfigError
from statsbridge.analyze.overview import Overview, Trend, overview
from statsbridge.log.schema import SCHEMAS

DEFAULTS: dict[str, Any] = {
    "seq": 0,
    "attempt": 0,
    "iteration": 0,
    "type": "Linear",
    "call": 0,
    "site": "activation",
    "tensor": "",
    "count": 100,
    "nan_count": 0,
    "inf_count": 0,
}


def stats(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist([{**DEFAULTS, **row} for row in rows], schema=SCHEMAS["stats"])


def layer(module: str, step: int, depth: int | None, order: int | None, **values: Any) -> dict[str, Any]:
    return {"module": module, "step": step, "depth": depth, "order": order, **values}


TABLE = stats(
    layer("zz.first", 0, 1, 0, mean=0.5, std=1.0, min=-3.0, max=2.0, zero_fraction=0.0),
    layer("aa.last", 0, 2, 2, mean=-2.0, std=2.0, min=-3.0, max=4.0, zero_fraction=0.0),
    layer("zz", 0, 1, 1, type="Sequential", mean=0.5, std=1.0, min=-3.0, max=2.0),
    layer("unused", 0, None, None, mean=None, status="not_called", count=0),
    layer("aa.last", 20, 2, 2, mean=-1.0, std=8.0, min=-9.0, max=4.0, zero_fraction=0.1),
    layer("zz.first", 20, 1, 0, mean=0.25, std=1.5, min=-3.0, max=2.0, zero_fraction=0.0),
    layer("zz", 20, 1, 1, type="Sequential", mean=0.25, std=1.5, min=-3.0, max=2.0),
    layer("zz.first", 0, 1, 0, site="update", tensor="weight", update_ratio=0.3, l2=1.0),
)


def names(result: Overview) -> list[str]:
    return [row.module for row in result.rows]


def test_rows_lie_in_the_order_of_the_data_flow_not_of_names() -> None:
    assert names(overview(TABLE, step=0)) == ["zz.first", "zz", "aa.last", "unused"]


BRANCHED = stats(
    layer("stem", 0, 1, 0, mean=1.0, abs_mean=0.25),
    layer("body", 0, 2, 1, mean=1.0, abs_mean=0.5),
    layer("head", 0, 3, 2, mean=1.0, abs_mean=1.0),
    layer("branch", 0, 1, 3, mean=1.0, abs_mean=8.0),  # takes the model's own input, and runs last
)


@pytest.mark.parametrize("sort", ["depth", "value"])
def test_a_side_branch_that_runs_last_lies_at_its_depth(sort: str) -> None:
    """Execution breaks ties of depth only; and where all values are alike, their order is still the data flow's."""
    assert names(overview(BRANCHED, statistics=["mean"], sort=sort)) == ["stem", "branch", "body", "head"]


def test_the_last_sampled_step_of_the_site_is_shown() -> None:
    result = overview(TABLE)
    assert (result.step, result.steps) == (20, (0, 20))
    assert result.statistics == ("mean", "std", "zero_fraction", "abs_max")
    assert dict(result.rows[0].values) == {"mean": 0.25, "std": 1.5, "zero_fraction": 0.0, "abs_max": 3.0}
    assert result.absent == 1  # `unused` has a row at step 0 only
    assert overview(TABLE, site="update").step == 0


def test_a_missing_number_stays_missing_and_says_why() -> None:
    row = overview(TABLE, step=0).rows[-1]
    assert (row.module, row.status, row.depth) == ("unused", "not_called", None)
    assert set(row.values.values()) == {None}


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("depth", ["zz.first", "zz", "aa.last"]),
        ("value", ["aa.last", "zz.first", "zz"]),
        ("change", ["zz.first", "zz", "aa.last"]),  # mean: -50 %, -50 %, +50 %: ties stay in flow order
    ],
)
def test_sorts_by_the_mean(sort: str, expected: list[str]) -> None:
    assert names(overview(TABLE, statistics=["mean"], sort=sort)) == expected


def test_sorts_by_change_largest_first_and_missing_last() -> None:
    assert names(overview(TABLE, sort="change")) == ["aa.last", "zz.first", "zz"]  # std: +300 %, +50 %, +50 %
    assert names(overview(TABLE, step=0, sort="value"))[-1] == "unused"


def test_trends_follow_each_row_over_all_sampled_steps() -> None:
    rows = {row.module: row for row in overview(TABLE, step=0, statistics=["std", "abs_max"]).rows}
    assert rows["aa.last"].trends["std"].values == (2.0, 8.0)
    assert rows["aa.last"].trends["abs_max"].values == (4.0, 9.0)
    assert rows["unused"].trends["std"].values == (None, None)


def test_calls_and_tensors_are_rows_of_their_own() -> None:
    table = stats(
        layer("cell", 0, 1, 0, call=0, std=1.0),
        layer("cell", 0, 2, 1, call=1, std=2.0),
        layer("pair", 0, 3, 2, tensor="1", std=4.0),
        layer("pair", 0, 3, 2, tensor="0", std=3.0),
        layer("cell", 10, 1, 0, call=0, std=5.0),
        layer("cell", 10, 2, 1, call=1, std=6.0),
    )
    result = overview(table, step=0)
    assert [(row.module, row.call, row.tensor, row.trends["std"].values) for row in result.rows] == [
        ("cell", 0, "", (1.0, 5.0)),
        ("cell", 1, "", (2.0, 6.0)),
        ("pair", 0, "1", (4.0, None)),
        ("pair", 0, "0", (3.0, None)),
    ]


def test_the_grouping_agrees_with_a_plain_loop() -> None:
    random = np.random.default_rng(3)
    rows = [
        layer(f"m{module}", step, module, module, call=call, tensor=tensor, std=float(random.normal()))
        for step in range(0, 70, 10)
        for module in range(5)
        for call in range(2)
        for tensor in ("", "0", "hidden")
        if random.random() < 0.8
    ]
    random.shuffle(rows)
    result = overview(stats(*rows), statistics=["std"])
    for row in result.rows:
        expected: Sequence[float | None] = [
            next(
                (
                    one["std"]
                    for one in rows
                    if (one["step"], one["module"], one["call"], one["tensor"])
                    == (step, row.module, row.call, row.tensor)
                ),
                None,
            )
            for step in result.steps
        ]
        assert list(row.trends["std"].values) == expected


def test_marks_come_from_statistics_that_are_not_shown_too() -> None:
    table = stats(layer("relu", 0, 1, 0, type="ReLU", zero_fraction=0.9, min=0.0, max=1.0, std=0.2))
    (row,) = overview(table, statistics=["kurtosis"]).rows
    assert [mark.rule.name for mark in row.marks] == ["dead"]


def test_steps_with_nothing_finite_are_kept_apart_from_missing_ones() -> None:
    table = stats(layer("a", 0, 1, 0, std=1.0), layer("a", 10, 1, 0, nan_count=100), layer("b", 20, 1, 0, std=1.0))
    (row,) = overview(table, step=10).rows
    assert row.trends["std"].values == (1.0, None, None)
    assert row.trends["std"].nonfinite == (False, True, False)


@pytest.mark.parametrize(
    ("values", "change"),
    [
        ((2.0, 3.0), 0.5),
        ((-2.0, -3.0), -0.5),
        ((-1.0, None, 1.0, None), 2.0),
        ((0.0, 1.0), math.inf),
        ((0.0, -1.0), -math.inf),
        ((0.0, 0.0), 0.0),
        ((None, 4.0), None),
        ((None,), None),
    ],
)
def test_change(values: tuple[float | None, ...], change: float | None) -> None:
    assert Trend(values, (False,) * len(values)).change == change


def test_gradient_ratio_takes_the_weights_of_the_first_and_last_layer() -> None:
    table = stats(
        layer("last", 0, 3, 2, site="parameter_grad", tensor="weight", abs_mean=4.0),
        layer("last", 0, 3, 2, site="parameter_grad", tensor="bias", abs_mean=9.0),
        layer("first", 0, 1, 0, site="parameter_grad", tensor="bias", abs_mean=1e-9),
        layer("first", 0, 1, 0, site="parameter_grad", tensor="weight", abs_mean=0.01),
    )
    ratio = overview(table, site="parameter_grad").gradient_ratio
    assert ratio is not None
    assert (ratio.first, ratio.last, ratio.value) == ("first", "last", 0.0025)
    assert ratio.mark is not None
    assert ratio.mark.rule.name == "shrinking"


def test_gradient_ratio_takes_first_and_last_by_depth_not_by_execution() -> None:
    gradients = BRANCHED.set_column(
        BRANCHED.schema.get_field_index("site"),
        BRANCHED.schema.field("site"),
        pa.array(["activation_grad"] * 4).cast(BRANCHED.schema.field("site").type),
    )
    ratio = overview(gradients, site="activation_grad").gradient_ratio
    assert ratio is not None
    assert (ratio.first, ratio.last, ratio.value) == ("stem", "head", 0.25)


def test_gradient_ratio_needs_two_layers_and_a_gradient() -> None:
    one = stats(layer("a", 0, 1, 0, site="activation_grad", abs_mean=1.0))
    none = stats(
        layer("a", 0, 1, 0, site="activation_grad", abs_mean=1.0),
        layer("b", 0, 2, 1, site="activation_grad", abs_mean=0.0),
    )
    assert overview(one, site="activation_grad").gradient_ratio is None
    assert overview(none, site="activation_grad").gradient_ratio is None
    assert overview(TABLE).gradient_ratio is None


def test_a_glob_chooses_modules() -> None:
    assert names(overview(TABLE, modules="zz*")) == ["zz.first", "zz"]
    assert names(overview(TABLE, modules="*.last")) == ["aa.last"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"site": "activations"},
            "unknown site activations: did you mean activation? Choices: activation, update",
        ),
        ({"statistics": ["sdt"]}, "unknown statistic sdt: did you mean std? Choices: std, "),
        ({"statistics": ["seq"]}, "unknown statistic seq: "),
        ({"statistics": ["shard"]}, "unknown statistic shard: "),
        ({"statistics": ["histogram"]}, "unknown statistic histogram: "),
        ({"statistics": ["update_ratio"]}, "statistic update_ratio belongs to site update, not activation"),
        ({"step": 17}, "unknown step 17 (not sampled): Choices: 20, 0"),
        ({"modules": "aa.lost"}, "unknown module aa.lost: did you mean aa.last? Choices: aa.last, "),
        ({"sort": "deph"}, "unknown sort deph: did you mean depth? Choices: depth, value, change"),
    ],
)
def test_wrong_arguments_name_the_choices_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        overview(TABLE, **arguments)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_every_numeric_statistic_can_be_shown() -> None:
    error = ""
    try:
        overview(TABLE, statistics=["nothing"])
    except ConfigError as raised:
        error = str(raised)
    offered = error.partition("Choices: ")[2].split(", ")
    assert "kl_unit_gaussian" in offered
    for name in offered:
        assert overview(TABLE, site="update", statistics=[name]).statistics == (name,)


def test_a_run_without_statistics_says_so() -> None:
    with pytest.raises(ConfigError, match="no statistics in this run yet"):
        overview(TABLE.slice(0, 0))

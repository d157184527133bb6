"""What curves are called in Aim."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsbridge_aim import Aim
from statsbridge_aim.labels import label

from statsbridge.mirror import Series
from statsbridge.mirror.curves import aggregate_name, statistic_name

TEXT = st.text(alphabet="ab/._:(){}\"' é😀\x00", max_size=4) | st.sampled_from(["by_type", "root", "smoothed", "x"])
SERIES = st.builds(
    Series,
    name=TEXT | st.builds("/".join, st.lists(TEXT, max_size=4)),
    kind=st.sampled_from(["scalar", "statistic", "aggregate"]),
    statistic=TEXT,
    site=TEXT,
    module=st.none() | TEXT,
    type=TEXT,
    tensor=TEXT,
    call=st.integers(0, 2),
    depth=st.none() | st.integers(0, 2),
    smoothing=st.none() | st.sampled_from([0.5, 0.9]),
)


@given(SERIES, SERIES)
def test_different_curves_have_different_keys(one: Series, other: Series) -> None:
    adapter = Aim()
    assert (adapter.key(one) == adapter.key(other)) == (one == other)


@given(SERIES, st.data())
def test_curves_that_differ_in_one_field_have_different_keys(one: Series, data: st.DataObject) -> None:
    fields = {name: getattr(one, name) for name in Series.__slots__}
    changed = data.draw(st.sampled_from([name for name in fields if name != "kind"]))
    fields[changed] = getattr(data.draw(SERIES), changed)
    other = Series(**fields)
    assert (Aim().key(one) == Aim().key(other)) == (one == other)


@given(SERIES)
def test_no_name_is_empty_or_one_of_aims_own(series: Series) -> None:
    name = label(series).name
    assert name
    assert not name.startswith("__")


@pytest.mark.parametrize("module", ["blocks.0.conv1", "", "a/b:2.c"])
@pytest.mark.parametrize("tensor", ["", "weight", "0.hidden"])
@pytest.mark.parametrize("call", [0, 3])
@pytest.mark.parametrize("site", ["activation", "parameter_grad"])
def test_statistics_of_modules_are_readable(site: str, module: str, tensor: str, call: int) -> None:
    series = Series(
        statistic_name(site, "std", module, call, tensor),
        "statistic", "std", site, module, "Conv2d", tensor, call, depth=7,
    )  # fmt: skip
    expected = {"site": site, "module": module, "type": "Conv2d", "depth": 7}
    expected |= ({"tensor": tensor} if tensor else {}) | ({"call": call} if call else {})
    assert label(series) == (f"{site}/std", expected)


def test_tensors_logged_by_hand_and_aggregates_are_readable() -> None:
    logged = Series(statistic_name("tensor", "l2", "", 0, "logits"), "statistic", "l2", "tensor", "", tensor="logits")
    assert label(logged) == ("tensor/l2", {"site": "tensor", "module": "", "tensor": "logits"})
    pooled = Series(
        aggregate_name("parameter", "std", "Conv2d", "weight"),
        "aggregate",
        "std",
        "parameter",
        None,
        "Conv2d",
        "weight",
    )
    assert label(pooled) == ("by_type/parameter/std", {"site": "parameter", "type": "Conv2d", "tensor": "weight"})


def test_a_moving_average_lies_beside_its_scalar() -> None:
    assert label(Series("val/loss", "scalar")) == ("val/loss", {})
    assert label(Series("val/loss/smoothed", "scalar", smoothing=0.9)) == ("val/loss", {"smoothing": 0.9})


def test_a_curve_that_had_to_be_renamed_says_what_it_is() -> None:
    name, context = label(Series("activation/std/a--2", "statistic", "std", "activation", "a"))
    assert name == "activation/std"
    assert json.loads(context["series"])["name"] == "activation/std/a--2"

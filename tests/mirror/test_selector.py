"""From rows to points: right values under right names, in order, within the budget, however the rows were cut."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selector_helpers import NUMBERS, START, Step, chunk, curves, flat, measured, selected, stats_row

from statsbridge.analyze.smoothing import smooth
from statsbridge.log.schema import conform, to_table
from statsbridge.mirror import Point, Selection, Series
from statsbridge.mirror.selector import Selector
from statsbridge.moments import HISTOGRAM_BINS, ZERO_BIN, histogram_edges

SITES = ("activation", "activation_grad", "parameter", "parameter_grad", "update")


# ---- scalars -----------------------------------------------------------------------------------------------


def test_scalars_keep_their_name_step_time_and_value() -> None:
    batches = selected([Step(3, {"loss": 0.1, "lr/0": 1e-3}), Step(4, {"loss": math.inf})], smoothing=None)
    loss, rate = Series("loss", "scalar"), Series("lr/0", "scalar")
    assert [point for batch in batches for point in batch.points] == [
        Point(loss, 3, START + 3000, 0.1),
        Point(rate, 3, START + 3000, 1e-3),
        Point(loss, 4, START + 4000, math.inf),
    ]


def test_one_series_object_a_curve() -> None:
    selector = Selector(Selection())
    points = [
        point
        for steps in ([Step(0, {"loss": 1.0}), Step(1, {"loss": 2.0})], [Step(2, {"loss": 3.0})])
        for batch in selector.add(chunk(steps))
        for point in batch.points
        if point.series.name == "loss"
    ]
    assert len(points) == 3
    assert len({id(point.series) for point in points}) == 1


def test_a_scalar_that_is_nan_is_sent_and_a_null_is_not() -> None:
    rows = [stats_row(std=None, mean=2.0), stats_row("other", std=1.0)]
    found = curves(selected([Step(0, {"loss": math.nan}, stats=rows)], aggregates=False))
    assert math.isnan(found["loss"][0])
    assert set(found) == {"loss", "activation/mean/layer", "activation/std/other"}


def test_the_average_goes_beside_the_raw_curve() -> None:
    losses = [3.0, 1.0, math.nan, 2.0, -math.inf, 0.5]
    found = curves(selected([Step(n, {"loss": loss, "lr/0": 0.1}) for n, loss in enumerate(losses)], smoothing=0.8))
    assert list(found["loss"].values())[-1] == 0.5
    expected = smooth(losses, 0.8)
    assert found["loss/smoothed"] == {n: expected[n] for n in (0, 1, 3, 5)}
    assert set(found) == {"loss", "lr/0", "loss/smoothed"}


def test_what_run_log_wrote_is_not_averaged() -> None:
    steps = [Step(n, {"loss": 1.0}, logged=[(n, "val", 2.0)]) for n in range(3)]
    assert set(curves(selected(steps))) == {"loss", "loss/smoothed", "val"}


def test_each_attempt_begins_its_own_average() -> None:
    steps = [Step(0, {"loss": 9.0}), Step(1, {"loss": 9.0}), Step(1, {"loss": 1.0}, attempt=1)]
    smoothed = [point for point in flat(selected(steps)) if point[0] == "loss/smoothed"]
    assert [value for _, _, _, value in smoothed] == ["9.0", "9.0", "1.0"]


def test_a_users_name_that_looks_like_one_of_ours_stays_apart() -> None:
    rows = [stats_row("conv", std=5.0)]
    steps = [Step(0, {"loss": 1.0, "loss/smoothed": 2.0, "activation/std/conv": 3.0}, stats=rows)]
    found = curves(selected(steps, aggregates=False))
    assert found["loss/smoothed"] == {0: 2.0}
    assert found["loss/smoothed--2"] == {0: 1.0}
    assert found["activation/std/conv"] == {0: 3.0}
    assert found["activation/std/conv--2"] == {0: 5.0}


# ---- order -------------------------------------------------------------------------------------------------


def test_a_late_value_comes_where_it_was_logged_in_a_batch_of_its_own() -> None:
    steps = [
        Step(0, {"loss": 1.0}),
        Step(1, {"loss": 2.0}, logged=[(0, "val", 5.0), (1, "test", 6.0), (7, "future", 7.0)]),
        Step(2, {"loss": 3.0}),
    ]
    batches = selected(steps, smoothing=None)
    assert [[(p.series.name, p.step) for p in batch.points] for batch in batches] == [
        [("loss", 0), ("loss", 1), ("test", 1)],
        [("val", 0), ("future", 7)],
        [("loss", 2)],
    ]


def test_what_is_logged_before_the_first_step_is_not_late() -> None:
    first = Step(5, {"loss": 1.0})
    early = chunk([Step(5, logged=[(5, "val", 3.0)]), first])
    (batch,) = Selector(Selection(smoothing=None)).add(early)
    assert [(p.series.name, p.step) for p in batch.points] == [("val", 5), ("loss", 5)]


def test_a_chunk_may_begin_with_what_was_logged_after_a_step() -> None:
    selector = Selector(Selection(smoothing=None))
    selector.add(chunk([Step(5, {"loss": 1.0})]))
    batches = selector.add(chunk([Step(5, logged=[(5, "on time", 1.0), (2, "late", 1.0)]), Step(6, {"loss": 1.0})]))
    assert [[(p.series.name, p.step) for p in batch.points] for batch in batches] == [
        [("on time", 5)],
        [("late", 2)],
        [("loss", 6)],
    ]


def test_two_values_of_one_step_stay_in_order() -> None:
    steps = [Step(0, {"loss": 1.0}, logged=[(0, "val", 1.0), (0, "val", 2.0)])]
    assert [value for name, *_, value in flat(selected(steps)) if name == "val"] == ["1.0", "2.0"]


def test_a_resumed_run_goes_back_in_a_new_batch() -> None:
    steps = [Step(0, {"loss": 1.0}), Step(9, {"loss": 2.0}), Step(4, {"loss": 3.0}, attempt=1)]
    assert [[p.step for p in b.points] for b in selected(steps, smoothing=None)] == [[0, 9], [4]]


@st.composite
def records(draw: st.DrawFn) -> list[Step]:
    """A run of up to two attempts with everything that can be in the way."""
    values = st.sampled_from([0.0, -0.0, 1.5, -2.0, 1e300, math.nan, math.inf])
    numbers = st.one_of(st.none(), st.floats(0.0, 4.0, width=16))
    steps: list[Step] = []
    for attempt in range(draw(st.integers(1, 2))):
        step = draw(st.integers(0, 3))
        for _ in range(draw(st.integers(1, 5))):
            step += draw(st.integers(1, 3))
            names = draw(
                st.lists(st.sampled_from(["loss", "grad_norm", "lr/0", "loss/smoothed"]), unique=True, min_size=1)
            )
            logged = draw(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["val", "loss"]), values), max_size=2))
            stats = []
            for module, kind in draw(
                st.lists(st.sampled_from([("a", "Linear"), ("b", "ReLU"), ("c.d", "Linear")]), unique=True)
            ):
                for site in ("activation", "parameter", "update"):
                    row = stats_row(module, site, type=kind, nan_count=draw(st.integers(0, 1)), depth=len(module))
                    row |= {name: draw(numbers) for name in (*NUMBERS, "update_ratio")}
                    stats.append(row)
            scalars = {name: draw(values) for name in names}
            steps.append(Step(step, scalars, [(label, n, v) for label, n, v in logged], stats, attempt))
    return steps


@settings(max_examples=50)
@given(records(), st.data())
def test_the_cut_into_chunks_changes_nothing(steps: list[Step], data: st.DataObject) -> None:
    budget = data.draw(st.sampled_from([1, 4, 9, 30, 500]))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(steps)))))
    whole = Selector(Selection(max_series=budget, figures=False))
    pieces = Selector(Selection(max_series=budget, figures=False))
    bounds = [0, *cuts, len(steps)]
    cut = [batch for a, b in itertools.pairwise(bounds) for batch in pieces.add(chunk(steps[a:b]))]
    points = whole.add(chunk(steps))
    assert flat(cut) == flat(points)
    assert pieces.left_out() == whole.left_out()
    names = {point.series.name for batch in points for point in batch.points}
    assert len(names) == len({id(point.series) for batch in points for point in batch.points}) <= budget
    for batch in points:
        assert [point.step for point in batch.points] == sorted(point.step for point in batch.points)


def test_a_pooled_ratio_does_not_depend_on_what_else_is_in_the_chunk() -> None:
    """Some elements of the update are NaN: it has a norm, of the others, and no ratio."""

    def rows(ratio: float | None) -> list[dict[str, Any]]:
        return [
            stats_row("a", "parameter", type="Linear", l2=2.0),
            stats_row("a", "update", type="Linear", l2=1.0, nan_count=0 if ratio else 1, update_ratio=ratio),
        ]

    steps = [Step(0, {"loss": 1.0}, stats=rows(0.5)), Step(1, {"loss": 1.0}, stats=rows(None))]
    whole, pieces = Selector(Selection(figures=False)), Selector(Selection(figures=False))
    cut = [batch for step in steps for batch in pieces.add(chunk([step]))]
    assert flat(cut) == flat(whole.add(chunk(steps)))
    pooled = [
        point for batch in cut for point in batch.points if point.series.name == "by_type/update/update_ratio/Linear"
    ]
    assert [(point.step, point.value) for point in pooled] == [(0, 0.5)]


# ---- statistics and the budget -----------------------------------------------------------------------------


def test_a_statistic_is_sent_as_recorded() -> None:
    row = stats_row("blocks.0.conv", "parameter", tensor="weight", type="Conv2d", l2=3.25, depth=4)
    (batch,) = selected([Step(10, stats=[row])], aggregates=False)
    series = Series(
        "parameter/l2/blocks.0.conv.weight", "statistic", "l2", "parameter", "blocks.0.conv", "Conv2d", "weight", 0, 4
    )
    assert batch.points == (Point(series, 10, START + 10_000, 3.25),)


def test_names_of_the_root_of_calls_and_of_tensors() -> None:
    rows = [
        stats_row("", std=1.0),
        stats_row("shared", std=2.0, call=2),
        stats_row("lstm", std=3.0, tensor="1.0"),
        stats_row("", "tensor", std=4.0, tensor="my attention", type=None),
    ]
    found = curves(selected([Step(0, stats=rows)], aggregates=False))
    assert found == {
        "activation/std/root": {0: 1.0},
        "activation/std/shared:2": {0: 2.0},
        "activation/std/lstm/1.0": {0: 3.0},
        "tensor/std/my attention": {0: 4.0},
    }


def model(modules: int, **columns: Any) -> list[dict[str, Any]]:
    """All sites of a chain of linear layers, with every statistic."""
    numbers = dict.fromkeys((*NUMBERS, "update_ratio"), 1.0)
    return [
        stats_row(f"layers.{n}", site, depth=n, order=n, tensor=tensor, **{**numbers, **columns})
        for site in SITES
        for n in range(modules)
        for tensor in (("weight", "bias") if site in {"parameter", "parameter_grad", "update"} else ("",))
    ]


def test_the_budget_holds_and_is_spent_on_coverage() -> None:
    selector = Selector(Selection(max_series=500))
    batches = selector.add(chunk([Step(0, {"loss": 1.0}, stats=model(100))]))
    names = set(curves(batches))
    # 50 are kept for scalars that begin later; aggregates have all they want.
    assert len(names) == 450
    assert sum(name.startswith("by_type/") for name in names) == 15
    for first in ("activation/std", "update/update_ratio", "parameter_grad/l2", "activation_grad/abs_mean"):
        modules = {name for name in names if name.startswith(f"{first}/")}
        assert len(modules) == 100, first
    assert not any(name.endswith(".bias") for name in names if not name.startswith("by_type"))
    # What only partly fits is spread over the depth of the model.
    partly = sorted(int(name.split(".")[1]) for name in names if name.startswith("parameter/l2/"))
    assert 10 < len(partly) < 100
    assert partly[0] == 0
    assert partly[-1] == 99
    assert max(np.diff(partly)) - min(np.diff(partly)) <= 1
    left_out = selector.left_out()
    assert left_out is not None
    assert "the tracker gets 450 curves" in left_out
    assert "max_series=500" in left_out
    assert "statsbridge show" in left_out


def test_scalars_come_first_and_late_ones_find_room() -> None:
    selector = Selector(Selection(max_series=40, smoothing=None))
    steps = [Step(0, {f"s{n}": 1.0 for n in range(10)}, stats=model(50))]
    steps += [Step(1, {"s0": 1.0}, logged=[(1, f"val/{n}", 1.0) for n in range(6)])]
    found = curves(selector.add(chunk(steps)))
    assert sum(name.startswith("s") for name in found) == 10
    assert sum(name.startswith("val/") for name in found) == 4
    assert len(found) == 40
    assert "leaves out 2 scalars" in str(selector.left_out())


def test_more_scalars_than_the_budget_first_come() -> None:
    selector = Selector(Selection(max_series=3, smoothing=None))
    found = curves(selector.add(chunk([Step(0, {f"s{n}": 1.0 for n in range(5)}, stats=model(2))])))
    assert set(found) == {"s0", "s1", "s2"}


def test_where_there_is_room_nothing_is_said() -> None:
    selector = Selector(Selection())
    selector.add(chunk([Step(0, {"loss": 1.0}, stats=model(3))]))
    assert selector.left_out() is None


def test_what_a_user_logs_by_hand_comes_before_what_modules_do() -> None:
    rows = [*model(50), stats_row("", "tensor", tensor="attention", type=None, std=1.0, mean=2.0)]
    found = curves(selected([Step(0, stats=rows)], max_series=20, modules="layers.1?"))
    assert found["tensor/std/attention"] == {0: 1.0}
    assert found["tensor/mean/attention"] == {0: 2.0}
    modules = {name.rpartition("layers.")[2] for name in found if "layers." in name}
    assert all(name.startswith("1") and len(name.split(".")[0]) == 2 for name in modules)


def test_globs_choose_modules_sites_and_statistics() -> None:
    found = curves(selected([Step(0, stats=model(4))], modules=["layers.2"], sites="*grad", statistics=["max"]))
    assert set(found) == {
        "activation_grad/max/layers.2",
        "parameter_grad/max/layers.2.weight",
        "parameter_grad/max/layers.2.bias",
        "by_type/activation_grad/max/Linear",
        "by_type/parameter_grad/max/Linear.weight",
        "by_type/parameter_grad/max/Linear.bias",
    }


def test_a_curve_begins_with_its_first_number() -> None:
    steps = [Step(0, stats=[stats_row(std=None)]), Step(1, stats=[stats_row(std=2.0)])]
    assert curves(selected(steps, aggregates=False)) == {"activation/std/layer": {1: 2.0}}


# ---- aggregates --------------------------------------------------------------------------------------------


def test_an_aggregate_is_the_statistic_of_all_elements_together() -> None:
    numbers = np.random.default_rng(0)
    values = [numbers.normal(mean, 0.5, size) for mean, size in ((-4.0, 300), (5.0, 700), (0.0, 50))]
    values[1][3], values[1][4], values[2][:10] = math.nan, math.inf, 0.0
    rows = [measured(v, f"m{n}", type="Conv2d") for n, v in enumerate(values)]
    rows.append(measured(np.array([1e6, -1e6]), "other", type="Linear"))
    found = curves(selected([Step(0, stats=rows)]))
    pooled = np.concatenate(values)
    pooled = pooled[np.isfinite(pooled)]
    assert found["by_type/activation/std/Conv2d"][0] == pytest.approx(pooled.std(), rel=1e-12)
    assert found["by_type/activation/mean/Conv2d"][0] == pytest.approx(pooled.mean(), rel=1e-12)
    assert found["by_type/activation/zero_fraction/Conv2d"][0] == pytest.approx(10 / len(pooled), rel=1e-12)
    # An average of the three would be 0.5: the distances between their means are most of it.
    assert found["by_type/activation/std/Conv2d"][0] > 3


def test_a_pooled_update_ratio_is_the_ratio_of_pooled_norms() -> None:
    numbers = np.random.default_rng(1)
    rows, before, after = [], [], []
    for n, size in enumerate((10, 200)):
        parameter, update = numbers.normal(size=size), 0.01 * numbers.normal(size=size)
        ratio = np.linalg.norm(update) / np.linalg.norm(parameter)
        rows.append(measured(parameter, f"m{n}", "parameter", tensor="weight"))
        rows.append(measured(update, f"m{n}", "update", tensor="weight", update_ratio=ratio))
        before.append(parameter)
        after.append(update)
    # A frozen parameter has no update, so its norm must not count either.
    rows.append(measured(np.full(10, 100.0), "frozen", "parameter", tensor="weight"))
    found = curves(selected([Step(0, stats=rows)]))
    expected = np.linalg.norm(np.concatenate(after)) / np.linalg.norm(np.concatenate(before))
    assert found["by_type/update/update_ratio/Linear.weight"][0] == pytest.approx(expected, rel=1e-12)


def test_a_ratio_that_a_policy_took_away_does_not_come_back_from_the_norms() -> None:
    rows = [
        measured(np.full(4, 2.0), "a", "parameter", tensor="weight"),
        measured(np.full(4, 0.5), "a", "update", tensor="weight", update_ratio=None),
    ]
    found = curves(selected([Step(0, stats=rows)]))
    assert "by_type/update/l2/Linear.weight" in found or "by_type/parameter/l2/Linear.weight" in found
    assert not [name for name in found if "update_ratio" in name]


def test_a_piece_of_a_sharded_tensor_is_not_taken_for_the_whole() -> None:
    rows = [
        measured(np.full(4, 2.0), "cut", "parameter", tensor="weight", shard=0, shards=2),
        measured(np.full(4, 2.0), "held", "parameter", tensor="weight", shard=0, shards=1),
        measured(np.full(4, 2.0), "own", "activation"),
    ]
    found = curves(selected([Step(0, stats=rows)]))
    assert not [name for name in found if "cut" in name]
    assert [name for name in found if "held" in name]
    assert [name for name in found if "own" in name]


def test_a_pooled_update_ratio_needs_every_parameter() -> None:
    rows = [
        measured(np.ones(4), "a", "update", tensor="weight", update_ratio=0.5),
        measured(np.ones(4), "b", "update", tensor="weight", update_ratio=0.5),
        measured(np.full(4, 2.0), "a", "parameter", tensor="weight"),
    ]
    assert "by_type/update/update_ratio/Linear.weight" not in curves(selected([Step(0, stats=rows)]))


def test_counts_of_nan_begin_when_there_are_any_and_go_on() -> None:
    steps = [Step(n, stats=[stats_row(std=1.0, nan_count=count)]) for n, count in enumerate((0, 0, 3, 0))]
    found = curves(selected(steps))
    assert found["by_type/activation/nan_count/Linear"] == {2: 3.0, 3: 0.0}
    assert "by_type/activation/inf_count/Linear" not in found


def test_modules_without_a_type_are_in_no_aggregate() -> None:
    rows = [stats_row("", "tensor", tensor="x", type=None, std=1.0)]
    assert set(curves(selected([Step(0, stats=rows)]))) == {"tensor/std/x"}


# ---- histograms --------------------------------------------------------------------------------------------


def histogram_row(values: np.ndarray, **columns: Any) -> dict[str, Any]:
    edges = histogram_edges()
    inner = np.searchsorted(np.unique(edges), values)  # only for the test's values, none of which is an edge
    counts = np.zeros(HISTOGRAM_BINS, np.int64)
    for value, at in zip(values.tolist(), inner.tolist(), strict=True):
        counts[ZERO_BIN if value == 0 else at + (at > ZERO_BIN - 1)] += 1
    return measured(values, **columns) | {"histogram": counts}


def test_histograms_have_true_edges_and_every_element() -> None:
    values = np.array([0.3, 0.3, -5.0, 0.0, 1.1e-20, 7e9])
    (batch,) = selected([Step(2, stats=[histogram_row(values)])], statistics="histogram", aggregates=False)
    assert not batch.points
    (histogram,) = batch.histograms
    assert histogram.series.name == "activation/histogram/layer"
    assert (histogram.step, histogram.time) == (2, START + 2000)
    assert histogram.counts.sum() == 6
    assert len(histogram.edges) == len(histogram.counts) + 1
    assert np.isfinite(histogram.edges).all()
    assert (np.diff(histogram.edges) > 0).all()
    expected, _ = np.histogram(values, histogram.edges)
    assert (histogram.counts == expected).all()
    assert histogram.counts[0] == histogram.counts[-1] == 1


def test_histograms_come_with_the_points_of_their_step_where_recorded() -> None:
    steps = [
        Step(0, {"loss": 1.0}, stats=[histogram_row(np.array([1.5, 2.5]))]),
        Step(1, {"loss": 1.0}, stats=[stats_row(std=1.0)]),
        Step(2, {"loss": 1.0}, stats=[histogram_row(np.array([1.5])), histogram_row(np.array([3.5]), module="other")]),
    ]
    batches = selected(steps)
    assert [[(h.series.module, h.step) for h in batch.histograms] for batch in batches] == [
        [("layer", 0), ("layer", 2), ("other", 2)]
    ]
    assert not any(batch.histograms for batch in selected(steps, histograms=False))


def test_a_tensor_without_a_finite_element_has_no_histogram() -> None:
    row = stats_row(histogram=np.zeros(HISTOGRAM_BINS, np.int64))
    assert selected([Step(0, stats=[row])]) == []


# ---- events ------------------------------------------------------------------------------------------------


def test_events_of_enough_severity_become_alerts() -> None:
    rows = to_table(
        "events",
        {
            "step": [1, None, 3],
            "time": [START, START + 1, START + 2],
            "kind": ["note", "mirror_unreachable", "dead_unit"],
            "severity": ["info", "warning", "critical"],
            "module": [None, None, "relu"],
            "value": [None, None, 0.9],
            "message": ["a", "b", "c"],
        },
    )
    rows = rows.append_column("seq", [[0, 1, 2]]).append_column("attempt", [[0, 0, 0]])
    part = chunk([])
    events = Selector(Selection()).events(
        type(part)(part.modules, part.stats, part.scalars, conform("events", rows), part.cursor)
    )
    assert [(event.seq, event.step, event.time, event.kind, event.message) for event in events] == [
        (1, None, START + 1, "mirror_unreachable", "b"),
        (2, 3, START + 2, "dead_unit", "c"),
    ]
    assert (events[1].module, events[1].value, events[1].threshold) == ("relu", 0.9, None)

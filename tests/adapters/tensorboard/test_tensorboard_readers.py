"""What TensorBoard's own readers make of the event files: its EventAccumulator and its web page."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from statsbridge_tensorboard import TensorBoard
from tensorboard.util import tensor_util
from tensorboard_helpers import accumulated, exact, float32, web_page

from statsbridge import testing
from statsbridge.mirror import Batch, Point, Series

LOSS = Series(name="loss", kind="scalar")
SPIKE = 12_345


def spiked_points() -> list[Point]:
    """20,000 points with one spike, as in the published experiment, and times to the microsecond."""
    values = np.random.default_rng(0).uniform(0, 0.98, 20_000)
    values[SPIKE] = 5.008
    return [
        Point(LOSS, step, testing.made_point(LOSS, step, 0).time, value) for step, value in enumerate(values.tolist())
    ]


def test_twenty_thousand_points_and_the_spike(tmp_path: Path) -> None:
    points = spiked_points()
    session = testing.Session(TensorBoard(tmp_path), testing.made_run(tmp_path))
    for first in range(0, len(points), 500):
        session.send(Batch(points[first : first + 500]))
    session.close()
    reader = accumulated(tmp_path / "statsbridge" / session.run.id)
    found = exact(reader, "loss")
    assert [(step, value) for step, _, value in found] == [(point.step, point.value) for point in points]
    assert [round(wall * 1e6) for _, wall, _ in found] == [point.time for point in points]
    assert max(found, key=lambda item: item[2])[0] == SPIKE


def test_values_are_exact_for_programs_and_rounded_for_the_page(tmp_path: Path) -> None:
    points = [testing.made_point(LOSS, step, value) for step, value in enumerate(testing.HARD_VALUES)]
    session = testing.Session(TensorBoard(tmp_path), testing.made_run(tmp_path))
    session.send(Batch(points))
    session.close()
    reader = accumulated(tmp_path / "statsbridge" / session.run.id)
    events = reader.Tensors("loss")
    np.testing.assert_array_equal([event.tensor_proto.double_val[0] for event in events], testing.HARD_VALUES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overflow is what is asked for
        rounded = np.array(testing.HARD_VALUES).astype(np.float32)
    np.testing.assert_array_equal([tensor_util.make_ndarray(event.tensor_proto).item() for event in events], rounded)
    assert reader.SummaryMetadata("loss").plugin_data.plugin_name == "scalars"


def test_values_of_a_step_are_one_record(tmp_path: Path) -> None:
    from statsbridge_tensorboard.records import payloads
    from tensorboard.compat.proto.event_pb2 import Event

    session = testing.Session(TensorBoard(tmp_path), testing.made_run(tmp_path, restricted=True))
    session.send(testing.made_batches(1, series=300)[0])
    session.close()
    (path,) = tmp_path.rglob("*tfevents*")
    events = [Event.FromString(payload) for payload in payloads(path.read_bytes())]
    assert [(event.step, len(event.summary.value)) for event in events] == [(0, 0), (0, 300), (1, 300)]


def test_histograms_keep_their_uneven_edges(tmp_path: Path) -> None:
    item = testing.made_histogram(3)
    session = testing.Session(TensorBoard(tmp_path), testing.made_run(tmp_path))
    session.send(Batch([testing.made_point(item.series, 3, 0.5)], [item]))
    session.close()
    reader = accumulated(tmp_path / "statsbridge" / session.run.id)
    (event,) = reader.Tensors(f"{item.series.name} (histogram)")
    buckets = tensor_util.make_ndarray(event.tensor_proto)
    np.testing.assert_array_equal(buckets, np.column_stack([item.edges[:-1], item.edges[1:], item.counts]))
    assert buckets.dtype == np.float64
    assert event.step == 3
    assert reader.SummaryMetadata(f"{item.series.name} (histogram)").plugin_data.plugin_name == "histograms"


@pytest.mark.parametrize(
    "name", ["loss (histogram)", "loss (text)", "loss (scalar)", "loss (scalar) (scalar)", "config (text)"]
)
def test_names_like_those_of_other_kinds(name: str, tmp_path: Path) -> None:
    series = [testing.made_series(name), testing.made_series("loss"), testing.made_series("loss (scalar)")]
    points = [testing.made_point(one, 1, float(number)) for number, one in enumerate(dict.fromkeys(series))]
    session = testing.Session(TensorBoard(tmp_path), testing.made_run(tmp_path))
    session.send(Batch(points))
    session.close()
    reader = accumulated(tmp_path / "statsbridge" / session.run.id)
    for point in points:
        tag = session.adapter.key(point.series)
        assert exact(reader, tag)[0][::2] == (1, point.value)
        assert reader.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"


def test_configuration_events_and_figures(tmp_path: Path) -> None:
    session = testing.Session(TensorBoard(tmp_path), testing.made_run(tmp_path))
    session.send(testing.made_batches(4)[3])
    for event in (testing.made_event(3), testing.made_event(None)):
        session.call("alert", session.adapter.alert, event)
    figure = go.Figure(go.Heatmap(z=[[1.0, 2.0]], y=["conv_1"]))
    for _ in range(2):
        session.call("figure", session.adapter.figure, "heatmap/activation", figure, 7)
    session.close()
    folder = tmp_path / "statsbridge" / session.run.id
    reader = accumulated(folder)

    def texts(tag: str) -> list[tuple[int, str]]:
        assert reader.SummaryMetadata(tag).plugin_data.plugin_name == "text"
        return [(event.step, event.tensor_proto.string_val[0].decode()) for event in reader.Tensors(tag)]

    assert '"width": 64' in texts("config (text)")[0][1]
    assert '"torch": "2.13"' in texts("versions (text)")[0][1]
    told = dict(texts("events/loss_not_finite (text)"))
    assert told.keys() == {3, 7}  # one of the run as a whole stands at the last step
    assert "**critical**" in told[3]
    assert "    activation of blocks.0.conv has 12 NaN & more < 13" in told[3]
    assert "    module: blocks.0.conv" in told[3]
    assert "    value: nan" in told[3]
    (page,) = (folder / "figures").glob("*.html")
    assert f"figures/{page.name}" in texts("figures/heatmap/activation (text)")[0][1]
    written = page.read_text()
    assert "conv_1" in written
    assert 'src="plotly.min.js"' in written
    assert (folder / "figures" / "plotly.min.js").stat().st_size > 1e6


def late_points(session: testing.Session) -> None:
    """A curve of ten steps, one of which was logged again at the end."""
    other = testing.made_series("other")
    for step in range(10):
        session.send(Batch([testing.made_point(one, step, step / 3) for one in (LOSS, other)]))
    session.send(Batch([testing.made_point(LOSS, 4, -1.0, late=9)]))
    session.send(Batch([testing.made_point(one, 10, 10 / 3) for one in (LOSS, other)]))


def test_late_values_are_a_run_of_their_own(tmp_path: Path) -> None:
    session = testing.Session(TensorBoard(tmp_path), testing.made_run(tmp_path))
    late_points(session)
    session.close()
    folder = tmp_path / "statsbridge" / session.run.id
    assert [step for step, _, _ in exact(accumulated(folder), "loss")] == list(range(11))
    assert [item[::2] for item in exact(accumulated(folder / "late"), "loss")] == [(4, -1.0)]
    assert [step for step, _, _ in exact(accumulated(folder), "other")] == list(range(11))


def test_a_mirror_taken_up_again_may_go_back(tmp_path: Path) -> None:
    """As the page expects it of a restarted training: nothing of that is late."""
    run, memory = testing.made_run(tmp_path), dict[str, str]()
    for steps in (range(5), range(3, 7)):
        session = testing.Session(TensorBoard(tmp_path), run, memory=memory)
        for step in steps:
            session.send(Batch([testing.made_point(LOSS, step, step / 3)]))
        session.close()
    folder = tmp_path / "statsbridge" / run.id
    assert [step for step, _, _ in exact(accumulated(folder), "loss")] == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert not (folder / "late").exists()


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_web_page_shows_all(fast: bool, tmp_path: Path) -> None:
    """Both loaders: the fast one, which is the default where it is installed, and the one in Python."""
    points = spiked_points()
    session = testing.Session(TensorBoard(tmp_path), testing.made_run(tmp_path))
    session.send(Batch(points))
    hard = testing.made_series('a/"b" & größe σ²\n<i>c</i>')
    session.send(Batch([testing.made_point(hard, step, value) for step, value in enumerate(testing.HARD_VALUES)]))
    item = testing.made_histogram(3)
    session.send(Batch(histograms=[item]))
    session.call("alert", session.adapter.alert, testing.made_event(3))
    session.close()
    again = testing.Session(TensorBoard(tmp_path), testing.made_run(tmp_path))
    late_points(again)
    again.close()
    run = f"statsbridge/{session.run.id}"
    with web_page(tmp_path, fast=fast) as page:
        assert page.wait_for(run, 2).keys() == {"loss", hard.name}
        shown = page.scalars(run, "loss")
        assert shown == [(point.step, float32(point.value)) for point in points]
        values = [value for _, value in page.scalars(run, hard.name)]
        assert values[1] == math.inf == values[3]  # 1e300 is beyond float32
        assert math.isnan(values[0])
        assert values[10] == float32(0.1)
        (_, step, buckets) = page.get("plugin/histograms/histograms", run=run, tag=f"{item.series.name} (histogram)")[0]
        assert step == 3
        np.testing.assert_array_equal(buckets, np.column_stack([item.edges[:-1], item.edges[1:], item.counts]))
        (text,) = page.get("plugin/text/text", run=run, tag="events/loss_not_finite (text)")
        assert "12 NaN &amp; more &lt; 13" in text["text"]
        assert "<strong>critical</strong>" in text["text"]
        late = f"statsbridge/{again.run.id}"
        page.wait_for(f"{late}/late", 1)
        page.wait_for(late, 2)
        assert [step for step, _ in page.scalars(late, "loss")] == list(range(11))
        assert page.scalars(f"{late}/late", "loss") == [(4, -1.0)]

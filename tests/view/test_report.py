"""The report in a real Chromium, opened from the disk with no network."""

import html
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
import pyarrow.compute as pc
import pytest
import torch
from browser_helpers import Traffic, record_traffic
from comparison_helpers import Perceptron, train
from log_rows import new_run, stats_rows, write_run
from torch import nn

import statsbridge
from statsbridge.analyze.run_data import RunData, load
from statsbridge.log import Writer
from statsbridge.view import figures
from statsbridge.view.report import PolicyFacts, Subject, report_html, write_report
from statsbridge.view.report_pictures import Picture, changes, draw

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGE = "<img src=x onerror=alert(1)>"
SCRIPT = "</script><script>alert(2)</script>"
BROKEN_STEP = 20
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 23, 28)"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """A training with markup for names, of which one batch holds a NaN."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module(IMAGE, nn.Linear(8, 16))
    model.add_module(SCRIPT, nn.ReLU())
    model.add_module("head", nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with statsbridge.init(
        model, every=2, dir=tmp_path_factory.mktemp("runs"), name=IMAGE, config={IMAGE: SCRIPT}
    ) as run:
        for step in range(30):
            inputs = torch.randn(16, 8)
            if step == BROKEN_STEP:
                inputs[0] = math.nan
            loss = nn.functional.cross_entropy(model(inputs), torch.randint(0, 3, (16,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss, accuracy=step / 30)
        run.note(IMAGE)
        run.log_figure("own", go.Figure(go.Scatter(y=[3, 1, 2])))
    return load(run.path)


@dataclass
class Opened:
    """A report in the browser with every picture drawn. `at_first`: how many there were before any scrolling."""

    page: "Page"
    file: Path
    traffic: Traffic
    at_first: int


@pytest.fixture(scope="module")
def opened(data: RunData, browser: "Browser", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    file = write_report(data, tmp_path_factory.mktemp("report") / "report.html")
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    page = context.new_page()
    traffic = record_traffic(page)
    page.on("dialog", lambda dialog: traffic.errors.append(f"a dialog: {dialog.message}"))
    page.goto(file.as_uri())
    at_first = page.locator(".plot[data-drawn]").count()
    for plot in page.locator(".plot").all():
        plot.scroll_into_view_if_needed()
        plot.locator(".main-svg").first.wait_for()
    yield Opened(page, file, traffic, at_first)
    context.close()


def traces(page: "Page", place: str) -> list[dict[str, Any]]:
    """The traces that plotly.js has drawn at a place."""
    found: list[dict[str, Any]] = page.locator(f"#{place} .plot").evaluate(
        "plot => plot.data.map(({name, x, y, z, type}) => ({name, x, y, z, type}))"
    )
    return found


def test_every_picture_is_drawn_from_the_file_alone(opened: Opened) -> None:
    page = opened.page
    ids = [figure.get_attribute("id") for figure in page.locator("figure.picture").all()]
    assert ids[:3] == ["run0-training", "run0-scalars", "run0-figure-0"]
    assert {"run0-module-0", "run0-depth", "run0-heat-activation", "run0-flow", "run0-ratio", "run0-grid"} < {*ids}
    assert opened.at_first < 3  # each only when it comes near the window
    assert page.locator(".plot[data-drawn]").count() == len(ids)
    assert page.get_by_text("Not drawn").count() == 0
    opened.traffic.assert_only(opened.file.as_uri())
    assert {url.partition("#")[0] for url in opened.traffic.requests} == {opened.file.as_uri()}


def test_names_are_text_and_never_markup(opened: Opened) -> None:
    page = opened.page
    assert page.locator("h1").text_content() == IMAGE
    assert page.title().startswith(IMAGE)
    assert page.locator("img").count() == 0
    assert page.locator("script[src], iframe, object, embed, link[href^=http]").count() == 0
    names = page.locator("#run0-table td.name").all_text_contents()
    assert names == [IMAGE, SCRIPT, "head", "(model)"]
    assert IMAGE in page.locator("#run0-depth .plot").inner_text()
    assert IMAGE in page.locator("#run0-events ~ .scroll").first.inner_text()
    opened.traffic.assert_only(opened.file.as_uri())


def test_what_is_drawn_is_what_the_record_holds(opened: Opened, data: RunData) -> None:
    rows = data.scalars.filter(pc.equal(data.scalars["name"].cast("string"), "loss"))
    recorded = dict(zip(rows["step"].to_pylist(), rows["value"].to_pylist(), strict=True))
    (loss,) = (trace for trace in traces(opened.page, "run0-training") if trace["name"] == "loss")
    drawn = {x: y for x, y in zip(loss["x"], loss["y"], strict=True) if y is not None}
    assert drawn == pytest.approx({step: value for step, value in recorded.items() if math.isfinite(value)}, rel=1e-6)
    assert max(drawn) == BROKEN_STEP - 1
    heat = traces(opened.page, "run0-heat-activation")[0]
    matrix = data.matrix("activation", "std")
    with np.errstate(divide="ignore"):
        expected = np.where(matrix.nonfinite, np.nan, np.log10(matrix.values))
    np.testing.assert_allclose(np.array(heat["z"], dtype=np.float64), expected, atol=6e-4)
    assert [float(edge) for edge in heat["x"][:-1]] == matrix.steps.tolist()
    (own,) = traces(opened.page, "run0-figure-0")
    assert own["y"] == [3, 1, 2]


def test_findings_come_first_and_lead_to_their_pictures(opened: Opened) -> None:
    page = opened.page
    first = page.locator(".finding").first
    assert "critical" in (first.get_attribute("class") or "")
    assert f"step {BROKEN_STEP}" in first.inner_text()
    assert first.locator("code").inner_text() == IMAGE
    links = page.locator(".finding a.to-picture")
    assert links.count() == page.locator(".finding").count()
    for link in links.all():
        target = (link.get_attribute("href") or "").removeprefix("#")
        link.click()
        assert page.evaluate("location.hash") == f"#{target}"
        box = page.locator(f"[id='{target}']").bounding_box()
        assert box is not None
        assert 0 <= box["y"] < 900
    assert any("NaN" in str(trace["name"]) for trace in traces(page, "run0-module-0"))


def test_the_table_is_searched_and_sorted(opened: Opened) -> None:
    page = opened.page
    table = page.locator("#run0-table tbody")
    search = page.get_by_role("searchbox")
    search.fill("LINEAR head")
    assert table.locator("tr:visible td.name").all_text_contents() == ["head"]
    assert page.locator("#run0-table-count").inner_text() == "1 of 4"
    search.fill("")
    header = page.locator("#run0-table th", has_text="parameters")
    header.click()
    assert table.locator("td.name").all_text_contents()[-1] == IMAGE  # 8 · 16 + 16, the most of all
    header.click()
    assert table.locator("td.name").all_text_contents()[0] == IMAGE


def test_a_link_to_a_row_shows_it_though_the_search_has_hidden_it(opened: Opened) -> None:
    opened.page.get_by_role("searchbox").fill("nothing has this name")
    assert opened.page.locator("#run0-row-2").is_hidden()
    opened.page.evaluate("location.hash = 'run0-row-2'")
    opened.page.locator("#run0-row-2").wait_for(state="visible")


def test_dark_where_the_reader_wants_it_and_light_on_paper(opened: Opened) -> None:
    page = opened.page
    plot = page.locator("#run0-training .plot")

    def grounds() -> tuple[str, str]:
        ground = "element => getComputedStyle(element).backgroundColor"
        return page.locator("body").evaluate(ground), plot.locator(".main-svg").first.evaluate(ground)

    assert grounds() == (LIGHT, LIGHT)
    page.emulate_media(color_scheme="dark")
    assert grounds() == (DARK, DARK)
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert grounds() == (LIGHT, LIGHT)
    assert page.locator(".plot").count() == page.locator(".plot[data-drawn=light]").count()
    assert page.locator("nav").is_hidden()
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert grounds() == (DARK, DARK)
    opened.traffic.assert_only(opened.file.as_uri())


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> list[RunData]:
    """A training, and the same but that a layer's weights grow tenfold before step 20."""

    def plant(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("layers.1.weight").mul_(10)

    folder = tmp_path_factory.mktemp("parted")
    return [train(folder, Perceptron, 0), train(folder, Perceptron, 0, plant=plant, at=20)]


def part_of(html: str, begin: str, end: str) -> list[list[str]]:
    """The cells of the rows between two places of a page, as text."""
    rows = re.findall(r"<tr>(.*?)</tr>", html.partition(begin)[2].partition(end)[0], re.DOTALL)
    return [[re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)] for row in rows]


def test_where_runs_part_is_in_the_report_of_several(parted: list[RunData]) -> None:
    html = report_html(parted)
    assert "parts at step 20, compared from step 0 to step 38" in html
    rows = [row for row in part_of(html, 'id="parted"', 'id="shared-0"') if row]
    assert [row[1:4] for row in rows if row[3] == "parameter weight l2"] == [["20", "layers.1", "parameter weight l2"]]
    (weight,) = (row for row in rows if row[3] == "parameter weight l2")
    norms = [statsbridge.load(run.path).series("layers.1", "parameter", "l2", tensor="weight") for run in parted]
    before, after = (series["value"].to_pylist()[series["step"].to_pylist().index(20)] for series in norms)
    assert after == pytest.approx(10 * before, rel=0.01)
    assert float(weight[5]) == pytest.approx(after, rel=5e-3)
    low, high = map(float, weight[6].split(" to "))
    assert low < before < high < after
    assert {int(row[1]) for row in rows} >= {20}
    assert min(int(row[1]) for row in rows) == 20


def test_runs_that_do_not_part_are_said_not_to(parted: list[RunData]) -> None:
    html = report_html([parted[0], parted[0]])
    assert "does not part from it between step 0 and step 38" in html
    assert not [row for row in part_of(html, 'id="parted"', 'id="shared-0"') if row]


def test_one_module_that_only_one_run_has_is_told_as_one(tmp_path: Path) -> None:
    runs = [new_run(tmp_path, name) for name in ("small", "large")]
    for count, run in enumerate(runs, 1):
        modules = {"step": 0, "module": [f"m{number}" for number in range(count)], "type": "Linear", "call": 0}
        modules |= {"order": list(range(count)), "depth": list(range(count)), "leaf": True, "parameters": 10}
        write_run(run, {"modules": modules}, *({"stats": stats_rows(step, count)} for step in range(3)))
    html = report_html([statsbridge.load(run) for run in runs])
    assert "; 1 module that only one of the two has is not compared" in html


@pytest.mark.parametrize("withheld", [0, 1])
def test_where_a_run_parts_is_withheld_with_its_findings(parted: list[RunData], withheld: int) -> None:
    subjects = [Subject(run, "finished", PolicyFacts(alerts=place != withheld)) for place, run in enumerate(parted)]
    html = report_html(subjects)
    assert "withheld by the policy" in html
    assert "parts at step" not in html
    assert not [row for row in part_of(html, 'id="parted"', 'id="shared-0"') if row]


def test_pictures_that_take_too_much_are_drawn_coarser_with_every_spike(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    writer = Writer(run)
    values = np.sin(np.arange(20_000) / 300)
    values[12_345] = 99.0
    steps = np.arange(20_000)
    assert writer.submit(
        lambda: {"scalars": {"step": steps, "iteration": steps, "time": steps * 1.0, "name": "loss", "value": values}}
    )
    assert writer.close()
    sizes = []
    for most in (10**9, 10_000):
        drawn = draw("one", "", "", partial(figures.training, load(run)), most)
        assert isinstance(drawn, Picture)
        (loss,) = (trace for trace in drawn.figure["data"] if trace["name"] == "loss")
        assert max(value for value in loss["y"] if value is not None) == 99.0
        assert loss["x"][loss["y"].index(99.0)] == 12_345
        sizes.append(len(json.dumps(drawn.figure)))
    assert sizes[1] < sizes[0] / 2


def test_changes_lead_from_one_figure_to_the_other() -> None:
    old = {"a": [1, {"b": "x", "c": 2}], "d": {"e": 1}, "f": None, "g": 1}
    new = {"a": [1, {"b": "y", "c": 2}], "d": {"e": 1, "more": 2}, "f": None, "g": True}
    assert list(changes(old, new)) == [(("a", 1, "b"), "y"), (("d",), {"e": 1, "more": 2}), (("g",), True)]
    assert list(changes([1, 2], [1, 2, 3])) == [((), [1, 2, 3])]
    assert list(changes(old, old)) == []


def test_a_path_in_the_config_that_is_no_text(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with statsbridge.init(
        model, dir=tmp_path, config={"data": b"/data/caf\xe9".decode(errors="surrogateescape")}
    ) as run:
        run.step()
    file = write_report([load(run.path)], tmp_path / "report.html")
    assert "/data/caf" in file.read_bytes().decode("utf-8")


@pytest.mark.parametrize("given", ["some text", [1, {"a": 2}], 7, 0, [], False, None])
def test_a_config_that_somebody_has_made_no_mapping_is_shown_as_it_is(given: object, tmp_path: Path) -> None:
    runs = [new_run(tmp_path, name=name) for name in ("odd", "good")]
    for run in runs:
        write_run(run, {"stats": stats_rows(0, 2)})
    file = runs[0] / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "config": given, "versions": given}))
    for loaded in ([load(runs[0])], [load(run) for run in runs]):
        page = write_report(loaded, tmp_path / "report.html").read_text()
        assert "odd" in page
        if given is not None:
            shown = given if isinstance(given, str) else json.dumps(given)
            assert html.escape(shown, quote=False).replace('"', "&#34;") in page

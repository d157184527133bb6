"""The report in a real Chromium, opened from the disk with no network."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
import pyarrow.compute as pc
import pytest
import torch
from browser_helpers import Traffic, record_traffic
from torch import nn

import statsbridge
from statsbridge.analyze.run_data import RunData, load
from statsbridge.view.report import write_report
from statsbridge.view.report_pictures import changes

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


def test_changes_lead_from_one_figure_to_the_other() -> None:
    old = {"a": [1, {"b": "x", "c": 2}], "d": {"e": 1}, "f": None, "g": 1}
    new = {"a": [1, {"b": "y", "c": 2}], "d": {"e": 1, "more": 2}, "f": None, "g": True}
    assert list(changes(old, new)) == [(("a", 1, "b"), "y"), (("d",), {"e": 1, "more": 2}), (("g",), True)]
    assert list(changes([1, 2], [1, 2, 3])) == [((), [1, 2, 3])]
    assert list(changes(old, old)) == []

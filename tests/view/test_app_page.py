"""The live page in a real Chromium: what is drawn, clicked, searched, followed while written, and sent as a link."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from app_helpers import MARKUP, record, served
from browser_helpers import Traffic, record_traffic

import statsbridge

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DRAWN = "#content .js-plotly-plot .main-svg"
TABS = {
    "Depth": "depth",
    "Heat map": "heat",
    "Types": "types",
    "Grid": "grid",
    "Gradient flow": "gradients",
    "Updates": "updates",
    "Scalars": "scalars",
    "Compare": "compare",
}


class Site(NamedTuple):
    """A page over three runs, opened in a browser; `traffic` is all that it ever asked for."""

    folder: Path
    good: Path
    broken: Path
    browser: "Page"
    address: str
    token: str
    traffic: Traffic


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, browser: "Browser") -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("runs")
    good = record(folder, "good")
    broken = record(folder, MARKUP, nan_at=12)
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened = context.new_page()
    traffic = record_traffic(opened)
    with served(folder) as (page, port):
        address = f"http://127.0.0.1:{port}/"
        opened.goto(f"{address}?token={page.guard.token}")
        opened.wait_for_function(THERE)
        yield Site(folder, good, broken, opened, address, page.guard.token, traffic)
        context.close()


# What the page says that it shows, against its address without what only the tree and the colours need.
THERE = """() => {
    const wanted = new URLSearchParams(location.search);
    ['find', 'order', 'theme', 'open'].forEach(name => wanted.delete(name));
    const shown = (document.querySelector('#content') || {dataset: {}}).dataset.place;
    return shown !== undefined && shown.replace(/^[?]/, '') === wanted.toString();
}"""


def go(site: Site, query: str) -> "Page":
    """Go to a place of the page without loading it anew, as Back and Forward do."""
    site.browser.evaluate(
        "query => { history.pushState({}, '', query); dispatchEvent(new Event('popstate')); }", f"?{query}"
    )
    site.browser.wait_for_function(THERE)
    return site.browser


def follow_link(site: Site, query: str) -> "Page":
    """Load the whole page at a place."""
    site.browser.goto(f"{site.address}?{query}")
    site.browser.wait_for_function(THERE)
    return site.browser


def traces(page: "Page", name: str) -> list[dict[str, Any]]:
    """The data of the figure of that name, as Plotly holds them."""
    page.wait_for_selector(DRAWN)
    script = """name => {
        const all = [...document.querySelectorAll('#content .js-plotly-plot')];
        const found = all.find(one => (one.closest('.dash-graph') || one).id.includes('"' + name + '"'));
        return found.data.map(one => ({name: one.name, x: [...(one.x || [])], y: [...(one.y || [])]}));
    }"""
    found: list[dict[str, Any]] = page.evaluate(script, name)
    return found


def node(page: "Page", module: str) -> Any:
    return page.locator(f'#at-module [data-module="{module}"]')


def query_of(page: "Page") -> dict[str, str]:
    from urllib.parse import parse_qsl, urlsplit

    return dict(parse_qsl(urlsplit(page.url).query, keep_blank_values=True))


def test_the_list_of_runs_leads_to_each(site: Site) -> None:
    page = go(site, "")
    assert "token" not in page.url
    rows = page.locator("#runs tbody tr")
    assert rows.count() == 2
    assert MARKUP in rows.nth(0).inner_text()  # the newest first
    assert "finished" in rows.nth(1).inner_text().lower()
    assert "12" in rows.nth(1).inner_text()  # of 24 steps every second one was sampled
    rows.nth(1).get_by_role("link").first.click()
    page.wait_for_selector(DRAWN)
    assert query_of(page) == {"run": site.good.name}


def test_the_curve_of_the_loss_is_the_one_on_disk(site: Site) -> None:
    page = go(site, f"run={site.good.name}")
    loss = next(one for one in traces(page, "training") if one["name"] == "loss")
    rows = [row for row in statsbridge.load(site.good).scalars.to_pylist() if row["name"] == "loss"]
    assert loss["x"] == [row["step"] for row in rows]
    np.testing.assert_allclose(loss["y"], [row["value"] for row in rows], rtol=1e-6)


@pytest.mark.parametrize("label", TABS)
def test_each_tab_draws(site: Site, label: str) -> None:
    page = site.browser
    if "run" not in query_of(page):
        go(site, f"run={site.good.name}")
    page.get_by_role("tab", name=label, exact=True).click()
    page.wait_for_selector(f"#content .dash-graph[id*='{TABS[label]}'] .main-svg")
    assert any(one["y"] for one in traces(page, TABS[label]))


def test_a_module_is_found_and_clicked_and_its_series_are_those_on_disk(site: Site) -> None:
    page = go(site, f"run={site.good.name}")
    node(page, "block.1").wait_for()
    page.locator("#at-find").fill("layernorm")
    node(page, "stem").wait_for(state="detached")
    assert page.locator("#tree-note").inner_text() == "1 of 8 modules"
    assert node(page, "block").count() == 1  # the way to it stays
    page.locator("#at-find").fill("")
    node(page, "stem").click()
    page.wait_for_selector("#module-name")
    assert page.locator("#module-name").inner_text() == "stem"
    assert query_of(page) == {"run": site.good.name, "module": "stem", "tab": "module"}
    found = traces(page, "module")
    data = statsbridge.load(site.good)
    for site_name, statistic, tensor in (("activation", "std", None), ("activation_grad", "l2", None)):
        series = data.series("stem", site_name, statistic, tensor=tensor)
        curve = next(one for one in found if one["name"] == site_name)
        assert curve["x"] == series["step"].to_pylist()
        np.testing.assert_allclose(curve["y"], series["value"].to_pylist(), rtol=1e-6)
    # The raw curve stays behind the smoothed one.
    assert sum("smoothed" in one["name"] for one in found) >= 2


def test_the_tree_is_in_the_order_of_the_data_or_of_the_names(site: Site) -> None:
    def order() -> list[str]:
        return [one.get_attribute("data-module") for one in page.locator("#at-module [data-module]").all()]

    page = go(site, f"run={site.good.name}")
    node(page, "block.1").wait_for()
    assert order() == ["", "stem", "shared", "block", "block.0", "block.1", "block.2", MARKUP]
    page.locator("#at-order").get_by_text("Name").click()
    page.wait_for_function("() => document.querySelectorAll('#at-module [data-module]')[1].dataset.module !== 'stem'")
    assert order() == ["", MARKUP, "block", "block.0", "block.1", "block.2", "shared", "stem"]
    node(page, "block").locator(".tree-arrow").click()
    node(page, "block.1").wait_for(state="detached")
    assert query_of(page)["order"] == "name"


def test_findings_come_first_mark_the_tree_and_lead_to_the_module(site: Site) -> None:
    page = go(site, f"run={site.broken.name}")
    first = page.locator("#findings .finding").first
    first.wait_for()
    assert "critical" in first.inner_text().lower()
    assert "block.1" in first.inner_text()
    node(page, "block.1").locator(".tree-mark.critical").wait_for()
    assert node(page, "block").locator(".tree-mark.inside").count() == 1
    first.get_by_role("link", name="block.1").click()
    page.wait_for_selector("#module-name")
    assert page.locator("#module-name").inner_text() == "block.1"
    page.go_back()
    page.locator("#findings .finding").first.wait_for()
    assert query_of(page) == {"run": site.broken.name}


def test_a_link_shows_the_same_place(site: Site) -> None:
    query = {
        "run": site.good.name,
        "tab": "depth",
        "site": "activation",
        "statistic": "mean",
        "backward_statistic": "abs_mean",
        "step": "8",
        "modules": "block*",
        "find": "linear",
        "theme": "dark",
    }
    page = follow_link(site, "&".join(f"{name}={value}" for name, value in query.items()))
    page.wait_for_selector(DRAWN)
    assert query_of(page) == query
    assert page.locator("#at-statistic").input_value() == "mean"
    assert page.locator("#at-backward_statistic").input_value() == "abs_mean"
    assert page.locator("#said-step").inner_text() == "8"
    assert page.locator("#at-find").input_value() == "linear"
    assert page.locator("html").get_attribute("data-mantine-color-scheme") == "dark"
    title = page.locator("#content .gtitle").first.text_content() or ""
    assert "step 8" in title
    profile = statsbridge.load(site.good).depth_profile("activation", "mean", step=8, modules="block*")
    drawn = [one["y"] for one in traces(page, "depth") if one["name"] == "activation mean"]
    np.testing.assert_allclose(drawn[0], profile["value"].to_pylist(), rtol=1e-6)
    # The link to send lets in somebody who has nothing else.
    page.get_by_role("button", name="Copy link").click()
    page.get_by_role("button", name="Copied").wait_for()
    sent = page.evaluate("() => navigator.clipboard.readText()")
    assert site.token in sent
    assert page.context.browser is not None
    other = page.context.browser.new_context()
    opened = other.new_page()
    opened.goto(sent)
    opened.wait_for_function(THERE)
    assert query_of(opened) == query
    other.close()


def test_branches_that_are_open_are_in_the_link_and_back_shuts_them(site: Site) -> None:
    def branches() -> list[str]:
        return [one.get_attribute("data-module") for one in page.locator("#at-module [data-module]").all()]

    page = go(site, f"run={site.good.name}&tab=events")
    node(page, "block.1").wait_for()
    everything = branches()
    node(page, "block").locator(".tree-arrow").click()
    node(page, "block.1").wait_for(state="detached")
    page.wait_for_function("() => new URLSearchParams(location.search).has('open')")
    closed = branches()
    assert closed == [one for one in everything if not one.startswith("block.")]
    sent = page.locator("#link").evaluate("() => location.search")
    follow_link(site, sent.removeprefix("?"))
    node(page, "stem").wait_for()
    page.wait_for_function(
        "count => document.querySelectorAll('#at-module [data-module]').length === count", arg=len(closed)
    )
    assert branches() == closed
    node(page, "block").locator(".tree-arrow").click()
    node(page, "block.1").wait_for()
    assert branches() == everything
    assert "open" not in query_of(page)  # as it is by itself
    page.go_back()
    node(page, "block.1").wait_for(state="detached")
    assert branches() == closed
    node(page, "").locator(".tree-arrow").click()  # nothing open is something to say too
    node(page, "stem").wait_for(state="detached")
    page.wait_for_function("() => new URLSearchParams(location.search).get('open') === ''")
    follow_link(site, page.evaluate("() => location.search").removeprefix("?"))
    node(page, "").wait_for()
    assert branches() == [""]


def test_a_link_within_the_page_keeps_colours_and_order(site: Site) -> None:
    page = go(site, f"run={site.broken.name}&theme=dark&order=name")
    first = page.locator("#findings .finding").first
    first.get_by_role("link", name="block.1").click()
    page.wait_for_selector("#module-name")
    assert query_of(page) == {
        "run": site.broken.name, "tab": "module", "module": "block.1", "theme": "dark", "order": "name",
    }  # fmt: skip
    assert page.locator("html").get_attribute("data-mantine-color-scheme") == "dark"
    page.go_back()
    page.locator("#findings .finding").first.wait_for()
    go(site, f"run={site.broken.name}")  # Back and Forward lead to what was there
    page.wait_for_function("() => document.documentElement.dataset.mantineColorScheme === 'light'")


def test_the_first_picture_needs_no_script(site: Site, browser: "Browser") -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    scripts = re.compile("_dash-component-suites")
    page.route(scripts, hold)
    page.goto(f"{site.address}?token={site.token}&run={site.good.name}", wait_until="commit")
    page.wait_for_function("() => (document.querySelector('#first-picture img') || {}).naturalWidth > 0")
    address = page.locator("#first-picture img").evaluate("one => one.currentSrc")
    image = page.context.request.get(address)
    assert image.headers["content-type"].startswith("image/svg+xml")
    assert "loss" in image.text()
    assert len(held) > 0  # and none of them has come
    for one in held:
        one.continue_()
    page.unroute(scripts)
    page.wait_for_selector(DRAWN)
    page.locator("#first-picture").wait_for(state="detached")
    context.close()


def test_the_picture_is_drawn_while_the_button_is_pressed(site: Site) -> None:
    page = go(site, f"run={site.good.name}")
    box = node(page, "block.0").bounding_box()
    assert box is not None
    before = len(site.traffic.requests)
    page.mouse.move(box["x"] + 30, box["y"] + box["height"] / 2)
    with page.expect_response("**/contents") as answered:
        page.mouse.down()
    assert answered.value.status == 200
    assert query_of(page) == {"run": site.good.name}  # nothing is shown yet
    page.mouse.up()
    page.wait_for_selector("#module-name")
    asked = answered.value.request.post_data_json["query"].removeprefix("?")
    assert dict(part.split("=") for part in asked.split("&")) == query_of(page)
    page.wait_for_selector(DRAWN)
    assert len([url for url in site.traffic.requests[before:] if url.endswith("/contents")]) == 1


def test_a_click_on_another_module_redraws_the_same_figure_as_it_is_on_disk(site: Site) -> None:
    page = go(site, f"run={site.good.name}&tab=module&module=block.0")
    page.wait_for_selector(DRAWN)
    page.evaluate("() => { document.querySelector('#content .js-plotly-plot').marked = true; }")
    axis = "document.querySelector('#content .js-plotly-plot')._fullLayout.xaxis"
    page.evaluate("() => Plotly.relayout(document.querySelector('#content .js-plotly-plot'), {'xaxis.range': [2, 6]})")
    go(site, f"run={site.good.name}&tab=module&module=block.0&smoothing=0.5")
    assert page.evaluate(f"() => {axis}.range") == [2, 6]  # of the same series what was zoomed stays so
    node(page, "stem").click()
    page.wait_for_function("() => document.querySelector('#module-name').innerText === 'stem'")
    page.wait_for_function(THERE)
    assert "Linear" in page.locator("#module-facts").inner_text()
    assert page.evaluate(f"() => {axis}.autorange")  # and of others all is shown
    series = statsbridge.load(site.good).series("stem", "activation", "std")
    curve = next(one for one in traces(page, "module") if one["name"] == "activation")
    assert curve["x"] == series["step"].to_pylist()
    np.testing.assert_allclose(curve["y"], series["value"].to_pylist(), rtol=1e-6)
    # Plotly changed the figure that was there: a new one takes it several times as long.
    assert page.evaluate("() => document.querySelector('#content .js-plotly-plot').marked")
    page.wait_for_function("() => document.querySelector('#at-call').disabled")
    high = page.evaluate("() => document.querySelector('#content .js-plotly-plot').clientHeight")
    node(page, "shared").click()  # which is called twice a step, and has no parameters
    page.wait_for_function("() => !document.querySelector('#at-call').disabled")
    page.wait_for_function(
        """high => {
            const plot = document.querySelector('#content .js-plotly-plot');
            return plot.marked && plot.clientHeight < high && plot._fullLayout.height === plot.clientHeight;
        }""",
        arg=high,
    )


def test_of_two_clicks_the_later_one_counts(site: Site) -> None:
    page = go(site, f"run={site.good.name}&tab=module&module=block.0")
    page.wait_for_selector(DRAWN)
    held: list[Any] = []

    def hold(route: Any) -> None:
        if "module=stem" in route.request.post_data:
            held.append(route)
        else:
            route.continue_()

    page.route("**/contents", hold)
    node(page, "stem").click()
    page.wait_for_function("() => location.search.includes('module=stem')")
    node(page, "block.1").click()
    page.wait_for_function(THERE)
    assert len(held) > 0
    with page.expect_response("**/contents"):
        for one in held:
            one.continue_()
    page.wait_for_timeout(300)
    assert page.locator("#module-name").inner_text() == "block.1"
    assert page.evaluate(THERE)
    held.clear()
    node(page, "stem").click()
    page.wait_for_function("() => location.search.includes('module=stem')")
    page.go_back()  # to what is still on the screen
    page.wait_for_function("() => location.search.includes('module=block.1')")
    with page.expect_response("**/contents"):
        for one in held:
            one.continue_()
    page.wait_for_timeout(300)
    page.unroute("**/contents")
    assert page.locator("#module-name").inner_text() == "block.1"
    assert page.evaluate(THERE)


def test_smoothing_leaves_the_raw_curve(site: Site) -> None:
    def smoothed() -> list[str]:
        return [one["name"] for one in traces(page, "scalars") if "smoothed" in one["name"]]

    page = go(site, f"run={site.good.name}&tab=scalars&names=loss&smoothing=0.5")
    raw = next(one for one in traces(page, "scalars") if one["name"] == "loss")
    assert smoothed() == ["loss, smoothed (0.5)"]
    go(site, f"run={site.good.name}&tab=scalars&names=loss&smoothing=0")
    assert smoothed() == []
    assert next(one for one in traces(page, "scalars") if one["name"] == "loss") == raw


def test_runs_are_compared(site: Site) -> None:
    page = go(site, f"run={site.good.name}&tab=compare&runs={site.broken.name}")
    names = {one["name"] for one in traces(page, "compare")}
    assert any("good" in name for name in names)
    assert any("&lt;img" in name for name in names)
    assert page.locator("#compared tbody tr").count() == 2


def test_histograms_and_events(site: Site) -> None:
    page = go(site, f"run={site.good.name}&tab=histograms&module=block.1&site=parameter")
    page.wait_for_selector(DRAWN)
    page.wait_for_function("() => document.querySelectorAll('#content .dash-graph .main-svg').length >= 2")
    go(site, f"run={site.good.name}&tab=events")
    page.wait_for_selector("#events, #no-events")


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("run={run}&step=many&tab=types", "step 'many' is no whole number"),
        ("run={run}&tab=nothing", "tab 'nothing' is none of overview"),
        ("run={run}&smoothing=2", "smoothing '2' is no number from 0 to 0.99"),
        ("run={run}&tab=types&site=nothing", "nothing"),
        ("run={run}&tab=heat&statistic=nothing", "unknown statistic nothing"),
        ("run={run}&tab=module&module=nothing", "There is no module 'nothing'"),
        ("run=nothing", "no run 'nothing'"),
        ("run={run}&tab=compare&scalar=nothing", "unknown scalar nothing"),
    ],
)
def test_what_is_wrong_in_an_address_is_said(site: Site, query: str, said: str) -> None:
    page = go(site, query.format(run=site.good.name))
    assert said in page.locator("#content").inner_text()


def test_names_are_never_markup(site: Site) -> None:
    page = site.browser
    for tab in ("overview", "module", "depth", "heat", "grid", "gradients", "histograms", "compare"):
        go(site, f"run={site.broken.name}&tab={tab}&module=%3Cimg%20src%3Dx%20onerror%3Dpwned%3D1%3E")
        page.wait_for_selector(DRAWN)
    assert node(page, MARKUP.replace('"', "")).locator(".tree-name").inner_text() == MARKUP
    assert page.locator("img[src=x]").count() == 0
    assert page.evaluate("() => typeof pwned") == "undefined"


def test_a_click_on_a_picture_opens_the_module(site: Site) -> None:
    page = go(site, f"run={site.good.name}&tab=heat")
    for _ in range(2):  # once back, the same click opens it again
        page.wait_for_selector(DRAWN)
        box = page.locator("#content .nsewdrag").first.bounding_box()
        assert box is not None
        # The rows lie from the input down: the first of them is the stem's.
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 8)
        page.wait_for_selector("#module-name")
        assert page.locator("#module-name").inner_text() == "stem"
        page.go_back()
        page.wait_for_function(THERE)
        assert query_of(page)["tab"] == "heat"


PROGRAM = """
import sys
from app_helpers import Marked
import statsbridge, torch
model = Marked()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = statsbridge.init(model, every=1, dir=sys.argv[1], name="live", flush_interval=0.1)
for step in range(int(sys.argv[2])):
    x = torch.randn(8, 8)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.step(loss=loss)
    if step % 5 == 4:
        print(step, flush=True)
        sys.stdin.readline()
run.finish()
print("finished", flush=True)
"""


def test_a_run_is_followed_while_it_is_written(site: Site) -> None:
    def steps() -> list[int]:
        found: list[int] = next(one for one in traces(page, "training") if one["name"] == "loss")["x"]
        return found

    command = [sys.executable, "-c", PROGRAM, str(site.folder), "15"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    ) as training:
        assert training.stdin is not None
        assert training.stdout is not None
        assert training.stdout.readline().strip() == "4"
        page = go(site, "")
        page.locator("#runs").get_by_role("link", name="live").wait_for()  # the list grows too
        page.locator("#runs").get_by_role("link", name="live").click()
        page.wait_for_selector(DRAWN)
        page.wait_for_function("() => document.querySelector('#badge').innerText.toLowerCase() === 'running'")
        loss = "document.querySelector('#content .js-plotly-plot').data.find(one => one.name === 'loss')"
        page.wait_for_function(f"() => {loss}")  # a run that has just begun has no step yet
        assert steps()[0] == 0
        plot = "document.querySelector('#content .js-plotly-plot')"
        page.evaluate(f"() => Plotly.relayout({plot}, {{'xaxis.range': [0, 3]}})")
        before = len(steps())
        training.stdin.write("\n")
        training.stdin.flush()
        assert training.stdout.readline().strip() == "9"
        grown = (
            "n => document.querySelector('#content .js-plotly-plot').data.find(one => one.name === 'loss').x.length > n"
        )
        page.wait_for_function(grown, arg=before)
        training.stdin.write("\n\n")
        training.stdin.flush()
        assert training.stdout.readline().strip() == "14"
        assert training.stdout.readline().strip() == "finished"
    page.wait_for_function("() => document.querySelector('#badge').innerText.toLowerCase() === 'finished'")
    page.wait_for_function(grown, arg=14)
    assert steps() == list(range(15))
    assert page.evaluate(f"() => {plot}._fullLayout.xaxis.range") == [0, 3]  # what is zoomed stays so


def test_the_page_asked_nobody_else_and_its_console_is_clean(site: Site) -> None:
    site.traffic.assert_only(site.address)
    assert not [url for url in site.traffic.requests[3:] if "token=" in url]
    assert re.match(r"http://127\.0\.0\.1:\d+/$", site.address)

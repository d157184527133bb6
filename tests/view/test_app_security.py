"""Who gets an answer from the live page, and who does not."""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from app_helpers import ask, served

from statsbridge.log import create_run
from statsbridge.view.app.page import Page

PAGES = (
    "/",
    "/_dash-layout",
    "/_dash-dependencies",
    "/assets/page.js",
    "/_favicon.ico",
    "/first.svg?run=one",
    "/nothing",
)
CALLBACK = "/_dash-update-component"


class Served(NamedTuple):
    page: Page
    port: int
    cookie: str
    run: str


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("runs")
    run = create_run(folder, name="one", config=None, information={})
    with served(folder) as (page, port):
        yield Served(page, port, f"{page.guard.cookie}={page.guard.token}", run.name)


def draw(site: Served, query: str, **headers: str) -> tuple[int, dict[str, str], str]:
    """Ask for the contents at an address, as the page's script does."""
    place = json.dumps({"query": query, "dark": False, "width": 900})
    return ask(site.port, "/contents", method="POST", body=place, **headers)


def call_back(site: Served, **headers: str) -> tuple[int, dict[str, str], str]:
    """Ask for the statistics of two sites, as Dash does."""
    body = {
        "output": "..at-statistic.data...at-backward_statistic.data..",
        "outputs": [{"id": "at-statistic", "property": "data"}, {"id": "at-backward_statistic", "property": "data"}],
        "inputs": [
            {"id": "at-site", "property": "value", "value": "activation"},
            {"id": "at-backward_site", "property": "value", "value": "activation_grad"},
        ],
        "changedPropIds": ["at-site.value"],
    }
    return ask(site.port, CALLBACK, method="POST", body=json.dumps(body), **headers)


@pytest.mark.parametrize("path", PAGES)
def test_without_the_token_nothing_is_answered(site: Served, path: str) -> None:
    status, _, text = ask(site.port, path)
    assert status == 403
    assert "one" not in text.split()
    assert site.page.guard.token not in text


@pytest.mark.parametrize("token", ["", "x", "\N{SNOWMAN}", "A" * 43])
def test_a_wrong_token_is_refused(site: Served, token: str) -> None:
    from urllib.parse import quote

    assert ask(site.port, f"/?token={quote(token)}")[0] == 403
    # Whoever has been let in is not let in by a link that is wrong.
    assert ask(site.port, f"/?token={quote(token)}", Cookie=site.cookie)[0] == 403


def test_a_wrong_cookie_is_refused(site: Served) -> None:
    assert ask(site.port, "/", Cookie=f"{site.page.guard.cookie}=x")[0] == 403
    assert ask(site.port, "/", Cookie=f"other={site.page.guard.token}")[0] == 403


def test_the_token_is_changed_for_a_cookie_and_leaves_the_address(site: Served) -> None:
    status, headers, text = ask(site.port, f"/?token={site.page.guard.token}&run=a%22%3Eb&tab=depth")
    assert status == 200
    assert "HttpOnly" in headers["set-cookie"]
    assert "SameSite=Strict" in headers["set-cookie"]
    assert site.page.guard.token not in text
    assert 'content="0;url=/?run=a%22%3Eb&amp;tab=depth"' in text
    assert ask(site.port, "/", Cookie=site.cookie)[0] == 200


@pytest.mark.parametrize("path", ["//evil.example/", "/%5Cevil.example/", "/x"])
def test_the_token_leads_to_no_other_address(site: Served, path: str) -> None:
    _, headers, text = ask(site.port, f"{path}?token={site.page.guard.token}")
    assert "evil" not in text
    assert "location" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1"]
)
def test_another_host_is_refused_even_with_the_token(site: Served, host: str) -> None:
    assert ask(site.port, "/", Cookie=site.cookie, Host=host)[0] in {400, 403}
    assert ask(site.port, f"/?token={site.page.guard.token}", Host=host)[0] in {400, 403}
    assert draw(site, "", Cookie=site.cookie, Host=host, Origin=f"http://{host}")[0] in {400, 403}


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1:8050", "[::1]:8050"])
def test_the_end_of_a_tunnel_is_served(site: Served, host: str) -> None:
    assert ask(site.port, "/", Cookie=site.cookie, Host=host)[0] == 200
    assert draw(site, "", Cookie=site.cookie, Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize("asked", [call_back, lambda site, **headers: draw(site, "", **headers)])
def test_a_request_needs_the_pages_own_origin(site: Served, asked: Any) -> None:
    own = f"http://127.0.0.1:{site.port}"
    assert asked(site, Cookie=site.cookie, Origin=own)[0] == 200
    assert asked(site, Origin=own)[0] == 403
    for origin in ("http://evil.example", "null", f"http://localhost:{site.port}", f"http://127.0.0.1:{site.port + 1}"):
        assert asked(site, Cookie=site.cookie, Origin=origin)[0] == 403, origin
    assert asked(site, Cookie=site.cookie)[0] == 403
    assert asked(site, Cookie=site.cookie, Origin=own, Sec_Fetch_Site="cross-site")[0] == 403


def test_what_is_no_place_is_refused_and_what_is_there_is_told_to_nobody_else(site: Served) -> None:
    own = f"http://127.0.0.1:{site.port}"
    odd = ('{"query": 1, "dark": 2, "width": "x"}', '{"query": "", "dark": 0, "width": Infinity}')
    for body in ("{}", "[]", "null", "{", *odd):
        status, headers, _ = ask(site.port, "/contents", method="POST", body=body, Cookie=site.cookie, Origin=own)
        assert status == 400
        assert headers["content-type"].startswith("text/plain")
    _, headers, text = draw(site, f"?run={site.run}", Cookie=site.cookie, Origin=own)
    assert headers["cache-control"] == "no-store"
    assert json.loads(text)["drawn"]["run"] == site.run


def test_the_second_of_two_first_requests_gets_script_and_style_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = os.walk

    def slowly(*given: Any, **named: Any) -> Any:
        time.sleep(0.5)
        return walk(*given, **named)

    monkeypatch.setattr(os, "walk", slowly)  # the way in which Dash looks for them
    with served(tmp_path) as (page, port), ThreadPoolExecutor(2) as pool:
        cookie = f"{page.guard.cookie}={page.guard.token}"
        answers = [pool.submit(ask, port, "/", Cookie=cookie) for _ in range(2)]
        texts = [answer.result()[2] for answer in answers]
    assert all("/assets/page.js" in text and "/assets/page.css" in text for text in texts)


def test_the_address_of_the_first_picture_is_no_markup(site: Served) -> None:
    query = "run=%22%3E%3Cscript%3Ealert(1)%3C/script%3E&theme=%22%3E%3Cb%3E"
    text = ask(site.port, f"/?{query}", Cookie=site.cookie)[2]
    assert 'src="/first.svg?run=%22%3E%3Cscript%3Ealert%281%29%3C%2Fscript%3E"' in text
    assert "alert(1)" not in text
    assert ask(site.port, f"/first.svg?{query}", Cookie=site.cookie)[0] == 204  # no such run, no picture


def test_only_reading_and_callbacks(site: Served) -> None:
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask(site.port, "/", method=method, Cookie=site.cookie)[0] == 405


def test_no_answer_lets_another_site_in(site: Served) -> None:
    for path, cookie in (("/", site.cookie), ("/assets/page.js", site.cookie), ("/", "")):
        _, headers, _ = ask(site.port, path, Cookie=cookie)
        assert "access-control-allow-origin" not in headers
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert policy["connect-src"] == "'self'"
        assert "unsafe" not in policy["script-src"]


@pytest.mark.parametrize("run", ["..", "../..", "/etc", "%2e%2e%2fsecret", "../secret", "one", ""])
def test_a_run_that_is_not_listed_is_refused(site: Served, tmp_path: Path, run: str) -> None:
    outside = create_run(
        site.page.library.folder.parent / "elsewhere", name="secret", config={"key": "hidden"}, information={}
    )
    own = f"http://127.0.0.1:{site.port}"
    wanted = [run, f"../elsewhere/{outside.name}", str(outside)]
    for one in wanted:
        if one:
            status, _, text = draw(site, f"?run={one}", Cookie=site.cookie, Origin=own)
            assert status == 200
            assert "no run" in text
            assert "hidden" not in text
            assert "choose one of the list" in text
    assert (
        "hidden"
        not in draw(
            site, f"?run={site.run}&tab=compare&runs=../elsewhere/{outside.name}", Cookie=site.cookie, Origin=own
        )[2]
    )


def test_assets_hold_no_other_files(site: Served) -> None:
    for path in (
        "/assets/../page.py",
        "/assets/%2e%2e/page.py",
        "/assets/..%2fpage.py",
        "/_dash-component-suites/statsbridge/__init__.py",
    ):
        status, _, text = ask(site.port, path, Cookie=site.cookie)
        assert status >= 400, path
        assert "import" not in text


def test_two_pages_have_two_tokens_and_cookies(site: Served, tmp_path: Path) -> None:
    other = Page(tmp_path)
    assert other.guard.token != site.page.guard.token
    assert other.guard.cookie != site.page.guard.cookie

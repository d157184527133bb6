"""A real Chromium for tests of pages: fixtures `browser` and `page`, and a record of all that a page asks for.

A folder's conftest.py takes the fixtures by `from browser_helpers import browser, page`.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

REQUIRED = "STATSBRIDGE_REQUIRE_BROWSER"
"""Set to 1 where a missing Chromium is a failure and no skip."""

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# What a page makes itself and no network sees.
_OWN_SCHEMES = ("data:", "blob:", "about:")


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """One Chromium for the tests of a module.

    Not for the session: Playwright's event loop counts as running in this thread for as long as it is open, and
    what calls `asyncio.run` meanwhile fails.
    """
    executable = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if executable is None:
        _missing(f"no Chromium on the path ({', '.join(_NAMES)}): install Debian's package chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("Playwright is not installed: pip install 'statsbridge[dev]'")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, headless=True, args=list(_FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: "Browser") -> Iterator["Page"]:
    """A fresh page of its own profile, 1,280 × 900 pixels."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


@dataclass
class Traffic:
    """All addresses that a page asked for, and what its console complained of."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def assert_only(self, *addresses: str) -> None:
        """Fail unless each request began with one of `addresses`, there was one, and the console is without errors."""
        foreign = [url for url in self.requests if not url.startswith((*addresses, *_OWN_SCHEMES))]
        assert not foreign, f"the page asked for {foreign}"
        assert self.requests, "the page asked for nothing: record it before it is opened"
        assert not self.errors, f"the console says {self.errors}"


def record_traffic(page: "Page") -> Traffic:
    """Record from now on what `page` asks for (web sockets too), its console's errors and warnings, its exceptions."""
    traffic = Traffic()

    def hear(message: "ConsoleMessage") -> None:
        if message.type in {"error", "warning"}:
            traffic.errors.append(f"{message.text} ({message.location.get('url', '')})")

    page.on("request", lambda request: traffic.requests.append(request.url))
    page.on("websocket", lambda socket: traffic.requests.append(socket.url))
    page.on("console", hear)
    page.on("pageerror", lambda error: traffic.errors.append(str(error)))
    return traffic


def _missing(reason: str) -> None:
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{reason} (${REQUIRED}=1)", pytrace=False)
    pytest.skip(reason)

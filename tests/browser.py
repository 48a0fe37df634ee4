"""A real browser for tests of pages: the machine's Chromium, driven by Playwright."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["browser", "open_page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium of one test file: Playwright's loop runs in this thread until its end."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on PATH; install it, for example with `apt install chromium`")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file or an address in a page of its own; the test fails when the page's console had
    errors, or when it asked for anything beyond its own origin."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    wrong: list[str] = []

    def opened(where: Path | str, **options: Any) -> Any:
        page = browser.new_page(**options) if options else context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: said.type == "error" and wrong.append(said.text))
        address = where.as_uri() if isinstance(where, Path) else where
        page.on(
            "request", lambda request: _beyond(request.url, address) and wrong.append(request.url)
        )
        page.goto(address)
        return page

    yield opened
    context.close()
    assert not wrong, wrong


def _beyond(url: str, address: str) -> bool:
    own = "/".join(address.split("/")[:3])
    return not url.startswith((own, "data:", "blob:"))

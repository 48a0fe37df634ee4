"""The tab of captures, in a browser: the list, the page of one, two compared, a broken one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.dashboard.captured import captured_runs
from tests.unit.dashboard.conftest import Site, served
from tests.unit.profile.conftest import measured_cpu

__all__ = ["measured_cpu"]

pytestmark = [pytest.mark.browser, pytest.mark.slow]
LONG = 120_000
"""Milliseconds in which a page was made, whatever else runs."""


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, measured_cpu: Path) -> Iterator[Site]:
    """The page over runs with captures; it asks for a token."""
    with served(captured_runs(tmp_path_factory.mktemp("captured")), "--control") as found:
        yield found


def test_captures_are_listed_opened_and_compared(
    captured: Site, open_page: Callable[..., Any], serious: Callable[[Any], list[str]]
) -> None:
    page = open_page(f"{captured.base}/#token={captured.token}")
    page.get_by_role("link", name="after", exact=True).click()
    page.get_by_role("link", name="Profile", exact=True).click()
    rows = page.get_by_role("table").locator("tbody tr")
    rows.nth(1).wait_for()
    assert rows.count() == 2
    assert not serious(page)

    rows.filter(has_not_text="cut-off").get_by_role("link").click()
    inner = page.frame_locator("iframe.capture")
    inner.get_by_role("heading", name="Step time by cause").first.wait_for(timeout=LONG)
    assert not serious(page)
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="In a tab of its own").click()
    alone = opened.value
    alone.get_by_role("heading", name="Step time by cause").first.wait_for()
    assert captured.token not in alone.url

    page.get_by_role("link", name="all captures").click()
    page.get_by_role("combobox", name="run before").select_option("before")
    page.get_by_role("combobox", name="before", exact=True).wait_for()
    chosen = page.get_by_role("combobox", name="after", exact=True)
    chosen.select_option(index=next(
        at for at, text in enumerate(chosen.locator("option").all_inner_texts())
        if text != "cut-off"
    ))  # fmt: skip
    page.get_by_role("link", name="Compare", exact=True).last.click()
    inner.get_by_text("FLOPs of a step").first.wait_for(timeout=LONG)
    inner.get_by_text("added").first.wait_for()
    assert not list(captured.folder.rglob("*.html"))


def test_a_broken_capture_is_one_paragraph(captured: Site, browser: Any) -> None:
    page = browser.new_page()  # the answer, 400, is in its console
    page.goto(f"{captured.base}/#token={captured.token}")
    page.get_by_role("link", name="after", exact=True).click()
    page.get_by_role("link", name="Profile", exact=True).click()
    page.get_by_role("link", name="cut-off").click()
    said = page.locator(".tab-body").get_by_role("alert")
    said.wait_for(timeout=LONG)
    assert "truncated" in said.inner_text()
    page.close()

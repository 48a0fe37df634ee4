"""The shared modules of interactive pages, in a real browser."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fornax.pages import SCRIPTS, STYLES, modules, standalone

pytestmark = pytest.mark.browser

_PAGE = Path(__file__).parent / "shared_page"

_TEXTS = [
    ("seconds", 0.0123456, "12.3 ms"),
    ("seconds", 1.5e-9, "1.5 ns"),
    ("seconds", 0.9999e-3, "1 ms"),
    ("seconds", 3700, "1 h 1 min"),
    ("bytes", 3 * 2**30, "3 GiB"),
    ("bytes", 1023, "1,023 B"),
    ("si", 2.144e12, "2.14 T"),
    ("percent", 0.0512, "5.12 %"),
    ("count", 1234567, "1,234,567"),
    ("number", None, "—"),
    ("times", 1.804, "1.8\u00d7"),
]


@pytest.fixture
def page(tmp_path: Path, open_page: Callable[..., Any]) -> Any:
    hostile = "</script><img src=x onerror=alert(1)>"
    rows = [{"name": f"fusion.{i}", "seconds": i * 1e-3} for i in range(400)]
    rows += [{"name": hostile, "seconds": None}]
    curves = {
        "x": list(range(100)),
        "series": [
            {"label": "loss", "y": [1 / (i + 1) for i in range(100)]},
            {"label": "rate", "y": [i / 100 for i in range(100)]},
        ],
    }
    data = {"rows": rows, "curves": curves, "texts": [text[:2] for text in _TEXTS]}
    made = tmp_path / "page.html"
    text = standalone(
        title="Shared",
        modules=modules(_PAGE, "test"),
        entry="test/main.js",
        styles=STYLES,
        scripts=SCRIPTS,
        data=data,
    )
    made.write_text(text)
    return open_page(made)


def test_a_table_sorts_filters_and_is_walked_by_keyboard(page: Any) -> None:
    rows = page.locator("tbody tr")
    assert "fusion.399" in rows.first.inner_text()
    assert rows.count() == 200
    page.get_by_role("button", name="Show more").click()
    assert rows.count() == 401
    assert "onerror" in rows.last.inner_text()  # unknown values last, names as text
    page.get_by_role("button", name="Time").click()
    assert "fusion.0" in rows.first.inner_text()
    assert page.locator("th[aria-sort=ascending]").count() == 1
    search = page.get_by_role("searchbox")
    search.fill("^fusion\\.1.$")
    assert rows.count() == 10
    assert page.url.endswith("filter=%5Efusion%5C.1.%24")
    search.fill("(")
    assert search.get_attribute("aria-invalid") == "true"
    assert rows.count() == 200
    search.fill("img")
    assert page.locator("img").count() == 0
    search.fill("")
    rows.first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#said").inner_text() == "fusion.1"
    assert rows.nth(1).get_attribute("aria-selected") == "true"


def test_tabs_follow_keys_and_the_address_and_a_chart_zooms(page: Any) -> None:
    page.get_by_role("tab", name="Rows").focus()
    page.keyboard.press("ArrowRight")
    assert page.url.endswith("#curves")
    chart = page.get_by_role("img", name="two curves")
    chart.locator(".uplot").wait_for()
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".legend button").first.locator("b").inner_text() != ""
    page.keyboard.press("+")
    assert page.locator("#said").inner_text() == "zoomed"
    page.keyboard.press("Escape")
    assert page.locator("#said").inner_text() == "whole"
    page.get_by_role("button", name="rate").click()
    assert page.get_by_role("button", name="rate").get_attribute("aria-pressed") == "false"
    page.go_back()
    assert page.get_by_role("tab", name="Rows").get_attribute("aria-selected") == "true"


def test_figures_read_as_people_write_them(page: Any) -> None:
    page.get_by_role("tab", name="Texts").click()
    shown = page.locator("#texts").inner_text().splitlines()
    assert shown == [text for *_, text in _TEXTS]


def test_the_switch_goes_from_the_system_to_dark_and_light(page: Any) -> None:
    switch = page.get_by_role("button", name="Theme")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(paper) == "rgb(246, 248, 251)"
    switch.click()
    assert page.evaluate(paper) == "rgb(15, 19, 26)"
    page.emulate_media(color_scheme="dark")
    switch.click()
    assert page.evaluate(paper) == "rgb(246, 248, 251)"

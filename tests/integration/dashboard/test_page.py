"""Every view of the page, in a browser, from the server that users start."""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from tests.integration.dashboard.example_runs import HOSTILE
from tests.unit.dashboard.conftest import Site

pytestmark = pytest.mark.browser

View = Callable[..., Any]
SEEDS = ",".join(f"base/seed-{seed}" for seed in range(3)) + ",base/rate-0.08"

VIEWS = {
    "runs": ("#runs", "tr.choice >> text=base/seed-0"),
    "grouped": ("#runs?group=optim.learning_rate", "tr.group >> text=optim.learning_rate = 0.08"),
    "compare": (f"#compare?runs={quote(SEEDS)}", "figure[data-name=loss] canvas"),
    "seeds": (
        f"#compare?runs={quote(SEEDS)}&seeds=1&smooth=50&logy=1",
        "figure[data-name=loss] >> text=base/seed-0 and 2 other seeds",
    ),
    "curves": ("#run?id=base/seed-0", "figure[data-name=loss] canvas"),
    "goodput": ("#run?id=launched&tab=goodput", "text=3 starts, 2 faults"),
    "samples": ("#run?id=grpo&tab=samples&colour=logprobs", ".sample.current .tokens"),
    "panes": (
        "#run?id=grpo&tab=samples&colour=advantages&panes=grpo%4010,grpo-low-rate%4010",
        ".pane:nth-child(2) .sample",
    ),
    "images": ("#run?id=unet&tab=images", ".images img >> nth=11"),
    "memory": ("#run?id=base/seed-0&tab=memory", ".roofline circle >> nth=3"),
    "server": ("#run?id=server&tab=server", "text=cache used >> nth=0"),
    "data": ("#run?id=base/seed-0&tab=data", "text=rows a batch"),
    "quantization": ("#run?id=llama-w4", "text=model.layers.3.self_attn.o_proj.weight"),
    "events": ("#run?id=launched&tab=events", "td >> text=state: forming >> nth=0"),
    "files": ("#run?id=base/seed-0&tab=files", "text=metrics.jsonl"),
    "config": ("#run?id=base/seed-0&tab=config", "pre >> text=learning_rate: 0.02"),
}


@pytest.mark.parametrize(("fragment", "there"), VIEWS.values(), ids=VIEWS)
def test_every_view_draws(view: View, fragment: str, there: str) -> None:
    page = view(fragment)
    page.locator(there).first.wait_for()
    assert page.locator("[role=alert]").count() == 0


@pytest.mark.slow
def test_a_run_of_the_trainer_fills_its_views(trained: Site, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{trained.base}/#run?id=tiny")
    for tab, there in (
        ("curves", "figure[data-name='eval/loss'] canvas"),
        ("goodput", "text=went into the 12 steps that were kept"),
        ("memory", "text=Memory at the peak"),
        ("data", "text=Position at step 12"),
        ("files", "section:has(h2:text('Checkpoints')) >> text=12"),
        ("config", "pre >> text=num_kv_heads: 2"),
    ):
        page.evaluate("to => { location.hash = to; }", f"#run?id=tiny&tab={tab}")
        page.locator(there).first.wait_for()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    view: View, serious: Callable[[Any], list[str]], scheme: str
) -> None:
    page = view("#runs", color_scheme=scheme)
    found = []
    for fragment, there in VIEWS.values():
        page.evaluate("to => { location.hash = to; }", fragment)
        page.locator(there).first.wait_for()
        found += serious(page)
    page.keyboard.press("?")
    page.locator("dialog").wait_for()
    found += serious(page)
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_a_phone_scrolls_down_only(view: View) -> None:
    page = view("#runs", viewport={"width": 390, "height": 844})
    for name, (fragment, there) in VIEWS.items():
        page.evaluate("to => { location.hash = to; }", fragment)
        page.locator(there).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name


@pytest.mark.slow
def test_the_list_filters_sorts_selects_and_pins(view: View) -> None:
    page = view("#runs")
    rows = page.locator("tbody tr.choice")
    page.keyboard.press("/")
    page.keyboard.type("^base/seed")
    rows.nth(3).wait_for(state="detached")
    assert rows.count() == 3
    search = page.locator("input[data-search]")
    search.fill("learning_rate=0.08")
    page.locator("text=1 of 11").wait_for()
    search.fill("")
    page.get_by_role("button", name="loss", exact=True).click()
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("loss")
    assert "sort=-loss" in page.url
    for run in ("base/seed-1", "base/seed-0"):
        page.get_by_role("checkbox", name=f"select {run}").click()
    page.get_by_role("button", name="pin grpo", exact=True).click()
    assert rows.first.locator("[data-run]").inner_text() == "grpo", "pins stand first"
    page.reload()
    page.locator("text=2 selected").wait_for()
    assert rows.first.locator("[data-run]").inner_text() == "grpo", "and stay"
    page.keyboard.press("c")
    page.locator("h1 >> text=Compare").wait_for()
    different = page.locator("section", has_text="Config").locator("tbody tr")
    assert [row.split("\t")[0] for row in different.all_inner_texts()] == ["seed"]


@pytest.mark.slow
def test_zoom_stays_in_the_address(view: View) -> None:
    page = view("#run?id=base/seed-0")
    over = page.locator("figure[data-name=loss] .u-over")
    page.locator("figure[data-name=accuracy] canvas").wait_for()
    over.hover()  # where it stays: what comes above moves it
    width = over.bounding_box()["width"]
    over.hover(position={"x": width * 0.25, "y": 50})
    page.mouse.down()
    over.hover(position={"x": width * 0.5, "y": 60})
    page.mouse.up()
    page.get_by_role("button", name="whole range").wait_for()
    low, high = (float(re.search(rf"{name}=([\d.]+)", page.url)[1]) for name in ("from", "to"))
    assert 70 < low < 82
    assert 145 < high < 155
    page.reload()
    page.locator("figure[data-name=accuracy] canvas").wait_for()
    page.keyboard.press("0")
    page.locator("figure[data-name=loss] .u-over").dblclick()
    page.locator("text=Drag in a chart").wait_for()
    assert "from=" not in page.url


def test_samples_by_keyboard(view: View) -> None:
    page = view("#run?id=grpo&tab=samples&panes=grpo%4010,grpo-low-rate%4010")
    page.locator(".pane:nth-child(2) .sample").wait_for()
    page.keyboard.press("ArrowRight")
    page.locator("text=from questions.jsonl:22").nth(1).wait_for()
    for _ in range(4):
        page.keyboard.press("j")
    page.locator("text=sample 5 of 8").wait_for()
    assert (
        page.locator(".sample .prompt").all_inner_texts()
        == ["What is 4 times 0? Think, then say it.\n"] * 2
    )
    assert "sample=4" in page.url
    assert "grpo%2540" not in page.url


def test_what_files_hold_is_text(view: View, site: Site) -> None:
    name = "hostile/" + HOSTILE.replace("/", "")
    page = view(f"#run?id={quote(name)}")
    page.locator("figcaption", has_text=HOSTILE).wait_for()
    page.evaluate("to => { location.hash = to; }", "#run?id=grpo&tab=samples&search=script")
    page.locator(".sample", has_text="<script>document.title=1</script>").wait_for()
    page.evaluate("to => { location.hash = to; }", "#runs")
    page.locator("tbody [data-run]", has_text="<img").wait_for()
    page.evaluate("to => { location.hash = to; }", f"#compare?runs={quote(name)},base/seed-0")
    page.locator("td", has_text=HOSTILE).first.wait_for()
    assert page.locator("#view img, #view script").count() == 0
    assert page.title() == "Compare · Fornax"


def wrong_addresses() -> list[str]:
    ids = ("", "nosuch", "../etc", "%00", "%E0%A4%A", "a/b/c/d", quote(HOSTILE), "launched/cluster")
    tabs = ("nosuch", "__proto__", "constructor", "%3Cb%3E", "images", "server", "quantization")
    values = (
        "x=nosuch",
        "smooth=-5",
        "smooth=1e99",
        "from=5&to=1",
        "from=NaN&to=Infinity",
        "from=a&to=b",
        "logy=yes",
        "names=%5B",
        "names=(%3F%3C",
        "from=1e300&to=1e301",
        "from=-1&to=-0.5",
    )
    samples = (
        "panes=nosuch",
        "panes=grpo%40-7",
        "panes=%40%40%40",
        "sample=-1",
        "sample=1e9",
        "order=best",
        "colour=pink",
        "search=%5B%5B",
        "panes=" + ",".join(["grpo"] * 40),
    )
    others = (
        "#",
        "#nosuch",
        "#__proto__",
        "##",
        "#%",
        "#runs?filter=%5B",
        "#runs?sort=nosuch",
        "#runs?group=nosuch",
        "#runs?columns=nosuch",
        "#runs?runs=nosuch",
        "#runs?sort=-",
        "#compare",
        "#compare?runs=nosuch",
        "#compare?runs=,,,%25",
        "#compare?runs=base/seed-0&config=%5B&allconfig=2",
    )
    return [
        *others,
        *(f"#run?id={each}" for each in ids),
        *(f"#run?id=base/seed-0&tab={each}" for each in tabs),
        *(f"#run?id=base/seed-0&{each}" for each in values),
        *(f"#run?id=grpo&tab=samples&{each}" for each in samples),
        "#run?id=launched&tab=goodput&from=9e9&to=9e10",
        "#run?id=unet&tab=images&step=999&wide=-4&search=%5B",
    ]


@pytest.mark.slow
def test_wrong_addresses_say_what_is_wrong(view: View) -> None:
    page = view("#runs")
    addresses = wrong_addresses()
    assert len(addresses) >= 50
    for address in addresses:
        page.evaluate("to => { location.hash = to; }", address)
        page.locator("#view[data-drawn]").wait_for()
        assert page.locator("h1").first.inner_text(), address
    page.evaluate("to => { location.hash = to; }", "#run?id=nosuch")
    page.locator("[role=alert]", has_text="There is no run “nosuch” here").wait_for()
    page.get_by_role("link", name="To the list of runs").click()
    for text in ("[", "(?<", "*", "a{9999999999}", "\\", HOSTILE):
        page.locator("input[data-search]").fill(text)
    page.locator("text=1 of 11").wait_for()  # one run is named like that


def test_keys_are_listed(view: View) -> None:
    page = view("#run?id=grpo&tab=samples")
    page.locator(".sample").first.wait_for()
    page.keyboard.press("?")
    assert "next sample" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    page.keyboard.press("r")
    page.locator("h1", has_text="Runs").wait_for()

"""The page of a profile, in a real browser, from a file."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.profiles import HOSTILE, made_comparison, made_profile

from fornax.config.errors import ProfileError
from fornax.profile import (
    Counters,
    Host,
    Profile,
    ServedBatch,
    ServedRequest,
    Serving,
    capture,
    read,
)
from fornax.profile.page import page_data, write_page

VIEWS = {
    "overview": "Step time by cause",
    "operations": "One run",
    "flame": "all operations",
    "roofline": "arithmetic intensity",
    "memory": "At the peak",
    "timeline": "Shift and drag",
    "graph": "operands",
    "host": "Input pipeline",
    "ranks": "Rank 1 (host-1) was the last in",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(made_profile(), tmp_path_factory.mktemp("page") / "page.html")


@pytest.mark.browser
def test_every_view_draws_and_names_stay_text(file: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(file)
    for number, (view, text) in enumerate(VIEWS.items()):
        page.keyboard.press(str(number + 1))
        page.locator("#panel").get_by_text(text).first.wait_for()
        assert page.url.endswith(f"#{view}")
        assert page.locator("img").count() == 0
    page.keyboard.press("1")
    page.get_by_text("The capture is truncated").wait_for()
    assert page.get_by_text(HOSTILE).count() >= 2


@pytest.mark.slow
@pytest.mark.browser
def test_a_real_capture_fills_every_view(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(write_page(_captured(tmp_path / "prof"), tmp_path / "page.html"))
    for number, view in enumerate([*VIEWS][:-1]):  # ranks: there is one
        page.keyboard.press(str(number + 1))
        page.locator(f"#panel[aria-labelledby=tab-{view}]").wait_for()
        page.locator("#panel").get_by_text(VIEWS[view]).first.wait_for()
    page.keyboard.press("2")
    page.locator("#panel[aria-labelledby=tab-operations]").wait_for()
    rows = page.locator("tbody tr")
    page.get_by_role("searchbox").fill("block/product")
    rows.first.click()
    page.locator("aside").get_by_text("test_page.py").first.wait_for()
    page.get_by_role("button", name="In the graph").click()
    page.locator("aside").get_by_text("jit_step").wait_for()
    page.get_by_role("button", name="On the time line").click()
    page.get_by_role("status").filter(has_text="match").wait_for()


@pytest.mark.browser
def test_a_capture_without_anything_says_so(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    nothing = dataclasses.replace(
        made_profile(ranks=2),
        names=(),
        rows=(),
        steps=(),
        operations=(),
        programs=(),
        memory=(),
        samples=(),
        host=Host(threads=(), collections=()),
        input=(),
        counters=Counters(),
    )
    page = open_page(write_page(nothing, tmp_path / "page.html"))
    for number in range(len(VIEWS)):
        page.keyboard.press(str(number + 1))
        page.locator("#panel .lead").first.wait_for()


def _captured(directory: Path) -> Profile:
    """Three steps of two layers and their gradient, on this machine."""
    import jax
    import jax.numpy as jnp

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("block"), jax.named_scope("product"):
            y = jnp.tanh(x @ weights) @ weights
        return (y * y).sum()

    @jax.jit
    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        return weights - 1e-3 * jax.grad(loss)(weights, x)

    weights, x = jnp.ones((128, 128)), jnp.ones((64, 128))
    step(weights, x).block_until_ready()
    with capture(directory):
        for number in range(3):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                weights = step(weights, x).block_until_ready()
    return read(directory)


@pytest.mark.browser
def test_operations_filter_sort_group_and_lead_elsewhere(
    file: Path, open_page: Callable[..., Any]
) -> None:
    page = open_page(f"{file.as_uri()}#operations?filter=fusion&sort=key")
    rows = page.locator("tbody tr")
    assert [rows.nth(at).locator("td").first.inner_text() for at in range(2)] == [
        "fusion.1",
        "fusion.5",
    ]
    assert rows.count() == 2
    page.get_by_role("button", name="Time").click()
    assert "sort=-seconds" in page.url
    page.get_by_label("By", exact=True).select_option("module")
    assert rows.count() == 3
    rows.filter(has_text="layers/mlp").click()
    page.locator("aside").get_by_text("all-reduce.4").wait_for()
    page.get_by_label("By", exact=True).select_option("op")
    rows.filter(has_text="dot.0").click()
    page.locator("aside").get_by_text("FLOP/byte").wait_for()
    page.get_by_role("button", name="On the time line").click()
    page.get_by_role("status").filter(has_text="of dot.0").wait_for()
    page.reload()
    page.get_by_role("status").filter(has_text="of dot.0").wait_for()


@pytest.mark.browser
def test_the_time_line_zooms_searches_and_selects(
    file: Path, open_page: Callable[..., Any]
) -> None:
    page = open_page(f"{file.as_uri()}#timeline")
    details, said = page.locator("aside"), page.get_by_role("status")
    canvas = page.get_by_role("application")
    canvas.click(position={"x": 300, "y": 12})
    canvas.hover(position={"x": 600, "y": 200})
    page.mouse.wheel(0, -800)
    for key in "wwdasw":
        page.keyboard.press(key)
    page.locator("#panel").press("Escape")
    page.wait_for_url(re.compile("from=.*to="))
    zoomed = page.url
    page.reload()
    assert page.url == zoomed
    page.keyboard.press("/")
    page.keyboard.type("^copy")
    said.filter(has_text="matches").wait_for()
    page.keyboard.press("Enter")
    details.get_by_text("copy.3").first.wait_for()
    first = said.inner_text()
    page.keyboard.press("Enter")
    assert said.inner_text() != first
    canvas.focus()
    before = details.inner_text()
    page.keyboard.press("ArrowRight")
    assert details.inner_text() != before
    page.get_by_role("searchbox").fill("(")
    page.locator("input[aria-invalid=true]").wait_for()


@pytest.mark.browser
def test_the_pointer_selects_and_measures(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    file = write_page(made_profile(ranks=1), tmp_path / "page.html")
    page = open_page(f"{file.as_uri()}#timeline?operation=3")  # an event of it fills the middle
    details, canvas = page.locator("aside"), page.get_by_role("application")
    chosen = details.inner_text()
    assert "copy.3" in chosen
    canvas.press("Escape")
    assert details.inner_text() == ""
    box = canvas.bounding_box()
    middle, row = box["x"] + 190 + (box["width"] - 190) / 2, box["y"] + 90
    page.mouse.click(middle, row)
    assert details.inner_text() == chosen
    page.keyboard.down("Shift")
    page.mouse.move(middle - 300, row)
    page.mouse.down()
    page.mouse.move(middle + 300, row, steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    details.get_by_role("heading", name=re.compile("^Span of")).wait_for()
    details.get_by_role("button", name="copy.3").click()
    page.wait_for_url(re.compile("#operations.operation=3"))


@pytest.mark.browser
def test_the_flame_graph_zooms_by_key_and_address(
    file: Path, open_page: Callable[..., Any]
) -> None:
    page = open_page(f"{file.as_uri()}#flame?at=forward/layers")
    page.get_by_role("treeitem", name="attention").first.focus()
    page.keyboard.press("Enter")
    assert page.url.endswith("at=forward%2Flayers%2Fattention")
    assert page.get_by_role("treeitem", name="mlp").count() == 0
    page.keyboard.press("Escape")
    assert page.get_by_role("treeitem", name="mlp").count() == 1
    page.get_by_role("searchbox").fill("^dot")
    page.get_by_role("status").filter(has_text="2 match").wait_for()


@pytest.mark.browser
def test_the_graph_is_walked_by_clicks(file: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{file.as_uri()}#graph?name=dot.2")
    page.get_by_role("button", name=re.compile("^fusion.1, ")).click()
    page.locator("aside").get_by_text("fusion.1").first.wait_for()
    assert page.get_by_role("button", name=re.compile("^fusion.5, ")).count() == 1
    page.go_back()
    page.locator("aside").get_by_text("dot.2").first.wait_for()


@pytest.mark.browser
def test_waits_and_counters_say_what_is_known_and_what_not(
    file: Path, open_page: Callable[..., Any]
) -> None:
    page = open_page(f"{file.as_uri()}#host?counter=cycles")
    waits = page.get_by_role("region", name="What threads waited for").locator("tbody tr")
    assert "engine/wait" in waits.first.inner_text()
    assert HOSTILE in waits.nth(1).inner_text()
    page.get_by_text("the lock of the interpreter").wait_for()
    page.get_by_text("Absent: instructions. Why: a reason with").wait_for()
    page.get_by_role("img", name="cycles over the capture").wait_for()
    page.get_by_label("Counter", exact=True).select_option("HBM read")
    page.get_by_role("img", name="HBM read over the capture").wait_for()
    page.wait_for_url(re.compile("counter=HBM"))
    counters = page.get_by_role("region", name="Hardware counters").locator("tbody tr")
    assert counters.count() == 6
    page.goto(f"{file.as_uri()}#host?counter=none")
    page.get_by_role("img", name="HBM read over the capture").wait_for()


@pytest.mark.browser
def test_a_servers_requests_and_batches_have_a_view(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    one = ServedRequest(
        rank=0,
        id=HOSTILE,
        model="",
        queued=1_000_000,
        started=3_000_000,
        first_token=9_000_000,
        ended=29_000_000,
        ending="finished",
        prompt_tokens=40,
        tokens=11,
        preempted=0,
    )
    late = dataclasses.replace(one, id="late", first_token=None, ended=None, ending="open")
    batch = ServedBatch(
        rank=0,
        kind="decode",
        step=101,
        begin=4_000_000,
        duration=1_000,
        sequences=2,
        most_sequences=8,
        rows=2,
        places=4,
        most_rows=None,
        steps=3,
    )
    served = Serving(requests=(one, late), batches=(batch, batch))
    made = dataclasses.replace(made_profile(ranks=1), serving=served)
    page = open_page(f"{write_page(made, tmp_path / 'page.html').as_uri()}#serving")
    requests = page.get_by_role("region", name="Requests").locator("tbody tr")
    assert [cell.inner_text() for cell in requests.first.locator("td").all()] == [
        HOSTILE, "1 ms", "2 ms", "6 ms", "20 ms", "40", "11", "2 ms", "—", "finished",
    ]  # fmt: skip
    assert "—" in requests.nth(1).locator("td").nth(3).inner_text()
    batches = page.get_by_role("region", name="Batches").locator("tbody tr")
    assert "2 of 8" in batches.first.inner_text()
    page.get_by_text("25 % (sequences, of their limit)").wait_for()
    requests.first.get_by_role("button").click()
    page.wait_for_url(re.compile("#timeline.*from=1000000"))


@pytest.mark.browser
def test_a_comparison_is_shown(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    made = write_page(
        made_profile(),
        tmp_path / "page.html",
        compared=made_comparison(),
    )
    page = open_page(made)
    page.get_by_role("tab", name="Comparison").click()
    page.get_by_role("heading", name="Slower than allowed").wait_for()
    rows = page.locator("tbody tr")
    assert "1.5 [1.35, 1.66]" in rows.first.inner_text()
    assert HOSTILE in rows.nth(1).inner_text()
    page.get_by_role("button", name="layers/mlp: fusion.5").click()
    page.locator("aside").get_by_text("fusion.5").first.wait_for()


@pytest.mark.browser
def test_addresses_that_name_nothing_show_their_view(
    file: Path, open_page: Callable[..., Any]
) -> None:
    page = open_page(file)
    for view, query in (
        ("timeline", "from=a&to=-1&step=x&operation=999&find=("),
        ("operations", "operation=-1&by=none&sort=none&filter=("),
        ("flame", "at=none/none"),
        ("graph", "name=none&program=77"),
        ("memory", "program=9"),
        ("roofline", "%E0%A4%A"),
    ):
        page.goto(f"{file.as_uri()}#{view}?{query}")
        page.locator(f"#panel[aria-labelledby=tab-{view}]").get_by_text(
            VIEWS[view]
        ).first.wait_for()
    page.goto(f"{file.as_uri()}#%E0%A4%A")
    page.locator("#panel[aria-labelledby=tab-overview]").wait_for()


@pytest.mark.browser
def test_a_phone_scrolls_in_one_direction(file: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(file, viewport={"width": 390, "height": 844})
    for number in range(len(VIEWS)):
        page.keyboard.press(str(number + 1))
        page.locator("#panel > *").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_data_is_json_and_times_add_up() -> None:
    data = json.loads(json.dumps(page_data(made_profile())))
    op = sum(row["seconds"] for row in data["tables"]["op"]["rows"])
    for by in ("class", "module", "source"):
        assert sum(row["seconds"] for row in data["tables"][by]["rows"]) == pytest.approx(op)
    assert sum(row["share"] for row in data["tables"]["op"]["rows"]) == pytest.approx(1)


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "page.html", tmp_path, Path()):
        with pytest.raises(ProfileError, match="name a file in a folder"):
            write_page(made_profile(), path)


def test_a_capture_of_more_than_a_million_events_leaves_out_the_shortest() -> None:
    data = page_data(made_profile(events=1_100_000))
    kept = sum(row["count"] for row in data["rows"])
    left = sum(row["left_out"] for row in data["rows"])
    assert kept + left == 1_100_000
    assert 990_000 < kept <= 1_000_000
    assert data["shortest"] > 0
    assert sum(row["count"] for row in data["tables"]["op"]["rows"]) == 550_000  # the devices'

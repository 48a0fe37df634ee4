"""The page while its runs continue, fail, and receive requests; and as one file."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.dashboard.example_runs import example_runs, lines, metrics
from tests.unit.dashboard.conftest import Site, served

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with served(example_runs(tmp_path_factory.mktemp("live") / "runs")) as found:
        yield found


def append(run: Path, record: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def latest(page: Any, text: str) -> None:
    page.locator("figure[data-name=loss] figcaption", has_text=text).wait_for()


@pytest.mark.slow
def test_appended_lines_show(site: Site, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{site.base}/#run?id=base/seed-0")
    latest(page, "at 300")
    page.locator(".state.live").wait_for()
    for step in range(301, 306):
        append(site.folder / "base/seed-0", metrics(step)[-1])
        latest(page, f"at {step}")


@pytest.mark.slow
def test_a_run_may_be_rewritten_torn_and_deleted(site: Site, open_page: Callable[..., Any]) -> None:
    run = site.folder / "base/seed-1"
    page = open_page(f"{site.base}/#run?id=base/seed-1")
    latest(page, "at 300")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 301, "loss": 1.5, "ti')
        file.flush()
        time.sleep(0.5)
        file.write('me": 1763683370.0}\n\0\0\xff binary {"step"\n')
    latest(page, "1.5 at 301")
    lines(run / "metrics.jsonl", metrics(40, seed=9))
    latest(page, "at 40")
    for path in sorted(run.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run.rmdir()
    page.evaluate("location.hash = '#runs'")
    page.locator("text=10 runs").wait_for()
    lines(run / "metrics.jsonl", metrics(7, seed=9))
    page.locator("text=11 runs").wait_for()


@pytest.mark.slow
def test_the_page_comes_back_with_the_server(site: Site, browser: Any) -> None:
    with served(site.folder) as first:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(f"{first.base}/#run?id=grpo")
        page.locator(".state.live").wait_for()
    page.locator(".state.lost").wait_for()
    with served(site.folder, port=int(first.base.rpartition(":")[2])):
        page.locator(".state.live").wait_for()
        append(
            site.folder / "grpo", {"step": 25, "reward": 0.5, "loss": 0.125, "time": time.time()}
        )
        latest(page, "0.125 at 25")
    page.close()


@pytest.mark.slow
def test_an_export_shows_the_same_views(
    site: Site, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "runs.html"
    names = ["base/seed-0", "base/rate-0.08", "grpo", "launched", "unet", "server", "llama-w4"]
    path.write_text(site.get("/export", params={"run": names}).text)
    page = open_page(path)
    page.locator("text=7 runs").wait_for()
    page.locator(".state", has_text="exported").wait_for()
    for fragment, there in (
        ("#compare?runs=base/seed-0,base/rate-0.08&x=time", "figure[data-name=loss] canvas"),
        ("#run?id=launched&tab=goodput", "text=3 starts, 2 faults"),
        ("#run?id=grpo&tab=samples&panes=grpo%4010,grpo%4020", ".pane:nth-child(2) .sample"),
        ("#run?id=unet&tab=images", ".images img >> nth=11"),
        ("#run?id=base/seed-0&tab=memory", ".roofline circle >> nth=3"),
        ("#run?id=server", "text=cache used >> nth=0"),
        ("#run?id=llama-w4", "text=model.layers.3.self_attn.o_proj.weight"),
        ("#run?id=base/seed-0&tab=files", "text=metrics.jsonl"),
    ):
        page.evaluate("to => { location.hash = to; }", fragment)
        page.locator(there).first.wait_for()
        assert page.locator("[role=alert]").count() == 0, fragment
    loaded = page.evaluate("[...document.images].every((each) => each.src.startsWith('data:'))")
    assert loaded


@pytest.mark.slow
def test_a_list_is_exported_alone(
    site: Site, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "list.html"
    path.write_text(site.get("/export").text)
    page = open_page(path)
    page.locator(".spark polyline").first.wait_for()
    page.get_by_role("link", name="grpo", exact=True).click()
    page.locator("[role=alert]", has_text="open the runs with").wait_for()


@pytest.mark.slow
def test_requests_need_the_token_and_reach_the_run(
    site: Site, browser: Any, tmp_path: Path
) -> None:
    with served(site.folder, "--control") as controlled:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(f"{controlled.base}/#run?id=base/seed-2")
        token = page.locator("dialog input")
        token.fill("wrong")
        page.get_by_role("button", name="Use it").click()
        page.locator("dialog input").wait_for()
        token.fill(controlled.token)
        page.get_by_role("button", name="Use it").click()
        page.locator("figure[data-name=loss] canvas").wait_for()
        page.locator(".state.live").wait_for()
        page.get_by_role("spinbutton").fill("3")
        page.get_by_role("button", name="Profile").click()
        page.locator(".toast", has_text="Profile asked").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("spinbutton").fill("0")
        page.get_by_role("button", name="Profile").click()
        page.locator(".toast", has_text="from 1 to").wait_for()
        assert controlled.token not in page.url
        page.close()
        page = browser.new_page()
        page.goto(f"{controlled.base}/#token={controlled.token}")
        page.locator("tr.choice").first.wait_for()
        assert controlled.token not in page.url
        page.close()
    (asked,) = (site.folder / "base/seed-2/requests").iterdir()
    assert json.loads(asked.read_text())["steps"] == 3

"""`fornax ui` over example runs and a real one, looked at in a real browser."""

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.dashboard.example_runs import example_runs
from tests.unit.dashboard.conftest import Site, served
from tests.unit.dashboard.tiny import train_tiny

AXE = Path(__file__).parents[2] / "data/axe/axe.min.js.gz"
"""axe-core 4.14.1 (npm), MPL-2.0; its source is at https://github.com/dequelabs/axe-core."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The page over example runs of every kind."""
    with served(example_runs(tmp_path_factory.mktemp("site") / "runs")) as found:
        yield found


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Site]:
    """The page over a run that the trainer made."""
    with served(train_tiny(tmp_path).parent) as found:
        yield found


@pytest.fixture
def view(site: Site, open_page: Callable[..., Any]) -> Callable[..., Any]:
    """Opens the page at a fragment."""

    def opened(fragment: str = "", **options: Any) -> Any:
        page = open_page(f"{site.base}/{fragment}", **options)
        page.locator("h1").first.wait_for()
        return page

    return opened


@pytest.fixture(scope="session")
def serious() -> Callable[[Any], list[str]]:
    """What axe finds on a page that is serious or worse."""
    source = gzip.decompress(AXE.read_bytes()).decode()

    def found(page: Any) -> list[str]:
        page.evaluate(source)
        answer = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{page.url}: {each['id']}: {node['html'][:200]} {node['failureSummary']}"
            for each in answer["violations"]
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"][:3]
        ]

    return found

"""The pages of the documentation: every guide is listed, and links between pages resolve."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.pages import DOCS, ROOT, WRITTEN, is_generated

_LINK = re.compile(r"\[[^]\[]*(?:\[[^]]*\][^]\[]*)*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^([ \t]*)(```+).*?^\1?[ \t]*\2[ \t]*$", re.M | re.S)


def _anchors(page: Path) -> set[str]:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?)\s*$", text, re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading).lower()
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip())
        while slug in found:
            slug += "_1"
        found.add(slug)
    return found


@pytest.mark.parametrize(
    "page", [*WRITTEN, ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_resolve(page: Path):
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))
    for link in _LINK.findall(text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if is_generated(target):
            continue
        assert target.exists(), f"{page.relative_to(ROOT)}: {link} names no file"
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), f"{page.relative_to(ROOT)}: {link} has no heading"


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags of Python names matter to mkdocs alone."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def _listed(nav: Any) -> list[str]:
    """The pages that a part of the navigation names, in order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in _listed(entry)]


def test_front_page_and_navigation_list_every_guide():
    guides = {f"guides/{page.name}" for page in (DOCS / "guides").glob("*.md")}
    front = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = {link.partition("#")[0] for link in _LINK.findall(front)}
    assert guides - linked == set()
    nav = _listed(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"])
    assert guides - set(nav) == set()
    assert len(nav) == len(set(nav))

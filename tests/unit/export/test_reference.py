"""The format's page is true: its own loader, which knows nothing else, reads bundles."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def loader():
    text = (ROOT / "docs" / "reference" / "bundle.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(compile(code, "bundle.md", "exec"), names)
    return names


def test_the_pages_loader_runs_a_bundle(loader):
    loader["run_golden"](ROOT / "tests" / "data" / "bundles" / "jax-0.12.0.1")


def test_the_pages_seal_is_ours(loader, sealed):
    assert loader["read_manifest"](sealed)["metadata"] == {"note": "tiny"}

"""The forms for issues keep to GitHub's format, and name files that are there."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_what_github_requires(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    inputs = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in inputs} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(part["attributes"]["label"] for part in inputs)
    ids = [part["id"] for part in inputs]
    assert len(set(ids)) == len(ids) > 0


def test_what_contributors_are_sent_to_exists() -> None:
    pages = [*FORMS, ROOT / ".github" / "pull_request_template.md", ROOT / "CONTRIBUTING.md"]
    named = {name for page in pages for name in re.findall(r"[\w./-]+\.md", page.read_text())}
    assert "docs/guides/troubleshooting.md" in named
    assert all((ROOT / name).is_file() for name in named)

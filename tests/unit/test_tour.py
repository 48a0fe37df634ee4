"""The tour of the code names files and definitions that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "fornax"
STEPS = re.split(r"\n(?=\d\. |## )", (ROOT / "docs" / "design" / "tour.md").read_text())


def _find(name: str, folders: list[Path]) -> Path | None:
    """A path below the source, or a file beside the ones named before it in the same step."""
    places = [SOURCE / name, *(folder / name for folder in reversed(folders))]
    return next((place for place in places if place.exists()), None)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.split("\n")[0][:40])
def test_the_tour_names_what_is_there(step: str) -> None:
    folders: list[Path] = []
    for name in re.findall(r"`([a-z0-9_/]+(?:\.py|/))`", step):
        path = _find(name, folders)
        assert path is not None, f"{name} is not below src/fornax nor beside what comes before it"
        folders.append(path if path.is_dir() else path.parent)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.split("\n")[0][:40])
def test_what_stands_in_parentheses_is_defined_in_the_file_before(step: str) -> None:
    for name, defined in re.findall(r"`([a-z0-9_/]+\.py)` \(`(\w+)(?:\.\w+)?`\)", step):
        path = _find(name, [SOURCE / "train", SOURCE / "llm" / "server"])
        if path is None:
            path = next(SOURCE.rglob(name.rpartition("/")[2]))
        assert re.search(rf"(?:def|class) {defined}\b", path.read_text()), f"{name}: {defined}"
